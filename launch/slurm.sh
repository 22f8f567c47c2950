#!/usr/bin/env bash
# A run on GPU nodes under SLURM: one process per node, which drives all GPUs of its node.
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat << 'END'
A run on GPU nodes under SLURM, one process per node. Project, .venv and workdir lie on a file system that every node
sees. A job whose node fails or that is preempted is queued again, and goes on from the last checkpoint.

  launch/slurm.sh --nodes N --gpus N [OPTIONS] -- --config=FILE --workdir=FOLDER [--config.FIELD=VALUE …]

  --nodes N          nodes
  --gpus N           GPUs of each node
  --cpus N           processor cores of each node that the process gets (16)
  --name NAME        of the job (zeroplay_jax)
  --partition NAME   (the cluster's own)
  --account NAME     (yours)
  --time LIMIT       such as 24:00:00 (the partition's own)
  --setup COMMAND    run once on the first node before the run
  --logs FOLDER      (runs/slurm)
  --dry-run          print the commands in their order and do nothing

Example, after launch/install.sh cuda13 on a node like those:
  launch/slurm.sh --nodes 2 --gpus 8 --time 24:00:00 -- --config=configs/drzero.py \
    --config.policy.path=/share/Qwen2.5-3B-Instruct --workdir=/share/runs/zero \
    --config.mesh.replica=2 --config.mesh.fsdp=4 --config.mesh.model=2
END
}

option=([nodes]='' [gpus]='' [cpus]=16 [name]=zeroplay_jax [partition]='' [account]='' [time]='' [setup]=''
  [logs]=runs/slurm)
parse "$@"
needs nodes '[1-9][0-9]{0,3}' 'a number of nodes'
needs gpus '[1-9][0-9]?' 'the number of GPUs of a node'
needs cpus '[1-9][0-9]{0,3}' 'a number of cores'
needs name '[A-Za-z0-9_.-]+' 'a name of letters, digits, dots, hyphens and underscores'
[[ -z ${option[time]} ]] || needs time '([0-9]+-)?[0-9]+(:[0-9]+){0,2}' 'a time limit such as 24:00:00'
train .venv/bin/python --config.distributed.mode=auto
shared_workdir
if [[ ${option[dry-run]} == off ]]; then
  command -v sbatch > /dev/null || fail "$script: sbatch is not installed on this machine"
  [[ ${program[0]} != .venv/bin/python || -x .venv/bin/python ]] ||
    fail "$script: there is no .venv yet; 'launch/install.sh cuda13' makes it"
fi

job=(sbatch --job-name "${option[name]}" --nodes "${option[nodes]}" --ntasks-per-node 1
  --gpus-per-node "${option[gpus]}" --cpus-per-task "${option[cpus]}" --requeue --open-mode append
  --chdir "$PWD" --output "${option[logs]}/%x-%j.log")
for name in partition account time; do
  [[ -z ${option[$name]} ]] || job+=("--$name" "${option[$name]}")
done
# Left alone, JAX takes one GPU per process under SLURM. srun does not take over the job's cores by itself.
ids=$(seq -s , 0 $((option[gpus] - 1)))
step=(srun --kill-on-bad-exit=1 --cpus-per-task "${option[cpus]}" env "JAX_LOCAL_DEVICE_IDS=$ids" "${program[@]}")
command=$(quote "${step[@]}")
[[ -z ${option[setup]} ]] || command="${option[setup]} && $command"
run mkdir -p "${option[logs]}"
run "${job[@]}" --wrap "$command"
