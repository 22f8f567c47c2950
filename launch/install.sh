#!/usr/bin/env bash
# Builds .venv, whatever Python the machine has: called by the other scripts, and by hand before a SLURM run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in
  '' | tpu | cuda12 | cuda13) ;;
  --help | -h)
    cat << 'END'
Installs the project's requirements into .venv. Run it once, and again when they have changed.

  launch/install.sh [tpu | cuda12 | cuda13]

The argument names the accelerator: JAX is installed with that extra, at the version in requirements.txt. Without an
argument JAX runs on CPUs.

Example: launch/install.sh cuda13
END
    exit 0
    ;;
  *)
    echo "zeroplay_jax: launch/install.sh: '$1' is none of tpu, cuda12, cuda13" >&2
    exit 2
    ;;
esac

python=.venv/bin/python
if [[ ! -x $python ]]; then
  if interpreter=$(launch/python.sh); then
    "$interpreter" -m venv .venv
  else
    echo 'zeroplay_jax: no suitable Python: installing Python 3.12 with the package uv' >&2
    # Without this variable, pip refuses to install into a Python that the system manages (PEP 668).
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
    python3 -m uv venv --quiet --seed --python 3.12 .venv
  fi
fi
# One call, so that the extra uses the version of JAX in the file.
packages=(-r requirements.txt ${1:+"jax[$1]"})
# TPUs are machines of Google Cloud, where workdirs may be in a bucket.
[[ ${1:-} != tpu ]] || packages+=(-r requirements-bucket.txt)
"$python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
# The command `zeroplay` of this folder.
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
touch .venv/ready
