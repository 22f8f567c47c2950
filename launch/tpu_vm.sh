#!/usr/bin/env bash
# Runs on a TPU slice, from a machine that stays up: requests the slice, installs the project, runs it, and requests
# another slice after a preemption. Uses gcloud only.
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat << 'END'
Runs on a Cloud TPU slice until the run succeeds. When the slice is preempted, the script requests a new one, and the
same command resumes from the last checkpoint. Start the script on a machine that stays up, for example in tmux.

  launch/tpu_vm.sh --name NAME --zone ZONE --type TYPE [OPTIONS] \
    -- --config=FILE --workdir=FOLDER [--config.FIELD=VALUE …]

  --name NAME         name of the queued resource and of its node
  --zone ZONE         zone, for example us-west4-a
  --type TYPE         accelerator type, for example v5litepod-16
  --runtime VERSION   software version of the VMs (default: by TYPE v2-alpha-tpuv5-lite, v2-alpha-tpuv5 or
                      v2-alpha-tpuv6e)
  --project PROJECT   project (default: gcloud's)
  --on-demand         request an on-demand slice instead of a spot slice
  --setup COMMAND     command that runs on every worker before the run, for example to mount the shared folder
  --retries N         retries after failures in a row on a healthy slice (default: 3)
  --poll SECONDS      time between two checks of the slice (default: 60)
  --delete            delete the slice when the run has succeeded
  --dry-run           print the commands in order and do nothing

Example, four hosts of four chips, with the files on a network share:
  launch/tpu_vm.sh --name zero --zone us-west4-a --type v5litepod-16 \
    --setup 'sudo mkdir -p /mnt/share && (mountpoint -q /mnt/share || sudo mount 10.0.0.2:/share /mnt/share)' \
    -- --config=configs/drzero.py --workdir=/mnt/share/runs/zero --config.checkpoint.every=10 \
    --policy=/mnt/share/Qwen2.5-3B-Instruct --index=/mnt/share/wiki18_e5 \
    $(zeroplay plan --config=configs/drzero.py --machine=v5litepod-16)
END
}

option=([name]='' [zone]='' [type]='' [runtime]='' [project]='' [on-demand]=off [setup]='' [retries]=3 [poll]=60
  [delete]=off)
parse "$@"
needs name '[a-z]([-a-z0-9]{0,60}[a-z0-9])?' 'a name of lower-case letters, digits and hyphens'
needs zone '[a-z]+-[a-z]+[0-9]+-[a-z]' 'a zone such as us-west4-a'
needs type '[a-z0-9]+-[0-9]+' 'an accelerator type such as v5litepod-16'
needs retries '[0-9]{1,4}' 'a number'
needs poll '[0-9]{1,5}' 'a number of seconds'
case ${option[runtime]:-${option[type]}} in
  v5litepod-*) option[runtime]=v2-alpha-tpuv5-lite ;;
  v5p-*) option[runtime]=v2-alpha-tpuv5 ;;
  v6e-*) option[runtime]=v2-alpha-tpuv6e ;;
esac
needs runtime '[a-z0-9.-]+' 'the software version of the VMs; there is no default for this --type'
train .venv/bin/python --config.distributed.mode=auto
shared_workdir
checked "$(tpu_devices 1)" --nofiles
[[ ${option[dry-run]} == on ]] || command -v gcloud > /dev/null || fail "$script: gcloud is not installed on this machine"

name=${option[name]}
where=(--zone "${option[zone]}")
[[ -z ${option[project]} ]] || where+=(--project "${option[project]}")
queued=(gcloud compute tpus queued-resources)
remove=("${queued[@]}" delete "$name" "${where[@]}" --force --quiet)
# Keep-alive messages, so that the connection ends when the host is gone.
alive=('--ssh-flag=-o ServerAliveInterval=30' '--ssh-flag=-o ServerAliveCountMax=4')
make_scratch
file=$scratch/project.tgz

# Runs a command on every worker, in its home folder.
everywhere() {
  run gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=all "${alive[@]}" --command "$1"
}

create() {
  local tier=(--spot)
  [[ ${option[on-demand]} == off ]] || tier=()
  run "${queued[@]}" create "$name" "${where[@]}" --node-id "$name" --accelerator-type "${option[type]}" \
    --runtime-version "${option[runtime]}" "${tier[@]}"
}

delete() {
  run "${remove[@]}"
}

# Prints the state of the queued resource: `none` when it does not exist, `unknown` when the query fails.
state() {
  local answer
  if answer=$("${queued[@]}" describe "$name" "${where[@]}" '--format=value(state.state)' 2>&1); then
    tail -n 1 <<< "$answer"
  elif [[ $answer == *NOT_FOUND* ]]; then
    echo none
  else
    echo unknown
    say "cannot query the state of $name: ${answer##*$'\n'}"
  fi
}

node_state() {
  gcloud compute tpus tpu-vm describe "$name" "${where[@]}" '--format=value(state)' 2> /dev/null || echo unknown
}

install_and_run() {
  archive "$file" &&
    # A first connection to one worker creates the SSH key; parallel connections would each try to create it.
    run gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=0 --command true &&
    run gcloud compute tpus tpu-vm scp "$file" "$name:zeroplay_jax.tgz" "${where[@]}" --worker=all &&
    # A run whose connection broke may still hold the chips.
    everywhere "pkill -9 -f '[z]eroplay_jax.main'; mkdir -p zeroplay_jax && tar -xzf zeroplay_jax.tgz -C zeroplay_jax && \
zeroplay_jax/launch/install.sh tpu" &&
    { [[ -z ${option[setup]} ]] || everywhere "${option[setup]}"; } &&
    everywhere "set -o pipefail; cd zeroplay_jax && $(quote "${program[@]}") 2>&1 | tee -a ~/zeroplay_jax.log"
}

if [[ ${option[dry-run]} == on ]]; then
  echo '# request the slice'
  create
  echo '# once it is active: copy the project, install, run'
  install_and_run
  echo '# after a preemption, before the next request; with --delete also at the end'
  delete
  exit 0
fi

failures=0
failed() {
  failures=$((failures + 1))
  ((failures <= option[retries])) || fail "$1, $failures times in a row: fix the cause and repeat the command." \
    "The slice may still exist and cost money; delete it with: $(quote "${remove[@]}")"
  say "$1; retries in ${option[poll]} s"
}

# Ends with exit status $1, that of the run.
stopped() {
  say "$2"
  exit "$1"
}

while :; do
  queued_state=$(state)
  case $queued_state in
    none)
      say "requests $name, ${option[type]}"
      create || failed 'the request for the slice failed'
      ;;
    ACTIVE)
      case $(node_state) in
        READY)
          code=0
          install_and_run || code=$?
          if ((code == 0)); then
            say 'the run has succeeded'
            [[ ${option[delete]} == off ]] || delete
            exit 0
          fi
          # Exit status 2: the run refused its flags or files. A retry would be refused again.
          ((code != 2)) || fail 'the run was refused, see its last line above; the slice still exists and costs money'
          # Exit statuses 3 and 4: the run trained nothing, or an alarm stopped it. A retry would end in the same way.
          ((code != 3 && code != 4)) ||
            stopped "$code" 'the run stopped itself, see its last line above; the slice still exists and costs money'
          # Exit status 75: the run was asked to end and has saved. Nothing is lost by trying at once.
          if ((code == 75)); then
            say 'the run was asked to end and has saved'
            failures=0
            continue
          fi
          sleep "${option[poll]}"
          if [[ $(state) == ACTIVE && $(node_state) == READY ]]; then
            failed "the run failed on a healthy slice (status $code, log: ~/zeroplay_jax.log on every worker)"
          else
            say "the slice was lost (status $code)"
            failures=0
          fi
          ;;
        PREEMPTED | TERMINATED | STOPPED)
          say "the node was preempted; deletes $name"
          delete || failed 'the slice could not be deleted'
          ;;
      esac
      ;;
    SUSPENDING | SUSPENDED | FAILED)
      say "the slice is $queued_state; deletes $name"
      delete || failed 'the slice could not be deleted'
      ;;
    *) say "$name is $queued_state; checks again in ${option[poll]} s" ;;
  esac
  sleep "${option[poll]}"
done
