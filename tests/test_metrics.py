"""The log of a run that was killed: cut back to its checkpoint, torn line included, then written on."""

import json
import math
from unittest import mock

import numpy as np
import pytest
from run_records import write_record

from zeroplay_jax.runtime import log
from zeroplay_jax.runtime.log import JsonLines, MetricsWriter
from zeroplay_jax.types import UserError


def steps(path):
    return [json.loads(line)['step'] for line in path.read_text().strip().split('\n')]


def test_lines_after_the_checkpoint_are_cut_off(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    record = lambda i: json.dumps({'step': i, 'x': 'é \u2028 \x85'}, ensure_ascii=False) + '\n'
    path.write_text(''.join(record(i) for i in (0, 1, 1, 2, 3)) + '{"step": 4, "x')
    lines = JsonLines(path, keep_below=2)
    lines.write([{'step': 2}, {'step': 3}])
    lines.close()
    assert steps(path) == [0, 1, 1, 2, 3]


def test_damage_to_a_log_does_not_end_a_resumed_run(tmp_path):
    path = tmp_path / 'trajectories.jsonl'
    damaged = b'{"step": 1, "text": "\xff"}\n{"step": 1e999}\n' + b'[' * 100_000 + b'\n'
    path.write_bytes(b'{"step": 0}\n' + damaged + b'{"no": "step"}\n{"step": 2}\n')
    JsonLines(path, keep_below=2).close()
    assert steps(path) == [0, 1]
    # A new run begins with an empty log.
    JsonLines(path, keep_below=0).close()
    assert path.read_text() == ''


def test_numbers_reach_the_lines_and_the_board(tmp_path):
    metrics = MetricsWriter(tmp_path, 0)
    metrics.write_scalars(0, 1, 'solver', {'em/hop1': 0.5, 'bad': math.nan})
    metrics.write_parameters({'policy': {'layer': {'kernel': np.zeros((3, 7), np.float32)}}})
    metrics.write('trajectories', [{'step': 0, 'text': '\u2028 </script>'}])
    metrics.close()
    record = json.loads((tmp_path / 'metrics.jsonl').read_text())
    assert record == {'step': 0, 'iteration': 1, 'phase': 'solver', 'em/hop1': 0.5, 'bad': None}
    assert len((tmp_path / 'trajectories.jsonl').read_bytes().splitlines()) == 1
    (events,) = tmp_path.glob('events.out.tfevents*')
    texts = (b'solver/em/hop1', b'parameters/policy', b'layer/kernel', b'(3, 7)', b'21')
    assert all(text in events.read_bytes() for text in texts)


def test_logged_rows_are_cut_back_and_no_run_has_them_without_the_field(tmp_path):
    MetricsWriter(tmp_path, 0).close()
    path = tmp_path / 'rows.jsonl'
    assert not path.exists()
    metrics = MetricsWriter(tmp_path, 0, has_rows=True)
    metrics.write('rows', [{'step': 0}, {'step': 1}])
    metrics.close()
    # The resumed run logs no more of them.
    MetricsWriter(tmp_path, 1).close()
    assert steps(path) == [0]


def board_steps(folder, curve='solver/x'):
    """Steps of a curve as TensorBoard reads it, from all event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder), {'scalars': 0}).Reload()
    return [event.step for event in board.Scalars(curve)]


def write_steps(folder, first, last):
    metrics = MetricsWriter(folder, first)
    for step in range(first, last):
        metrics.write_scalars(step, 0, 'solver', {'x': float(step)})
    metrics.close()


@pytest.mark.fault('F9', 'EventAccumulator.Scalars() of a script')
def test_the_board_has_every_step_once_after_a_kill(tmp_path):
    write_steps(tmp_path, 0, 6)
    # Killed in the middle of a record, four steps after the checkpoint.
    (path,) = tmp_path.glob('events.out.tfevents*')
    path.write_bytes(path.read_bytes()[:-5])
    write_steps(tmp_path, 2, 9)
    write_steps(tmp_path, 8, 10)
    assert board_steps(tmp_path) == list(range(10))
    assert steps(tmp_path / 'metrics.jsonl') == list(range(10))
    # A run that begins anew leaves nothing of the one before.
    write_steps(tmp_path, 0, 2)
    assert board_steps(tmp_path) == [0, 1]


@pytest.mark.parametrize(
    ('method', 'problem'),
    [('write', 'gets no metrics from step 0 on'), ('close', 'could not be closed')],
)
def test_a_service_that_fails_costs_its_curves_and_not_the_run(capsys, method, problem):
    service = mock.Mock()
    getattr(service, method).side_effect = ConnectionError('no route\nto the host')
    writer = log.GuardedWriter('wandb', service)
    for step in range(3):
        writer.write(step, {'x': 1.0})
    writer.close()
    writer.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f'warning: wandb {problem} (no route)')
    assert service.close.call_count == (method == 'close')


def test_a_service_that_cannot_be_opened_is_one_line(tmp_path, monkeypatch):
    def refuse(*_):
        raise RuntimeError('no key\nmore')

    monkeypatch.setitem(log._WRITERS, 'wandb', refuse)
    with pytest.raises(UserError, match=r'config.log.writers: wandb cannot be opened \(no key\)'):
        MetricsWriter(tmp_path, 0, ('wandb',))


def write_twice(workdir, writer):
    """The steps of a run that was killed at step 3 and went on from step 2; the writers of both parts."""
    write_record(workdir, {})
    written = []
    for first in (0, 2):
        metrics = MetricsWriter(workdir, first, (writer,))
        for step in range(first, first + 3):
            metrics.write_scalars(step, 0, 'solver', {'x:y': float(step)})
        written.append(metrics._curves[0]._writer)
        metrics.close()
    return written


def test_wandb_continues_its_run(tmp_path, monkeypatch):
    pytest.importorskip('wandb', reason='wandb is not installed')
    monkeypatch.setenv('WANDB_MODE', 'offline')
    one, two = write_twice(tmp_path, 'wandb')
    assert one._run.id == two._run.id
    folders = sorted((tmp_path / 'wandb').glob('offline-run-*'))
    assert len(folders) == 2 and all(list(folder.glob('*.wandb')) for folder in folders)


def test_mlflow_has_every_step_once(tmp_path, monkeypatch):
    mlflow = pytest.importorskip('mlflow', reason='mlflow is not installed')
    monkeypatch.setenv('MLFLOW_TRACKING_URI', (tmp_path / 'store').as_uri())
    monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
    monkeypatch.setenv('MLFLOW_EXPERIMENT_NAME', 'tests')
    write_twice(tmp_path / 'run', 'mlflow')
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name('tests').experiment_id
    (run,) = client.search_runs([experiment])
    history = client.get_metric_history(run.info.run_id, 'solver/x_y')
    assert [(entry.step, entry.value) for entry in history] == [(n, float(n)) for n in range(5)]
    assert run.info.run_name == 'run'
