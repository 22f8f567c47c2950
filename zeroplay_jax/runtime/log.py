"""The log of a run: JSON lines that hold every step exactly once, and curves (`curves`).

A killed run resumes from its last checkpoint, which may be some steps older than the last line it wrote. The lines
after that checkpoint are removed when the files are opened; the run then repeats those steps and writes them again.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.runtime.curves import TensorBoardWriter, open_writers
from zeroplay_jax.types import Json


class JsonLines:
    """An append-only file of JSON objects, each with an integer field 'step'.

    Attributes:
      steps: steps of the lines that were in the file when it was opened, and stayed.
    """

    def __init__(self, path: pathlib.Path, keep_below: int, run: str = ''):
        """Opens the file and truncates it to the steps before `keep_below`.

        Args:
          path: the file; it is created if missing.
          keep_below: lines of this step or a later one are removed, and so is an incomplete last line.
          run: hash of the run's identity, which every line gets; '' for none.

        Raises:
          UserError: one line; a line that stays is of another run. Nothing was changed.
        """
        self.steps: set[int] = set()
        self._suffix: Json = {run_record.HASH_FIELD: run} if run else {}
        if path.exists():
            self.steps = _truncate(path, keep_below, run)
        self._file = path.open('a', encoding='utf-8')

    def write(self, records: Iterable[Json]) -> None:
        """Appends one line per record and flushes them to the operating system."""
        for record in records:
            line = json.dumps({**record, **self._suffix}, ensure_ascii=False)
            self._file.write(f'{line}\n')
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _truncate(path: pathlib.Path, keep_below: int, run: str) -> set[int]:
    """Removes the lines of steps from `keep_below` on, and those that are not records; returns the steps that stay.

    Raises:
      UserError: a line that stays is of another run than `run`.
    """
    # errors='replace': the log does not decide how a run continues, so damage to it must not end the run.
    # str.splitlines would also split at characters such as U+2028, which passages may contain.
    lines = path.read_text(encoding='utf-8', errors='replace').split('\n')
    valid_lines = []
    steps = set()
    for line in lines:
        record = _record_of(line)
        step = record.get('step')
        if step is not None and step < keep_below:
            run_record.check_hash(path, record.get(run_record.HASH_FIELD), run)
            valid_lines.append(f'{line}\n')
            steps.add(step)
    # A crash while the file is rewritten must not lose the log, so it is replaced in one move.
    draft = path.with_name(f'.{path.name}')
    draft.write_text(''.join(valid_lines), encoding='utf-8')
    os.replace(draft, path)
    return steps


def _record_of(line: str) -> dict[str, Any]:
    """Returns the record in a JSON line, its step as a whole number; {} if it is incomplete or has no step."""
    try:
        record = json.loads(line)
        return {**record, 'step': int(record['step'])}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return {}


_METRICS = 'metrics'
_LOGS = (_METRICS, 'trajectories', 'tasks', 'alarms')


class MetricsWriter:
    """The writers of one run: `metrics.jsonl`, `trajectories.jsonl`, `tasks.jsonl`, `alarms.jsonl`, and curves.

    Attributes:
      missing_steps: steps before the first one that `metrics.jsonl` has no line of.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        step: int,
        writers: Sequence[str] = ('tensorboard',),
        run: str = '',
    ):
        """Opens the files in `workdir` and removes the lines from `step` on.

        Args:
          workdir: folder of the run.
          step: the first step that will be written.
          writers: `config.log.writers`.
          run: hash of the run's identity, for every line; '' for none.

        Raises:
          UserError: a service among the writers cannot be opened, or a file is of another run.
        """
        self._files = {name: JsonLines(workdir / f'{name}.jsonl', step, run) for name in _LOGS}
        self._curves = open_writers(writers, workdir, step)
        # Every step has a line; damage and a deleted file show here.
        self.missing_steps = sorted(set(range(step)) - self._files[_METRICS].steps)

    def write_scalars(
        self, step: int, iteration: int, phase: str, values: Mapping[str, float]
    ) -> None:
        """Writes the metrics of one step.

        Args:
          step: number of the step within the run.
          iteration: outer iteration of the schedule.
          phase: name of the phase; it prefixes the names of the curves.
          values: metric name → value. A value that is not finite is absent from the curves and null in the file.
        """
        curves = {}
        record: dict[str, object] = {'step': step, 'iteration': iteration, 'phase': phase}
        for name, value in values.items():
            # JSON has no NaN or infinity, and curves break at them.
            if math.isfinite(value):
                # In most systems a phase trains the role of its name.
                curve = name if name.startswith(f'{phase}/') else f'{phase}/{name}'
                curves[curve] = float(value)
                record[name] = float(value)
            else:
                record[name] = None
        for writer in self._curves:
            writer.write(step, curves)
        self.write(_METRICS, [record])

    def write_parameters(self, params: Mapping[str, Any]) -> None:
        """Writes names, shapes and sizes of all weights as texts of TensorBoard; `params`: name of weights → arrays."""
        for writer in self._curves:
            if isinstance(writer, TensorBoardWriter):
                writer.write_parameters(params)

    def write(self, name: str, records: Iterable[Json]) -> None:
        """Writes records, each with its step, to the file of this name.

        They are 'trajectories' (rollouts for the report), 'tasks' (selfplay/task_log.py), or 'alarms'
        (`run.outcome.Alarm`).
        """
        self._files[name].write(records)

    def close(self) -> None:
        """Flushes and closes all writers."""
        for writer in self._curves:
            writer.close()
        for file in self._files.values():
            file.close()
