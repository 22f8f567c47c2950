"""The log of a run that was killed: cut back to its checkpoint, torn line included, then written on."""

import math
from unittest import mock

import run_files

from zeroplay_jax.runtime import log
from zeroplay_jax.runtime.log import JsonLines, MetricsWriter


def steps(path):
    return [line['step'] for line in run_files.lines(path.parent, path.name)]


def test_lines_after_the_checkpoint_and_damaged_ones_are_cut_off(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    text = ''.join(f'{{"step": {i}, "x": "é \u2028 \x85"}}\n' for i in (0, 1, 1, 2, 3))
    damaged = b'{"step": 1, "text": "\xff"}\n{"step": 1e999}\n' + b'[' * 100_000 + b'\n{"no": 1}\n'
    path.write_bytes(damaged + text.encode() + b'{"step": 4, "x')
    lines = JsonLines(path, keep_below=2)
    lines.write([{'step': 2}, {'step': 3}])
    lines.close()
    assert steps(path) == [1, 0, 1, 1, 2, 3]


def test_a_number_that_is_none_is_null(tmp_path):
    metrics = MetricsWriter(tmp_path, 0)
    metrics.write_scalars(0, 1, 'solver', {'em/hop1': 0.5, 'bad': math.nan})
    metrics.close()
    (line,) = run_files.lines(tmp_path)
    assert line == {'step': 0, 'iteration': 1, 'phase': 'solver', 'em/hop1': 0.5, 'bad': None}


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


def test_a_service_that_fails_costs_its_curves_and_not_the_run(capsys):
    service = mock.Mock()
    service.write.side_effect = ConnectionError('no route\nto the host')
    writer = log.GuardedWriter('wandb', service)
    for step in range(3):
        writer.write(step, {'x': 1.0})
    writer.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('warning: wandb gets no metrics from step 0 on (no route)')
