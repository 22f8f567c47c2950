"""The tables and figures of the five papers: each has a command, or a reason why not."""

import json
import re
import tomllib

import pytest
from python_process import ROOT, config_flags, run_python

from zeroplay_jax.configs import ablations
from zeroplay_jax.configuration import fields
from zeroplay_jax.mini.world import World, evaluation_questions
from zeroplay_jax.runtime import record

PAPERS = tomllib.loads((ROOT / 'docs' / 'papers.toml').read_text(encoding='utf-8'))
# Numbers of tables and figures, appendices included. π-Play's first four tables have none in its text.
NUMBERS = {
    'SSP': {'table': range(1, 16), 'figure': range(1, 8)},
    'π-Play': {'table': range(5, 12), 'figure': range(1, 11)},
    'Dr. Zero': {'table': range(1, 10), 'figure': range(1, 15)},
    'DSPO': {'table': range(1, 2), 'figure': range(1, 4)},
    'SCOPE': {'table': range(1, 12), 'figure': range(1, 19)},
}


def test_every_table_and_figure_has_a_command_or_a_reason():
    for name, row in PAPERS.items():
        assert row.keys() <= {'command', 'report', 'rows', 'not'}, name
        assert row.keys() & {'command', 'report', 'not'}, name
    assert {name.split(',')[0] for name in PAPERS} == NUMBERS.keys()
    named = [config for row in PAPERS.values() for config in row.get('rows', ())]
    assert set(named) == ablations.ROWS.keys()


def numbers(kind, place):
    """The numbers behind 'table' or 'figure' in the name of a place, such as 'table 5, figures 7 to 9'."""
    numbers_there = set()
    for listed in re.findall(rf'{kind}s? ((?:\d+[a-d]?(?:, | to )?)+)', place):
        for first, last in re.findall(r'(\d+)[a-d]?(?: to (\d+))?', listed):
            numbers_there |= set(range(int(first), int(last or first) + 1))
    return numbers_there


@pytest.mark.parametrize('paper', NUMBERS)
def test_no_table_or_figure_of_a_paper_is_left_out(paper):
    places = [name.partition(', ')[2] for name in PAPERS if name.startswith(f'{paper}, ')]
    for kind, expected in NUMBERS[paper].items():
        assert set().union(*(numbers(kind, place) for place in places)) >= set(expected), kind


def test_one_policy_of_a_run_is_answered_by_another(tmp_path):
    """As for a figure of SCOPE: searches of one iteration, answers of another; tests/evaluation plays the others."""
    run = tmp_path / 'run'
    run.mkdir()
    config = fields.config('scope', 'mini')
    record.write(run, record.Record(record.plain_config(config.to_dict())))
    for iteration in (1, 3):
        (run / f'iteration{iteration}').mkdir()
        (run / f'iteration{iteration}' / 'solver').symlink_to(ROOT / 'zeroplay_jax/mini/base')
    asked = evaluation_questions([World(0, 'evaluation')], 1, (1, 2))
    (tmp_path / 'set.jsonl').write_text('\n'.join(map(json.dumps, asked)))
    done = run_python(
        *(
            '-m',
            'zeroplay_jax.evaluate',
            '--config=configs/scope.py:mini',
            f'--sets={tmp_path}/set.jsonl',
        ),
        *(
            f'--policy={run}@iteration1',
            f'--answerer={run}@iteration3',
            f'--out={tmp_path}/out.json',
        ),
        *config_flags('world.train=(0,4) world.evaluation=(0,2)'),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    written = json.loads((tmp_path / 'out.json').read_text())
    assert written['settings']['answerer'].endswith('iteration3/solver')
