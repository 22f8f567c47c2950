"""The log of a run that was killed: cut back to its checkpoint, torn line included, then written on."""

import json
import math

from zeroplay_jax import report
from zeroplay_jax.runtime.metrics import JsonLines, MetricsWriter


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
    path.write_bytes(b'{"step": 0}\n' + damaged + b'{"step": 2}\n')
    JsonLines(path, keep_below=2).close()
    assert steps(path) == [0, 1]


def test_a_new_run_begins_with_an_empty_log(tmp_path):
    (tmp_path / 'metrics.jsonl').write_text('{"step": 0}\nnot json\n{"no": "step"}\n')
    JsonLines(tmp_path / 'metrics.jsonl', keep_below=0).close()
    assert (tmp_path / 'metrics.jsonl').read_text() == ''


def test_numbers_reach_the_lines_and_the_board(tmp_path):
    metrics = MetricsWriter(tmp_path, 0)
    metrics.write_scalars(0, 1, 'solver', {'em/hop1': 0.5, 'bad': math.nan})
    metrics.write_trajectories([{'step': 0, 'text': '\u2028 </script>'}])
    metrics.close()
    record = json.loads((tmp_path / 'metrics.jsonl').read_text())
    assert record == {'step': 0, 'iteration': 1, 'phase': 'solver', 'em/hop1': 0.5, 'bad': None}
    assert len((tmp_path / 'trajectories.jsonl').read_bytes().splitlines()) == 1
    (events,) = tmp_path.glob('events.out.tfevents*')
    assert b'solver/em/hop1' in events.read_bytes()


def test_report_command(tmp_path, capsys):
    assert report.main([str(tmp_path / 'nothing')]) == 2
    assert 'Traceback' not in capsys.readouterr().err
    metrics = MetricsWriter(tmp_path, 0)
    metrics.write_scalars(0, 0, 'solver', {'reward_mean': 0.5})
    metrics.close()
    assert report.main([str(tmp_path)]) == 0
    assert (tmp_path / 'report.html').read_text().startswith('<!doctype html>')
