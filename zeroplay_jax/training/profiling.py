"""Traces of jax.profiler for single steps of a run."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Container, Iterator

import jax

FOLDER = 'profile'


@contextlib.contextmanager
def traced(steps: Container[int], step: int, workdir: pathlib.Path) -> Iterator[None]:
    """Writes a trace of the block to workdir/profile/step_<number> if its step is one of `steps`.

    Every process writes its own files there; TensorBoard's profile plugin and Perfetto show them.

    Args:
      steps: `config.profile.steps`.
      step: number of the step that the block runs.
      workdir: folder of the run.
    """
    if step not in steps:
        yield
        return
    with jax.profiler.trace(str(workdir / FOLDER / f'step_{step}')):
        yield
