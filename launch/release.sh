#!/usr/bin/env bash
# Builds sdist and wheel into dist/, checks them, and tries them in an empty environment of every Python that is here:
# a small run trains and is reported by the wheel; the sdist installs and lists the commands.
# Usage: launch/release.sh [PYTHON …], names or paths; by default those of the three versions that are on the path.
# It installs 3.3 GB per Python below $TMPDIR and takes some minutes for each.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo '== sdist and wheel'
python=$(launch/python.sh)
"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet --disable-pip-version-check build==1.6.1 twine==7.0.0
rm -rf dist
# Built from a copy of what is committed: setuptools leaves files behind, and would take files that lie around.
mkdir "$work/source"
git archive HEAD | tar -x -C "$work/source"
"$work/tools/bin/python" -m build --outdir dist "$work/source" > "$work/build.log" 2>&1 || {
  tail -n 30 "$work/build.log" >&2
  exit 1
}
"$work/tools/bin/twine" check --strict dist/*
wheel=$(echo "$PWD"/dist/*.whl)
sdist=$(echo "$PWD"/dist/*.tar.gz)

names=("$@")
((${#names[@]})) || names=(python3.11 python3.12 python3.13)
tried=0
for name in "${names[@]}"; do
  python=$(launch/python.sh "$name" 2> "$work/why") || {
    echo "== $name: not tried ($(cat "$work/why"))"
    continue
  }
  echo "== $name: the wheel in an empty environment"
  environment=$work/environment
  "$python" -m venv "$environment"
  "$environment/bin/pip" install --quiet --disable-pip-version-check "$wheel"
  # In an empty folder nothing of the checkout can be imported.
  mkdir "$environment/elsewhere"
  (
    cd "$environment/elsewhere"
    "$environment/bin/zeroplay" train --config=configs/drzero.py:mini --workdir=run > log 2>&1 || {
      tail -n 30 log >&2
      exit 1
    }
    "$environment/bin/zeroplay" report run
    "$environment/bin/zeroplay" evaluate --config=configs/quickstart.py --config.eval.questions=4 --policy=run/policy/solver
  )
  echo "== $name: the sdist"
  "$environment/bin/pip" install --quiet --disable-pip-version-check --no-deps --force-reinstall "$sdist"
  (cd "$environment/elsewhere" && "$environment/bin/zeroplay" > /dev/null)
  rm -rf "$environment"
  tried=$((tried + 1))
done
((tried)) || { echo 'no Python was tried' >&2; exit 1; }
echo "dist/ is ready: tried with $tried of ${#names[@]} Pythons"
