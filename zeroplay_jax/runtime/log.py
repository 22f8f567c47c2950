"""The log of a run: JSON lines that hold every step exactly once, and curves.

A killed run resumes from its last checkpoint, which may be some steps older than the last line it wrote. The lines
after that checkpoint are removed when the files are opened; the run then repeats those steps with the same values, but
for times and rates, and writes them again. No curve shows such a step twice: TensorBoard drops them at the mark of a
restart, and Weights & Biases keeps the values that it has.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from clu import parameter_overview
from tensorboard.compat.proto import event_pb2
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.settings.kinds import warn
from zeroplay_jax.types import Json, UserError, first_line

# Project of Weights & Biases where the environment names none.
_PROJECT = 'zeroplay_jax'


class ScalarWriter(Protocol):
    """Takes the metrics of a run, step by step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the finite metrics of a step: name → value."""

    def close(self) -> None:
        """Writes what is buffered, and ends."""


class TensorBoardWriter:
    """TensorBoard events in the workdir; see `open_writers` for the arguments."""

    def __init__(self, workdir: pathlib.Path, first_step: int):
        # Names of files in one folder differ, and are in the order of the runs.
        name = f'events.out.tfevents.{time.time():.6f}.{socket.gethostname()}'
        self._file = (workdir / name).open('wb')
        self._records = RecordWriter(self._file)
        self._write(event_pb2.Event(file_version='brain.Event:2'))
        # Readers drop what earlier files have of this step and later ones.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(event_pb2.Event(step=first_step, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [Summary.Value(tag=tag, simple_value=values[tag]) for tag in values]
        self._write(event_pb2.Event(step=step, summary=Summary(value=scalars)))

    def write_parameters(self, params: Mapping[str, Any]) -> None:
        """As of `MetricsWriter`."""
        for name in params:
            table = parameter_overview.get_parameter_overview(params[name], include_stats=False)
            self._write(event_pb2.Event(step=0, summary=text_pb(f'parameters/{name}', table)))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: event_pb2.Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        # At once, because a killed run must have written every step that its checkpoint covers.
        self._file.flush()


class WandbWriter:
    """A run of Weights & Biases, which its environment variables set up; see `open_writers` for the arguments."""

    def __init__(self, workdir: pathlib.Path, first_step: int):
        import wandb

        self._run = wandb.init(
            project=os.environ.get('WANDB_PROJECT', _PROJECT),
            name=workdir.resolve().name,
            id=_run_id(workdir),
            dir=str(workdir),
            resume='allow',
            # Its lines would break the progress bar.
            settings=wandb.Settings(silent=True, console='off'),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # The service keeps the first values of a step and warns about others.
        if step >= self._run.step:
            self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _run_id(workdir: pathlib.Path) -> str:
    """Returns the id under which Weights & Biases knows a run, so that a resumed one continues its curves."""
    recorded = run_record.read(workdir)
    assert recorded is not None
    return recorded.id


# Name in config.log.writers → writer. TensorBoard is a requirement of this package, wandb is not.
_WRITERS: Mapping[str, Callable[[pathlib.Path, int], ScalarWriter]] = {
    'tensorboard': TensorBoardWriter,
    'wandb': WandbWriter,
}


class GuardedWriter:
    """A writer whose failures cost curves and not the run: after the first one it writes no more, and says so."""

    def __init__(self, name: str, writer: ScalarWriter):
        self._name = name
        self._writer: ScalarWriter | None = writer

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._call(
            f'gets no metrics from step {step} on', lambda writer: writer.write(step, values)
        )

    def close(self) -> None:
        self._call('could not be closed', lambda writer: writer.close())
        self._writer = None

    def _call(self, problem: str, call: Callable[[ScalarWriter], None]) -> None:
        if self._writer is None:
            return
        try:
            call(self._writer)
        # A service raises exceptions of many types, such as those of a lost connection.
        except Exception as error:
            self._writer = None
            warn(f'{self._name} {problem} ({first_line(error)}); metrics.jsonl has all metrics')


def open_writers(
    names: Sequence[str], workdir: pathlib.Path, first_step: int
) -> list[ScalarWriter]:
    """Returns the writers of these names (`config.log.writers`).

    Args:
      workdir: folder of the run; Weights & Biases names the run after it.
      first_step: the first step that will be written; TensorBoard shows no earlier values from this step on.

    Raises:
      UserError: a service cannot be opened.
    """
    writers: list[ScalarWriter] = []
    for name in names:
        if name == 'tensorboard':
            writers.append(TensorBoardWriter(workdir, first_step))
            continue
        try:
            writer = _WRITERS[name](workdir, first_step)
        except Exception as error:
            raise UserError(
                f'config.log.writers: {name} cannot be opened ({first_line(error)}); set it up by its environment '
                'variables (WANDB_MODE=offline), or leave it out'
            ) from None
        writers.append(GuardedWriter(name, writer))
    return writers


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
_ROWS = 'rows'


class MetricsWriter:
    """The writers of one run: `metrics.jsonl`, `trajectories.jsonl`, `tasks.jsonl`, `alarms.jsonl`, and curves.

    With `config.log.rows` also `rows.jsonl`.

    Attributes:
      missing_steps: steps before the first one that `metrics.jsonl` has no line of.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        step: int,
        writers: Sequence[str] = ('tensorboard',),
        run: str = '',
        has_rows: bool = False,
    ):
        """Opens the files in `workdir` and removes the lines from `step` on.

        Args:
          workdir: folder of the run.
          step: the first step that will be written.
          writers: `config.log.writers`.
          run: hash of the run's identity, for every line; '' for none.
          has_rows: whether `rows.jsonl` is written; one that is there is cut in any case.

        Raises:
          UserError: a service among the writers cannot be opened, or a file is of another run.
        """
        has_rows |= (workdir / f'{_ROWS}.jsonl').exists()
        names = (*_LOGS, _ROWS) if has_rows else _LOGS
        self._files = {name: JsonLines(workdir / f'{name}.jsonl', step, run) for name in names}
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

        They are 'trajectories' (rollouts for the report), 'tasks' (selfplay/task_log.py), 'alarms'
        (`run.outcome.Alarm`), or 'rows' (`run.hooks.row_record`).
        """
        self._files[name].write(records)

    def close(self) -> None:
        """Flushes and closes all writers."""
        for writer in self._curves:
            writer.close()
        for file in self._files.values():
            file.close()
