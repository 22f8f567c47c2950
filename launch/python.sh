#!/usr/bin/env bash
# Finds the Python that .venv is built with: prints its path, and on the error stream one line that says what was
# found or what is missing. Usage: launch/python.sh [INTERPRETER]; without one the usual names are tried.
set -euo pipefail

fail() {
  echo "zeroplay_jax: $*" >&2
  exit 1
}

system=$(uname -s)
[[ $system == Linux ]] ||
  fail "needs Linux, this is $system: on Windows use WSL2, on a Mac a Linux container (ScaNN has builds for Linux only)."
[[ $(uname -r) != *-Microsoft ]] || fail "this is WSL1: change to WSL2 with 'wsl --set-version DISTRIBUTION 2'."

names=(python3.11 python3.12 python3.13 python3 python)
[[ -z ${1:-} ]] || names=("$1")
found=''
for name in "${names[@]}"; do
  # A name on the path may still be a shim without a Python behind it, so each candidate is run.
  read -r version path venv < <("$name" -c '
import importlib.util, sys
venv = all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
print("%d.%d.%d" % sys.version_info[:3], sys.executable, "venv" if venv else "bare")' 2>/dev/null) || continue
  case $version in
    3.11.* | 3.12.* | 3.13.*)
      [[ $venv == venv ]] || fail "$name (Python $version) has no venv module: apt-get install python${version%.*}-venv"
      echo "zeroplay_jax: Linux and Python $version ($path), as needed." >&2
      echo "$path"
      exit 0
      ;;
  esac
  found+="${found:+, }$name is $version"
done
mend='install one, or name it with make PYTHON=/path/to/python3'
[[ ${1:-} != .venv/* ]] || mend='remove the folder .venv, the next make builds it anew'
fail "needs Python 3.11, 3.12 or 3.13 (${found:-${names[*]}: not found}): $mend"
