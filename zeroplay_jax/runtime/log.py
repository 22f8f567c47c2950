"""The log of a run: JSON lines that hold every step exactly once, and the writers of curves.

A killed run resumes from its last checkpoint, which may be some steps older than the last line it wrote. The lines
after that checkpoint are removed when the files are opened; the run then repeats those steps and writes them again.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from zeroplay_jax.retrieval.command import import_tensorflow
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.types import Json, UserError, first_line


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
        (`training.outcome.Alarm`).
        """
        self._files[name].write(records)

    def close(self) -> None:
        """Flushes and closes all writers."""
        for writer in self._curves:
            writer.close()
        for file in self._files.values():
            file.close()


# ---- scalar writers --------------------------------------------------------------------------------
#
# Where the metrics of a run go beside its JSON lines: TensorBoard, Weights & Biases, MLflow; one interface for all.
#
# A resumed run repeats the steps after its last checkpoint with the same values. None of the writers shows such a step
# twice: TensorBoard's files are cut back when they are opened, and the two services keep the values they have.


# Project or experiment of the services where the environment names none.
_PROJECT = 'zeroplay_jax'
# Characters that MLflow allows in the name of a metric.
_NOT_ALLOWED = re.compile(r'[^\w\-. /]')


class ScalarWriter(Protocol):
    """Takes the metrics of a run, step by step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the finite metrics of a step: name → value."""

    def close(self) -> None:
        """Writes what is buffered, and ends."""


def _import_metric_writers() -> ModuleType:
    """Returns the module `clu.metric_writers`; its first import does not load Keras."""
    import_tensorflow()
    # clu needs one function of TensorBoard's hyperparameter plugin. The plugin also defines a Keras callback, in this
    # private module, and its base class would load Keras. The placeholder is removed again; the plugin's
    # `KerasCallback` stays None in this process.
    callback_module = 'tensorboard.plugins.hparams._keras'
    needs_placeholder = callback_module not in sys.modules
    if needs_placeholder:
        placeholder = ModuleType(callback_module)
        placeholder.Callback = None  # type: ignore[attr-defined]
        sys.modules[callback_module] = placeholder
    try:
        from clu import metric_writers
    finally:
        if needs_placeholder:
            del sys.modules[callback_module]
    return metric_writers


def _plain_scalars(summary_writer: type) -> type:
    """Returns clu's writer with scalars as plain numbers.

    clu writes them as tensors. TensorBoard shows both alike, but `EventAccumulator.Scalars`, by which scripts read
    curves, finds plain numbers only.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    summary = import_tensorflow().summary

    class PlainScalars(summary_writer):
        def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
            values = [Summary.Value(tag=tag, simple_value=scalars[tag]) for tag in scalars]
            # clu has no public name for its writer of the file.
            with self._summary_writer.as_default():
                content = Summary(value=values).SerializeToString()
                summary.experimental.write_raw_pb(content, step=step)

    return PlainScalars


class TensorBoardWriter:
    """TensorBoard events in the workdir; see `open_writers` for the arguments."""

    def __init__(self, workdir: pathlib.Path, first_step: int):
        # Synchronous, because a killed run must have written every step that its checkpoint covers.
        metric_writers = _import_metric_writers()
        for path in sorted(workdir.glob('events.out.tfevents.*')):
            _cut_events(path, first_step)
        self._writer = _plain_scalars(metric_writers.SummaryWriter)(str(workdir))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._writer.write_scalars(step, values)
        self._writer.flush()

    def write_parameters(self, params: Mapping[str, Any]) -> None:
        """As of `MetricsWriter`."""
        from clu import parameter_overview

        table = parameter_overview.get_parameter_overview
        tables = {f'parameters/{name}': table(params[name], include_stats=False) for name in params}
        self._writer.write_texts(0, tables)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _cut_events(path: pathlib.Path, first_step: int) -> None:
    """Removes the events of steps from `first_step` on from a file of TensorBoard, or the file if none is left."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto import event_pb2
    from tensorboard.summary.writer.record_writer import RecordWriter

    kept_records = []
    has_values = False
    is_cut = False
    # The loader ends at an incomplete record.
    for record in RawEventFileLoader(str(path)).Load():
        event = event_pb2.Event.FromString(record)
        if event.HasField('summary') and event.step >= first_step:
            is_cut = True
            continue
        has_values |= event.HasField('summary')
        kept_records.append(record)
    if not has_values:
        path.unlink()
    elif is_cut:
        # A crash while the file is rewritten must not lose it, so it is replaced in one move.
        draft = path.with_name(f'.{path.name}')
        with draft.open('wb') as file:
            writer = RecordWriter(file)
            for record in kept_records:
                writer.write(record)
        os.replace(draft, path)


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


class MlflowWriter:
    """A run of MLflow at MLFLOW_TRACKING_URI; see `open_writers` for the arguments."""

    def __init__(self, workdir: pathlib.Path, first_step: int):
        import mlflow

        self._entities: Any = mlflow.entities
        self._client = mlflow.MlflowClient()
        project = os.environ.get('MLFLOW_EXPERIMENT_NAME', _PROJECT)
        experiment = self._client.get_experiment_by_name(project)
        if experiment is None:
            experiment_id = self._client.create_experiment(project)
        else:
            experiment_id = experiment.experiment_id
        run_id = _run_id(workdir)
        runs = self._client.search_runs([experiment_id], f"tags.workdir_id = '{run_id}'")
        if runs:
            self._run = runs[0].info.run_id
        else:
            name = workdir.resolve().name
            run = self._client.create_run(experiment_id, run_name=name, tags={'workdir_id': run_id})
            self._run = run.info.run_id
        # Every step has this metric, so that the last one can be asked for.
        history = self._client.get_metric_history(self._run, 'step')
        self._next_step = max((entry.step + 1 for entry in history), default=0)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # MLflow adds a second value to a step instead of replacing the first.
        if step < self._next_step:
            return
        now = int(1000 * time.time())
        metrics = [self._entities.Metric('step', step, now, step)]
        for name, value in values.items():
            metrics.append(self._entities.Metric(_NOT_ALLOWED.sub('_', name), value, now, step))
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _run_id(workdir: pathlib.Path) -> str:
    """Returns the id under which the services know the run in a workdir, so that a resumed run continues its curves."""
    recorded = run_record.read(workdir)
    assert recorded is not None
    return recorded.id


# Name in config.log.writers → writer. TensorBoard is a requirement of this package; the others are not.
_WRITERS: Mapping[str, Callable[[pathlib.Path, int], ScalarWriter]] = {
    'tensorboard': TensorBoardWriter,
    'wandb': WandbWriter,
    'mlflow': MlflowWriter,
}


class GuardedWriter:
    """A writer whose failures cost curves and not the run: after the first one it writes no more, and says so."""

    def __init__(self, name: str, writer: ScalarWriter):
        self._name = name
        self._writer: ScalarWriter | None = writer

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(step, values)
        # The services raise exceptions of many types, such as those of a lost connection.
        except Exception as error:
            self._writer = None
            print(
                f'warning: {self._name} gets no metrics from step {step} on ({first_line(error)}); '
                'metrics.jsonl has them all',
                file=sys.stderr,
            )

    def close(self) -> None:
        if self._writer is None:
            return
        try:
            self._writer.close()
        # As in `write`.
        except Exception as error:
            print(
                f'warning: {self._name} could not be closed ({first_line(error)}); metrics.jsonl has all metrics',
                file=sys.stderr,
            )
        self._writer = None


def open_writers(
    names: Sequence[str], workdir: pathlib.Path, first_step: int
) -> list[ScalarWriter]:
    """Returns the writers of these names (`config.log.writers`).

    Args:
      workdir: folder of the run; the services name the run after it.
      first_step: the first step that will be written; TensorBoard's events from this step on are removed.

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
                'variables (WANDB_MODE=offline, MLFLOW_TRACKING_URI), or leave it out'
            ) from None
        writers.append(GuardedWriter(name, writer))
    return writers
