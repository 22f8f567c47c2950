"""Flips bits of the newest checkpoint of a finished run, and lets each of them be found, without starting runs.

    python -m benchmarks.flips runs/mini --flips 200

Works on a copy. For every flip: the functions of a resuming run compare the checkpoint with its checksums, set it aside
and restore the newest one that is left, which must be the one before, with the same arrays and the same state of the
loop. Prints one JSON object; exit status 1 if a flip was not found or something else was restored.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import pathlib
import random
import shutil
import sys
import tempfile
from typing import Any

import jax
import numpy as np

from zeroplay_jax.learner.checkpoint import (
    FOLDER,
    Checkpointer,
    saved_steps,
    set_damaged_aside,
    stored_tree,
)
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.training.branch import newest_checkpoint

EXAMPLES = """examples:
  python -m benchmarks.flips runs/mini --flips 200
"""


def flip_bit(folder: pathlib.Path, rng: random.Random) -> pathlib.Path:
    """Flips one bit below a folder; returns its file.

    Half of the bits are drawn from all bytes, half from the bytes of a file that is drawn first: most files are small.
    """
    paths = sorted(path for path in folder.rglob('*') if path.is_file() and path.stat().st_size)
    sizes = [path.stat().st_size for path in paths]
    path = rng.choices(paths, sizes if rng.random() < 0.5 else None)[0]
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return path


def _restored(workdir: pathlib.Path) -> tuple[Any, Any]:
    """Returns (arrays, state of the loop) of the newest checkpoint, as a resumed run restores them."""
    shapes = stored_tree(newest_checkpoint(workdir).folder)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place), shapes
    )
    checkpoints = Checkpointer(workdir, keep=100)
    with contextlib.closing(checkpoints):
        return checkpoints.restore(like)


def _are_equal(first: Any, second: Any) -> bool:
    """Returns whether two pairs of `_restored` are equal, bit for bit."""
    arrays, loop = first
    other_arrays, other_loop = second
    leaves, structure = jax.tree.flatten(arrays)
    other_leaves, other_structure = jax.tree.flatten(other_arrays)
    if structure != other_structure or loop != other_loop:
        return False
    return all(map(np.array_equal, leaves, other_leaves))


def check(workdir: pathlib.Path, flips: int, seed: int) -> dict[str, Any]:
    """Flips bits of the newest checkpoint in a workdir, one at a time; returns the counts.

    Args:
      workdir: a copy of a finished run with at least two checkpoints.
      flips: number of bits.
      seed: of the places.

    Returns:
      'flips', 'found', 'fallen_back' (the checkpoint before was restored, bit for bit) and 'files', which counts
      flips by the first part of the file's path in the checkpoint.
    """
    rng = random.Random(seed)
    newest = saved_steps(workdir / FOLDER)[-1]
    folder = workdir / FOLDER / str(newest)
    whole = workdir.with_name(f'{workdir.name}.whole')
    folder.rename(whole)
    expected = _restored(workdir)
    counts: collections.Counter[str] = collections.Counter()
    files: collections.Counter[str] = collections.Counter()
    for _ in range(flips):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        path = flip_bit(folder, rng)
        files[path.relative_to(folder).parts[0]] += 1
        lines = set_damaged_aside(Hosts(), workdir)
        counts['found'] += any(f'checkpoint {newest} is damaged' in line for line in lines)
        counts['fallen_back'] += _are_equal(_restored(workdir), expected)
    return {
        'flips': flips,
        'found': counts['found'],
        'fallen_back': counts['fallen_back'],
        'files': dict(files),
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.flips',
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('workdir', type=pathlib.Path, help='of a run; it is only read')
    parser.add_argument('--flips', type=int, default=200, help='number of bits')
    parser.add_argument('--seed', type=int, default=0, help='of their places')
    arguments = parser.parse_args()
    if len(saved_steps(arguments.workdir / FOLDER)) < 2:
        parser.error(f'{arguments.workdir}: needs two checkpoints, one to fall back to')
    with tempfile.TemporaryDirectory() as scratch:
        copy = pathlib.Path(scratch) / 'run'
        shutil.copytree(arguments.workdir / FOLDER, copy / FOLDER)
        counts = check(copy, arguments.flips, arguments.seed)
    print(json.dumps({'workdir': arguments.workdir.name} | counts))
    sys.exit(min(counts['found'], counts['fallen_back']) < arguments.flips)


if __name__ == '__main__':
    main()
