#!/usr/bin/env bash
# Finds a Python for .venv. Prints its path, and on standard error one line with the version or what is missing.
# Usage: launch/python.sh [INTERPRETER]; without an argument the usual names are tried.
set -euo pipefail

fail() {
  echo "zeroplay_jax: $*" >&2
  exit 1
}

system=$(uname -s)
[[ $system == Linux ]] ||
  fail "needs Linux, this is $system: use WSL2 on Windows or a Linux container on a Mac (ScaNN needs Linux)."
[[ $(uname -r) != *-Microsoft ]] || fail "needs WSL2, this is WSL1: run 'wsl --set-version DISTRIBUTION 2'."

names=(python3.11 python3.12 python3.13 python3 python)
[[ -z ${1:-} ]] || names=("$1")
versions=''
for name in "${names[@]}"; do
  # Every candidate is run, because a name on the path may be a shim without an interpreter.
  read -r version path venv < <("$name" -c '
import importlib.util, sys
venv = all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
print("%d.%d.%d" % sys.version_info[:3], sys.executable, "venv" if venv else "bare")' 2>/dev/null) || continue
  case $version in
    3.11.* | 3.12.* | 3.13.*)
      [[ $venv == venv ]] || fail "$name (Python $version) has no venv module: apt-get install python${version%.*}-venv"
      echo "zeroplay_jax: Linux and Python $version ($path)." >&2
      echo "$path"
      exit 0
      ;;
  esac
  versions+="${versions:+, }$name is $version"
done
fix='install one, or name it with make PYTHON=/path/to/python3'
[[ ${1:-} != .venv/* ]] || fix='remove the folder .venv; the next make builds it again'
fail "needs Python 3.11, 3.12 or 3.13 (${versions:-${names[*]}: not found}): $fix"
