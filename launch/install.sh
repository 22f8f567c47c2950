#!/usr/bin/env bash
# Makes .venv on a machine without looking at what it has: used by the other scripts, and by hand before a SLURM run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in
  '' | tpu | cuda12 | cuda13) ;;
  --help | -h)
    cat << 'END'
Installs the project's requirements into .venv, once; again after they have changed.

  launch/install.sh [tpu | cuda12 | cuda13]

The word is JAX's extra for the accelerator, at the version of JAX that requirements.txt names; without one it is
for CPUs.

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
  if found=$(launch/python.sh); then
    "$found" -m venv .venv
  else
    echo 'zeroplay_jax: so uv, a Python package, brings Python 3.12 along' >&2
    # Images with a Python that belongs to the system let nothing be installed beside it without this.
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
    python3 -m uv venv --quiet --seed --python 3.12 .venv
  fi
fi
# In one call, so that the extra follows the version of JAX in the file.
"$python" -m pip install --quiet --disable-pip-version-check -r requirements.txt ${1:+"jax[$1]"}
touch .venv/ready
