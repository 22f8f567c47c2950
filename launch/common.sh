#!/usr/bin/env bash
# What the launch scripts share: sourced by them, of no use by itself. They all work from the project's folder.
# A script fills `option` (name → default; `off` marks a switch) and `usage`, then calls `parse "$@"`.
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

# Options into `option`, what stands behind -- into `program`.
parse() {
  local name value
  option[dry-run]=off
  while (($#)) && [[ $1 != -- ]]; do
    [[ $1 != --help && $1 != -h ]] || { usage; exit 0; }
    [[ $1 == --?* ]] || fail "$script: '$1' is no option; what is to be run stands behind --, see --help"
    name=${1#--} name=${name%%=*}
    [[ $name != config* && $name != workdir ]] || fail "$script: $1 belongs behind --, with the run it is for"
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
  (($# > 1)) || fail "$script: nothing to run; give the run's flags behind --, see $script --help"
  shift
  program=("$@")
}

# needs NAME PATTERN MEANING: an option that must be there and look right.
needs() {
  [[ -n ${option[$1]} ]] || fail "$script: --$1 is missing: $3"
  [[ ${option[$1]} =~ ^($2)$ ]] || fail "$script: --$1=${option[$1]} must be $3"
}

# The value of flag $1 among the words that follow, as --flag=value or --flag value.
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

# train PYTHON FLAGS…: puts our program before `program` and FLAGS behind it. Only words that begin with another
# program than a flag stay as they are: some other command, with the same FLAGS behind.
train() {
  local python=$1
  shift
  if [[ ${program[0]} == -* ]]; then
    [[ -n $(flag --config "${program[@]}") ]] || fail "$script: --config=FILE is missing behind --"
    [[ -n $(flag --workdir "${program[@]}") ]] || fail "$script: --workdir=FOLDER is missing behind --"
    program=("$python" -m zeroplay_jax.main "${program[@]}")
  fi
  program+=("$@")
}

# The run of several machines: its files must lie where every machine sees them.
shared_workdir() {
  local folder
  folder=$(flag --workdir "${program[@]}")
  [[ -z $folder || $folder == /* ]] ||
    fail "$script: --workdir=$folder must begin with /: a folder that is mounted at the same place on every machine"
}

# Words as one line that a shell reads back as the same words.
quote() {
  local word escape="'\\''" out=''
  for word; do
    [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word="'${word//"'"/$escape}'"
    out+=" $word"
  done
  echo "${out# }"
}

# Runs a command, or with --dry-run prints it.
run() {
  if [[ ${option[dry-run]} == on ]]; then
    quote "$@"
  else
    "$@"
  fi
}

# The project as one file, without what is made anew elsewhere.
archive() {
  run tar '--exclude=./.?*' --exclude=./runs --exclude=./shared --exclude=__pycache__ -czf "$1" .
}
