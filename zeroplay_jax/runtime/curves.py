"""Where the metrics of a run go beside its JSON lines: TensorBoard, Weights & Biases, MLflow; one interface for all.

A resumed run repeats the steps after its last checkpoint with the same values. None of the writers shows such a step
twice: TensorBoard's files are cut back when they are opened, and the two services keep the values they have.
"""

from __future__ import annotations

import os
import pathlib
import re
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from clu import parameter_overview
from tensorboard.compat.proto import event_pb2
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from zeroplay_jax.runtime import disk
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.types import UserError, first_line

# Project or experiment of the services where the environment names none.
_PROJECT = 'zeroplay_jax'
# Characters that MLflow allows in the name of a metric.
_NOT_ALLOWED = re.compile(r'[^\w\-. /]')
_EVENTS = 'events.out.tfevents'
# In front of an event in a file of TensorBoard.
_HEADER_BYTES = 12


class ScalarWriter(Protocol):
    """Takes the metrics of a run, step by step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the finite metrics of a step: name → value."""

    def close(self) -> None:
        """Writes what is buffered, and ends."""


class TensorBoardWriter:
    """TensorBoard events in the workdir; see `open_writers` for the arguments."""

    def __init__(self, workdir: pathlib.Path, first_step: int):
        for path in sorted(workdir.glob(f'{_EVENTS}.*')):
            _cut_events(path, first_step)
        # Names of files in one folder differ, and are in the order of the runs.
        name = f'{_EVENTS}.{time.time():.6f}.{socket.gethostname()}'
        self._file = (workdir / name).open('wb')
        self._records = RecordWriter(self._file)
        self._write(event_pb2.Event(file_version='brain.Event:2'))

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


def _cut_events(path: pathlib.Path, first_step: int) -> None:
    """Removes the events of steps from `first_step` on from a file of TensorBoard, or the file if none is left."""
    content = path.read_bytes()
    kept = []
    has_values = False
    begin = 0
    # A record is its length, a checksum of 4 bytes, the event, and one of 4 bytes. A kill leaves an incomplete one.
    while len(content) >= begin + _HEADER_BYTES:
        (length,) = struct.unpack_from('<Q', content, begin)
        end = begin + _HEADER_BYTES + length + 4
        if end > len(content):
            break
        event = event_pb2.Event.FromString(content[begin + _HEADER_BYTES : end - 4])
        is_value = event.HasField('summary')
        if not is_value or event.step < first_step:
            kept.append(content[begin:end])
            has_values |= is_value
        begin = end
    if has_values:
        disk.write_bytes(path, kept)
    else:
        path.unlink()


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
