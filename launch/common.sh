#!/usr/bin/env bash
# Functions of the launch scripts, which source this file. All of them work from the project's folder.
# A script defines `option` (name → default; `off` marks a switch) and the function `usage`, then calls `parse "$@"`.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
script=launch/${0##*/}
declare -A option=()
program=()

fail() {
  echo "zeroplay_jax: $*" >&2
  exit 2
}

say() {
  echo "zeroplay_jax: $*" >&2
}

# Parses the command line: options into `option`, the words after -- into `program`.
parse() {
  local name value
  option[dry-run]=off
  while (($#)) && [[ $1 != -- ]]; do
    [[ $1 != --help && $1 != -h ]] || { usage; exit 0; }
    [[ $1 == --?* ]] || fail "$script: '$1' is no option; the command to run follows after --, see --help"
    name=${1#--} name=${name%%=*}
    [[ $name != config* && $name != workdir ]] || fail "$script: $1 is a flag of the run: put it after --"
    [[ $name =~ ^[a-z-]+$ && -v option[$name] ]] || fail "$script: no option --$name; see $script --help"
    if [[ $1 == *=* ]]; then
      value=${1#*=}
    elif [[ ${option[$name]} == o[nf]* ]]; then
      value=on
    else
      value=${2:---}
      [[ $value != --* ]] || fail "$script: --$name needs a value"
      shift
    fi
    [[ ${option[$name]} != o[nf]* || $value == on || $value == off ]] || fail "$script: --$name takes no value"
    option[$name]=$value
    shift
  done
  (($# > 1)) || fail "$script: nothing to run; put the run's flags after --, see $script --help"
  shift
  program=("$@")
}

# needs NAME PATTERN MEANING: fails unless option NAME has a value that matches PATTERN.
needs() {
  [[ -n ${option[$1]} ]] || fail "$script: --$1 is missing: $3"
  [[ ${option[$1]} =~ ^($2)$ ]] || fail "$script: --$1=${option[$1]} must be $3"
}

# Prints the value of flag $1 in the remaining arguments, given as --flag=value or --flag value.
flag() {
  local name=$1
  shift
  while (($#)); do
    case $1 in
      "$name="*) echo "${1#*=}" ;;
      "$name") echo "${2:-}" ;;
    esac
    shift
  done
}

# train PYTHON FLAGS…: completes `program`. Where it begins with a flag, `PYTHON -m zeroplay_jax.main` is put before
# it; otherwise it already names a program. FLAGS are appended in both cases.
train() {
  local python=$1
  shift
  if [[ ${program[0]} == -* ]]; then
    [[ -n $(flag --config "${program[@]}") ]] || fail "$script: --config=FILE is missing after --"
    [[ -n $(flag --workdir "${program[@]}") ]] || fail "$script: --workdir=FOLDER is missing after --"
    program=("$python" -m zeroplay_jax.main "${program[@]}")
  fi
  program+=("$@")
}

# checked DEVICES: ends with all mistakes of the run's flags on DEVICES (main's --on; '' for unknown), before anything is
# created. Further arguments are flags of the check.
checked() {
  local on=$1 said
  shift
  [[ ${program[1]:-} == -m && ${program[2]:-} == zeroplay_jax.main ]] || return 0
  if [[ ! -x .venv/bin/python ]]; then
    say "the run's flags are not checked: .venv is missing, 'make .venv/ready' makes it"
    return 0
  fi
  said=$(.venv/bin/python "${program[@]:1}" --check ${on:+"--on=$on"} "$@") || exit
  [[ ${option[dry-run]} == off ]] || echo "# ${said//$'\n'/$'\n'# }"
}

# tpu_devices COUNT: prints COUNT slices of --type for `checked`; nothing for a type that it does not know.
tpu_devices() {
  local count="$1*"
  [[ $1 != 1 ]] || count=''
  [[ ! ${option[type]} =~ ^(v2|v3|v4|v5p|v5litepod|v6e)- ]] || echo "$count${option[type]}"
}

# Checks the workdir of a run on several machines: every machine must see it under the same path, or it is in a bucket.
shared_workdir() {
  local folder
  folder=$(flag --workdir "${program[@]}")
  [[ -z $folder || $folder == /* || $folder == gs://?*/?* ]] ||
    fail "$script: --workdir=$folder must begin with / (a folder that all machines mount at this path) or be gs://bucket/path"
}

# Prints the arguments as one line that a shell parses into the same arguments.
quote() {
  local word escape="'\\''" out=''
  for word; do
    [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word="'${word//"'"/$escape}'"
    out+=" $word"
  done
  echo "${out# }"
}

# Runs a command; with --dry-run prints it instead.
run() {
  if [[ ${option[dry-run]} == on ]]; then
    quote "$@"
  else
    "$@"
  fi
}

# Packs the project into file $1, without its runs, caches and hidden folders.
archive() {
  # Status 1: a file, such as a log in this folder, changed or was removed while tar read it.
  run tar '--exclude=./.?*' --exclude=./runs --exclude=./shared --exclude=__pycache__ -czf "$1" . || (($? == 1))
}

# Sets `scratch` to a new folder that only this user can enter and that is removed at the end. A dry run makes none.
# Other users of the machine could put a link under a name that they can predict.
make_scratch() {
  scratch=${TMPDIR:-/tmp}/zeroplay_jax.XXXXXXXXXX
  [[ ${option[dry-run]} == off ]] || return 0
  scratch=$(mktemp -d "$scratch")
  trap 'rm -rf "$scratch"' EXIT
}
