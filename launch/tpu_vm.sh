#!/usr/bin/env bash
# A run on a TPU slice, from a machine that stays up: asks for the slice, installs, runs, and asks again when it is
# taken away. Cloud's own tool, gcloud, does all of it.
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat << 'END'
A run on a Cloud TPU slice. Keeps going until the run ends well: a slice that is preempted is asked for again, and the
same command goes on from the last checkpoint. Start it on a machine that stays up, in tmux or the like.

  launch/tpu_vm.sh --name NAME --zone ZONE --type TYPE [OPTIONS] \
    -- --config=FILE --workdir=FOLDER [--config.FIELD=VALUE …]

  --name NAME         of the queued resource and of its node
  --zone ZONE         such as us-west4-a
  --type TYPE         accelerator type, such as v5litepod-16
  --runtime VERSION   software of the VMs (by TYPE: v2-alpha-tpuv5-lite, v2-alpha-tpuv5, v2-alpha-tpuv6e)
  --project PROJECT   (gcloud's own)
  --on-demand         not a spot slice
  --setup COMMAND     run on every worker before the run, such as mounting the shared folder
  --retries N         failures in a row on a healthy slice before giving up (3)
  --poll SECONDS      between two looks at the slice (60)
  --delete            delete the slice when the run has ended well
  --dry-run           print the commands in their order and do nothing

Example, four hosts of four chips, the files on a network share:
  launch/tpu_vm.sh --name zero --zone us-west4-a --type v5litepod-16 \
    --setup 'sudo mkdir -p /mnt/share && (mountpoint -q /mnt/share || sudo mount 10.0.0.2:/share /mnt/share)' \
    -- --config=configs/drzero.py --config.policy.path=/mnt/share/Qwen2.5-3B-Instruct --workdir=/mnt/share/runs/zero \
    --config.mesh.replica=4 --config.mesh.fsdp=2 --config.mesh.model=2
END
}

option=([name]='' [zone]='' [type]='' [runtime]='' [project]='' [on-demand]=off [setup]='' [retries]=3 [poll]=60
  [delete]=off)
parse "$@"
needs name '[a-z]([-a-z0-9]{0,60}[a-z0-9])?' 'a name of small letters, digits and hyphens'
needs zone '[a-z]+-[a-z]+[0-9]+-[a-z]' 'a zone such as us-west4-a'
needs type '[a-z0-9]+-[0-9]+' 'an accelerator type such as v5litepod-16'
needs retries '[0-9]{1,4}' 'a number'
needs poll '[0-9]{1,5}' 'a number of seconds'
case ${option[runtime]:-${option[type]}} in
  v5litepod-*) option[runtime]=v2-alpha-tpuv5-lite ;;
  v5p-*) option[runtime]=v2-alpha-tpuv5 ;;
  v6e-*) option[runtime]=v2-alpha-tpuv6e ;;
esac
needs runtime '[a-z0-9.-]+' 'the software version of the VMs; for this --type none is known'
train .venv/bin/python --config.distributed.mode=auto
shared_workdir
[[ ${option[dry-run]} == on ]] || command -v gcloud > /dev/null || fail "$script: gcloud is not installed on this machine"

name=${option[name]}
where=(--zone "${option[zone]}")
[[ -z ${option[project]} ]] || where+=(--project "${option[project]}")
queued=(gcloud compute tpus queued-resources)
remove=("${queued[@]}" delete "$name" "${where[@]}" --force --quiet)
# A host that is gone ends its connection.
alive=('--ssh-flag=-o ServerAliveInterval=30' '--ssh-flag=-o ServerAliveCountMax=4')
file=${TMPDIR:-/tmp}/$name.tgz

# On every worker, in its home folder.
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

# The queued resource's state; `none` when there is none, `unknown` when nobody says.
state() {
  local answer
  if answer=$("${queued[@]}" describe "$name" "${where[@]}" '--format=value(state.state)' 2>&1); then
    tail -n 1 <<< "$answer"
  elif [[ $answer == *NOT_FOUND* ]]; then
    echo none
  else
    echo unknown
    say "no answer about $name: ${answer##*$'\n'}"
  fi
}

node_state() {
  gcloud compute tpus tpu-vm describe "$name" "${where[@]}" '--format=value(state)' 2> /dev/null || echo unknown
}

play() {
  archive "$file" &&
    # One worker first: it makes the SSH key that all of them need at once.
    run gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=0 --command true &&
    run gcloud compute tpus tpu-vm scp "$file" "$name:zeroplay_jax.tgz" "${where[@]}" --worker=all &&
    # A run whose connection broke may still be there and hold the chips.
    everywhere "pkill -9 -f '[z]eroplay_jax.main'; mkdir -p zeroplay_jax && tar -xzf zeroplay_jax.tgz -C zeroplay_jax && \
zeroplay_jax/launch/install.sh tpu" &&
    { [[ -z ${option[setup]} ]] || everywhere "${option[setup]}"; } &&
    everywhere "set -o pipefail; cd zeroplay_jax && $(quote "${program[@]}") 2>&1 | tee -a ~/zeroplay_jax.log"
}

if [[ ${option[dry-run]} == on ]]; then
  echo '# asks for the slice'
  create
  echo '# once it is active: copies the project, installs, runs'
  play
  echo '# when it was preempted, before asking again; with --delete at the end, too'
  delete
  exit 0
fi

failures=0
failed() {
  failures=$((failures + 1))
  ((failures <= option[retries])) || fail "$1, $failures times in a row; mend it and start the same command again." \
    "The slice may still be there and cost money: $(quote "${remove[@]}")"
  say "$1; tries again in ${option[poll]} s"
}

while :; do
  found=$(state)
  case $found in
    none)
      say "asks for $name, ${option[type]}"
      create || failed 'the slice could not be asked for'
      ;;
    ACTIVE)
      case $(node_state) in
        READY)
          code=0
          play || code=$?
          if ((code == 0)); then
            say 'the run has ended well'
            [[ ${option[delete]} == off ]] || delete
            exit 0
          fi
          # 2 is how a run says that its flags or files cannot work; asking again would not help.
          ((code != 2)) || fail 'the run was refused, see its last line above; the slice is still there and costs money'
          sleep "${option[poll]}"
          if [[ $(state) == ACTIVE && $(node_state) == READY ]]; then
            failed "the run failed on a healthy slice (status $code, log: ~/zeroplay_jax.log on every worker)"
          else
            say "the slice was lost (status $code)"
            failures=0
          fi
          ;;
        PREEMPTED | TERMINATED | STOPPED)
          say "the node was taken away, deletes $name"
          delete || failed 'the slice could not be deleted'
          ;;
      esac
      ;;
    SUSPENDING | SUSPENDED | FAILED)
      say "the slice is $found, deletes $name"
      delete || failed 'the slice could not be deleted'
      ;;
    *) say "$name is $found; looks again in ${option[poll]} s" ;;
  esac
  sleep "${option[poll]}"
done
