"""Where numbers go: TensorBoard through clu, and JSON lines in which every step stands exactly once.

A run that was killed goes on from its last checkpoint, some steps before its last line. What was written after that
checkpoint is cut off first, and the steps are played, and written, again.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping

from clu import metric_writers

from zeroplay_jax.types import Json


class JsonLines:
    """An append-only file of JSON objects, each with a whole number 'step'.

    Args:
      path: the file.   keep_below: lines of this step or a later one, and a torn last line, are removed.
    """

    def __init__(self, path: pathlib.Path, keep_below: int):
        if path.exists():
            # Only '\n' ends a line: passages may hold what str.splitlines takes for an end as well.
            lines = path.read_text(encoding='utf-8').split('\n')
            kept = [line for line in lines if _step(line, keep_below) < keep_below]
            staged = path.with_name(f'.{path.name}')
            staged.write_text(''.join(f'{line}\n' for line in kept), encoding='utf-8')
            os.replace(staged, path)
        self._file = path.open('a', encoding='utf-8')

    def write(self, records: Iterable[Json]) -> None:
        """Appends records and hands them to the operating system."""
        self._file.writelines(json.dumps(record, ensure_ascii=False) + '\n' for record in records)
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _step(line: str, torn: int) -> int:
    try:
        return int(json.loads(line)['step'])
    except (ValueError, KeyError, TypeError):
        return torn


class Metrics:
    """Writers of one run: TensorBoard events, and `metrics`, `trajectories` and `tasks` as `.jsonl` in `workdir`."""

    def __init__(self, workdir: pathlib.Path, step: int):
        """`step`: the first step that will be written."""
        self._board = metric_writers.create_default_writer(str(workdir), asynchronous=False)
        self._lines = JsonLines(workdir / 'metrics.jsonl', step)
        self._trajectories = JsonLines(workdir / 'trajectories.jsonl', step)
        self._tasks = JsonLines(workdir / 'tasks.jsonl', step)

    def write(self, step: int, iteration: int, phase: str, values: Mapping[str, float]) -> None:
        """One step's numbers; what is not finite is left out of the board and is null in the lines."""
        finite = {name: float(v) for name, v in values.items() if math.isfinite(v)}
        self._board.write_scalars(step, {f'{phase}/{name}': v for name, v in finite.items()})
        record = {name: finite.get(name) for name in values}
        self._lines.write([{'step': step, 'iteration': iteration, 'phase': phase, **record}])

    def write_trajectories(self, records: Iterable[Json]) -> None:
        """Rollouts for the report, each with its step."""
        self._trajectories.write(records)

    def write_tasks(self, records: Iterable[Json]) -> None:
        """What became of a step's items, each with its step."""
        self._tasks.write(records)

    def close(self) -> None:
        """Flushes everything."""
        self._board.close()
        self._lines.close()
        self._trajectories.close()
        self._tasks.close()
