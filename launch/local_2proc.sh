#!/usr/bin/env bash
# Runs two processes of one run on this machine's CPU, connected by gloo: the code for several hosts, on one machine.
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat << 'END'
Runs two processes of one run on this machine's CPU: the code for several hosts, on one machine.

  launch/local_2proc.sh [OPTIONS] -- --config=FILE --workdir=FOLDER [--config.FIELD=VALUE …]
  launch/local_2proc.sh [OPTIONS] -- PROGRAM [ARGUMENTS …]

  --devices N     CPU devices of each process (default: 1); the mesh is replica=2, fsdp=N unless the flags set it
  --port N        port of process 0 (default: a free one)
  --logs FOLDER   folder of process-0.log and process-1.log (default: WORKDIR/.logs, without a local workdir runs/local_2proc)
  --dry-run       print the two commands and do nothing

Example: launch/local_2proc.sh -- --config=configs/drzero.py:mini --workdir=runs/two

Both processes must succeed. When one fails, the other is stopped, and one line names the failed process and its log.
The exit status is that of the failed process. When a process gets SIGTERM, both save and end with status 75, and the
script starts them again. When the script gets SIGTERM, it passes it on, waits until both have saved, and ends with
status 75.
END
}

free_port() {
  local port
  while :; do
    port=$((20000 + RANDOM % 10000))
    (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null || break
  done
  echo "$port"
}

option=([devices]=1 [port]='' [logs]='')
parse "$@"
needs devices '[1-9][0-9]?' 'a number of devices from 1 to 99'
[[ -n ${option[port]} ]] || option[port]=$(free_port)
needs port '[1-9][0-9]{0,4}' 'a port'
workdir=$(flag --workdir "${program[@]}")
[[ $workdir != gs://* ]] || workdir=''
logs=${option[logs]:-${workdir:+$workdir/.logs}}
logs=${logs:-runs/local_2proc}
devices=${option[devices]}
mesh=()
for size in "replica=2" "fsdp=$devices"; do
  [[ -n $(flag "--config.mesh.${size%=*}" "${program[@]}") ]] || mesh+=("--config.mesh.$size")
done
train .venv/bin/python "${mesh[@]}" --config.distributed.mode=coordinator \
  --config.distributed.coordinator="127.0.0.1:${option[port]}" --config.distributed.processes=2
checked "2*$devices"
flags="${XLA_FLAGS:+$XLA_FLAGS }--xla_force_host_platform_device_count=$devices"
start=(env JAX_PLATFORMS=cpu "XLA_FLAGS=$flags" "${program[@]}")

if [[ ${option[dry-run]} == on ]]; then
  for process in 0 1; do
    run "${start[@]}" "--config.distributed.process=$process"
  done
  exit 0
fi

[[ ${program[0]} != .venv/bin/python || -x .venv/bin/python ]] ||
  fail "$script: .venv is missing: run 'make .venv/ready'"
# Created before `tail` reads them. An earlier run may have written to process-0.log: `tail` starts at its end.
{ mkdir -p "$logs" && : >> "$logs/process-0.log" && : >> "$logs/process-1.log"; } 2> /dev/null ||
  fail "$script: cannot write logs to $logs: choose another folder with --logs"

pids=()
# Ends both processes and waits for them: signal $1, and SIGKILL after $2 seconds.
stop() {
  local pid
  kill "-$1" "${pids[@]}" 2> /dev/null || true
  for ((tenths = 0; tenths < 10 * $2; tenths++)); do
    kill -0 "${pids[@]}" 2> /dev/null || break
    sleep 0.1
  done
  for pid in "${pids[@]}"; do
    kill -KILL "$pid" 2> /dev/null || true
  done
  wait "${pids[@]}" || true
}
# Both processes ignore SIGINT, as all background processes of a script do.
trap 'stop TERM 60; exit 130' INT
trap 'stop TERM 60; exit 75' TERM

start_both() {
  pids=()
  old=$(stat --format %s "$logs/process-0.log")
  for process in 0 1; do
    "${start[@]}" "--config.distributed.process=$process" >> "$logs/process-$process.log" 2>&1 &
    pids+=($!)
  done
  say "processes ${pids[*]} run; logs: $logs/process-0.log (printed here) and $logs/process-1.log"
  tail -c "+$((old + 1))" --follow --sleep-interval=0.3 --pid="${pids[0]}" "$logs/process-0.log" 2> /dev/null &
  reader=$!
}

# Waits for both processes. The one that ends first is the cause of a failure: JAX stops the other one later. Returns
# its status, and sets `failed` to its number.
wait_for_both() {
  local process code ended=([0]='' [1]='')
  while [[ -z ${ended[0]} || -z ${ended[1]} ]]; do
    sleep 0.05
    for process in 0 1; do
      if [[ -n ${ended[process]} ]] || kill -0 "${pids[process]}" 2> /dev/null; then continue; fi
      code=0
      wait "${pids[process]}" || code=$?
      ended[process]=$code
      failed=$process
      # With status 75 the other one saves, too.
      ((code != 75)) || stop TERM 60
      ((code == 0)) || return "$code"
    done
  done
}

while :; do
  start_both
  # Standard error is closed meanwhile, so that bash does not report the killed processes.
  exec 3>&2 2> /dev/null
  code=0
  wait_for_both || code=$?
  ((code == 0)) || stop TERM 5
  wait "$reader" || true
  exec 2>&3
  case $code in
    0) exit 0 ;;
    75) say 'the run was asked to end and has saved; starts it again' ;;
    # Exit status 2: the run refused its flags or files, with one line of explanation.
    2) fail "process $failed of 2 refused the run: $(tail -n 1 "$logs/process-$failed.log")" ;;
    *)
      say "process $failed of 2 ended with exit status $code and the other was stopped; its log is" \
        "$logs/process-$failed.log; the same command resumes from the last checkpoint"
      exit "$code"
      ;;
  esac
done
