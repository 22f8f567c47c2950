#!/usr/bin/env bash
# Submits a run on GPU nodes to SLURM: one process per node, which uses all GPUs of its node.
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat << 'END'
Submits a run on GPU nodes to SLURM, with one process per node. The project, .venv and the workdir must be on a file
system that every node sees. SLURM queues the job again when it is preempted or a node fails, and the run resumes from
the last checkpoint. Two minutes before its time limit a job saves and is queued again, too.

  launch/slurm.sh --nodes N --gpus N [OPTIONS] -- --config=FILE --workdir=FOLDER [--config.FIELD=VALUE …]

  --nodes N          number of nodes
  --gpus N           GPUs per node
  --cpus N           CPU cores per node (default: 16)
  --name NAME        name of the job (default: zeroplay_jax)
  --partition NAME   partition (default: the cluster's)
  --account NAME     account (default: yours)
  --time LIMIT       time limit, for example 24:00:00 (default: the partition's)
  --setup COMMAND    command that runs once on the first node before the run
  --logs FOLDER      folder of the logs (default: runs/slurm)
  --dry-run          print the commands in order and do nothing

Example, after launch/install.sh cuda13 on one of the nodes:
  launch/slurm.sh --nodes 2 --gpus 8 --time 24:00:00 -- --config=configs/drzero.py \
    --workdir=/share/runs/zero --policy=/share/Qwen2.5-3B-Instruct --index=/share/wiki18_e5 \
    $(zeroplay plan --config=configs/drzero.py --machine='2*h100x8')
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
checked "${option[nodes]}*${option[gpus]}" --nofiles
if [[ ${option[dry-run]} == off ]]; then
  command -v sbatch > /dev/null || fail "$script: sbatch is not installed on this machine"
  [[ ${program[0]} != .venv/bin/python || -x .venv/bin/python ]] ||
    fail "$script: .venv is missing: run 'launch/install.sh cuda13'"
fi

job=(sbatch --job-name "${option[name]}" --nodes "${option[nodes]}" --ntasks-per-node 1
  --gpus-per-node "${option[gpus]}" --cpus-per-task "${option[cpus]}" --requeue --signal TERM@120 --open-mode append
  --chdir "$PWD" --output "${option[logs]}/%x-%j.log")
for name in partition account time; do
  [[ -z ${option[$name]} ]] || job+=("--$name" "${option[$name]}")
done
# Under SLURM, JAX uses one GPU per process unless the device ids are set. srun does not inherit --cpus-per-task.
ids=$(seq -s , 0 $((option[gpus] - 1)))
step=(srun --kill-on-bad-exit=1 --cpus-per-task "${option[cpus]}" env "JAX_LOCAL_DEVICE_IDS=$ids" "${program[@]}")
command=$(quote "${step[@]}")
[[ -z ${option[setup]} ]] || command="${option[setup]} && $command"
# Exit status 75: the run was asked to end and has saved. SLURM queues a preempted job again by itself.
# shellcheck disable=SC2016
command+='; status=$?; if [ $status = 75 ]; then scontrol requeue $SLURM_JOB_ID; fi; exit $status'
run mkdir -p "${option[logs]}"
run "${job[@]}" --wrap "$command"
