#!/usr/bin/env bash
# A run on a GKE cluster of TPU slices through XPK (pip install xpk; it needs gcloud, kubectl and docker beside it, and
# to be new enough to know --restart-on-exit-codes).
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat << 'END'
A run as an XPK workload on a GKE cluster. When pods are preempted or die, GKE starts all of them again with the same
command, which goes on from the last checkpoint.

  launch/xpk.sh --cluster NAME --name NAME --zone ZONE --type TYPE [OPTIONS] \
    -- --config=FILE --workdir=FOLDER [--config.FIELD=VALUE …]

  --cluster NAME      made with `xpk cluster create`; the shared folder is attached with `xpk storage attach`
  --name NAME         of the workload
  --zone ZONE         of the cluster, such as us-west4-a
  --type TYPE         such as v5litepod-16
  --project PROJECT   (gcloud's own)
  --slices N          (1)
  --base IMAGE        with Python 3.11 to 3.13 (python:3.12); the project is added, its requirements are installed
                      at the start
  --image IMAGE       instead: holds project and requirements already, in its working folder
  --setup COMMAND     run in every container before the run
  --restarts N        how often GKE starts the pods again (20)
  --again             delete the workload of that name first, where one has ended
  --dry-run           print the commands in their order and do nothing

Example, one slice of four hosts with four chips each:
  launch/xpk.sh --cluster tpus --name zero --zone us-west4-a --type v5litepod-16 \
    -- --config=configs/drzero.py --config.policy.path=/share/Qwen2.5-3B-Instruct --workdir=/share/runs/zero \
    --config.mesh.replica=4 --config.mesh.fsdp=2 --config.mesh.model=2
END
}

option=([cluster]='' [name]='' [zone]='' [type]='' [project]='' [slices]=1 [base]=python:3.12 [image]='' [setup]=''
  [restarts]=20 [again]=off)
parse "$@"
needs cluster '[a-z]([-a-z0-9]{0,38}[a-z0-9])?' 'a name of small letters, digits and hyphens'
needs name '[a-z]([-a-z0-9]{0,38}[a-z0-9])?' 'a name of at most 40 small letters, digits and hyphens'
needs zone '[a-z]+-[a-z]+[0-9]+-[a-z]' 'a zone such as us-west4-a'
needs type '[a-z0-9]+-[0-9]+' 'an accelerator type such as v5litepod-16'
needs slices '[1-9][0-9]{0,3}' 'a number'
needs restarts '[0-9]{1,4}' 'a number'
train python --config.distributed.mode=auto
shared_workdir
[[ ${option[dry-run]} == on ]] || command -v xpk > /dev/null || fail "$script: xpk is not installed on this machine"

name=${option[name]}
where=(--cluster "${option[cluster]}" --workload "$name" --zone "${option[zone]}")
[[ -z ${option[project]} ]] || where+=(--project "${option[project]}")
command=$(quote "${program[@]}")
[[ -z ${option[setup]} ]] || command="${option[setup]} && $command"
stage=${TMPDIR:-/tmp}/zeroplay_jax.$name
if [[ -n ${option[image]} ]]; then
  image=(--docker-image "${option[image]}")
else
  # Of what lies here only the project goes into the image.
  run rm -rf "$stage"
  run mkdir -p "$stage"
  archive "$stage.tgz"
  run tar -xzf "$stage.tgz" -C "$stage"
  image=(--base-docker-image "${option[base]}" --script-dir "$stage")
  command="pip install --quiet -r requirements.txt 'jax[tpu]' && $command"
fi
# By itself XPK starts again what a signal ended. A process that lost another one may also end with a plain 1.
[[ ${option[again]} == off ]] || run xpk workload delete "${where[@]}" --force
run xpk workload create "${where[@]}" --tpu-type "${option[type]}" --num-slices "${option[slices]}" "${image[@]}" \
  --max-restarts "${option[restarts]}" --restart-on-exit-codes 1 --command "$command"
