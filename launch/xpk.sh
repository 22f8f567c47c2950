#!/usr/bin/env bash
# Creates a run as an XPK workload on a GKE cluster of TPU slices. Needs xpk (pip install xpk; a version with
# --restart-on-exit-codes), gcloud, kubectl and docker.
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat << 'END'
Creates a run as an XPK workload on a GKE cluster. When pods are preempted or die, GKE restarts all of them with the
same command, and the run resumes from the last checkpoint.

  launch/xpk.sh --cluster NAME --name NAME --zone ZONE --type TYPE [OPTIONS] \
    -- --config=FILE --workdir=FOLDER [--config.FIELD=VALUE …]

  --cluster NAME      cluster from `xpk cluster create`, with the shared folder attached by `xpk storage attach`
  --name NAME         name of the workload
  --zone ZONE         zone of the cluster, for example us-west4-a
  --type TYPE         accelerator type, for example v5litepod-16
  --project PROJECT   project (default: gcloud's)
  --slices N          number of slices (default: 1)
  --base IMAGE        base image with Python 3.11 to 3.13 (default: python:3.12); the project is added to it, and its
                      requirements are installed at the start
  --image IMAGE       used instead of --base: an image with project and requirements in its working folder, those of
                      requirements-bucket.txt included if workdir or files are in a bucket
  --setup COMMAND     command that runs in every container before the run
  --restarts N        number of times that GKE restarts the pods (default: 20)
  --again             delete an ended workload of that name first
  --dry-run           print the commands in order and do nothing

Example, one slice of four hosts with four chips each:
  launch/xpk.sh --cluster tpus --name zero --zone us-west4-a --type v5litepod-16 \
    -- --config=configs/drzero.py --workdir=/share/runs/zero --config.checkpoint.every=10 \
    --policy=/share/Qwen2.5-3B-Instruct --index=/share/wiki18_e5 \
    $(zeroplay plan --config=configs/drzero.py --machine=v5litepod-16)
END
}

option=([cluster]='' [name]='' [zone]='' [type]='' [project]='' [slices]=1 [base]=python:3.12 [image]='' [setup]=''
  [restarts]=20 [again]=off)
parse "$@"
needs cluster '[a-z]([-a-z0-9]{0,38}[a-z0-9])?' 'a name of lower-case letters, digits and hyphens'
needs name '[a-z]([-a-z0-9]{0,38}[a-z0-9])?' 'a name of at most 40 lower-case letters, digits and hyphens'
needs zone '[a-z]+-[a-z]+[0-9]+-[a-z]' 'a zone such as us-west4-a'
needs type '[a-z0-9]+-[0-9]+' 'an accelerator type such as v5litepod-16'
needs slices '[1-9][0-9]{0,3}' 'a number'
needs restarts '[0-9]{1,4}' 'a number'
train python --config.distributed.mode=auto
shared_workdir
checked "$(tpu_devices "${option[slices]}")" --nofiles
[[ ${option[dry-run]} == on ]] || command -v xpk > /dev/null || fail "$script: xpk is not installed on this machine"

name=${option[name]}
where=(--cluster "${option[cluster]}" --workload "$name" --zone "${option[zone]}")
[[ -z ${option[project]} ]] || where+=(--project "${option[project]}")
command=$(quote "${program[@]}")
[[ -z ${option[setup]} ]] || command="${option[setup]} && $command"
if [[ -n ${option[image]} ]]; then
  image=(--docker-image "${option[image]}")
else
  # A folder of its own, so that only the project's files go into the image.
  make_scratch
  run mkdir "$scratch/project"
  archive "$scratch/project.tgz"
  run tar -xzf "$scratch/project.tgz" -C "$scratch/project"
  image=(--base-docker-image "${option[base]}" --script-dir "$scratch/project")
  # The same packages as launch/install.sh tpu.
  command="pip install --quiet -r requirements.txt 'jax[tpu]' -r requirements-bucket.txt && $command"
fi
# XPK restarts a process that a signal ended. A process that lost its peer may exit with status 1, and one that saved
# after SIGTERM with 75, hence the option.
[[ ${option[again]} == off ]] || run xpk workload delete "${where[@]}" --force
run xpk workload create "${where[@]}" --tpu-type "${option[type]}" --num-slices "${option[slices]}" "${image[@]}" \
  --max-restarts "${option[restarts]}" --restart-on-exit-codes 1,75 --command "$command"
