"""The tables and figures of the five papers: each has a command that runs on the miniature, or a reason why not."""

import importlib
import json
import re
import shlex
import shutil
import tomllib

import pytest
import test_readme
import test_recipes
from host_processes import RUN
from python_process import ROOT, config_flags, run_python

from zeroplay_jax.configs import ablations
from zeroplay_jax.configuration import fields
from zeroplay_jax.evaluation import protocols
from zeroplay_jax.mini.world import World, evaluation_questions, evaluation_tasks
from zeroplay_jax.runtime import record

GOLDEN = ROOT / 'tests' / 'golden'
PAPERS = tomllib.loads((ROOT / 'docs' / 'papers.toml').read_text(encoding='utf-8'))
COMMANDS = sorted({row['command'] for row in PAPERS.values() if 'command' in row})
SMALL = config_flags('world.train=(0,4) world.evaluation=(0,2) eval.questions=2 progress=False')
CLEAN = ROOT / 'zeroplay_jax' / 'mini' / 'clean'
POLICIES = ('policy', 'answerer')
# Numbers of tables and figures, appendices included. π-Play's first four tables have none in its text.
NUMBERS = {
    'SSP': {'table': range(1, 16), 'figure': range(1, 8)},
    'π-Play': {'table': range(5, 12), 'figure': range(1, 11)},
    'Dr. Zero': {'table': range(1, 10), 'figure': range(1, 15)},
    'DSPO': {'table': range(1, 2), 'figure': range(1, 4)},
    'SCOPE': {'table': range(1, 12), 'figure': range(1, 19)},
}
# One process each, because the flags of a config's fields are defined once.
PARSE = """
import importlib, sys
from zeroplay_jax.configuration import command_line
module, *words = sys.argv[1:]
importlib.import_module(f'zeroplay_jax.{module}')
rest = command_line.parse_flags([module, *words])[1:]
command_line.load(command_line.flags.FLAGS.config, rest)
"""


def commands_of(module):
    return [line for line in COMMANDS if line.split()[0] == module]


def test_every_table_and_figure_has_a_command_or_a_reason():
    for name, row in PAPERS.items():
        assert row.keys() <= {'command', 'report', 'rows', 'not'}, name
        assert row.keys() & {'command', 'report', 'not'}, name
    assert {name.split(',')[0] for name in PAPERS} == NUMBERS.keys()
    modules = {line.split()[0] for line in COMMANDS}
    assert modules == {'main', 'report', 'extras.evolution', 'evaluate', 'compare'}


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


def test_every_row_is_a_config():
    named = [config for row in PAPERS.values() for config in row.get('rows', ())]
    assert set(named) == ablations.ROWS.keys()


def test_commands_of_the_page_have_the_flags_of_commands_that_are_run_here():
    page = (ROOT / 'docs' / 'papers.md').read_text(encoding='utf-8').replace('\\\n', ' ')
    calls = re.findall(r'python -m zeroplay_jax\.([\w.]+) (.*)', page)
    modules = {module for module, _ in calls}
    assert modules == {'extras.figures', 'extras.evolution', 'evaluate', 'compare'}
    for module, words in calls:
        run = set(re.findall(r'--(\w+)', ' '.join(commands_of(module))))
        # `evaluate` gets --out from the test below, and tests/extras/figures draws figures.
        assert set(re.findall(r'--(\w+)', words)) <= run | {'out'}, module


def played_on_the_miniature():
    """How the trainings begin that other tests play in every `make test`."""
    pages = [param.values[0] for param in test_readme.played() if not param.marks]
    systems = [param.values[0] for param in test_recipes.ALL_SYSTEMS if not param.marks]
    commands = [shlex.split(command)[1:] for command in pages] + [['-m', 'zeroplay_jax.main', *RUN]]
    return [words[:3] for words in [*commands, *map(test_recipes.command, systems)]]


@pytest.mark.parametrize('line', commands_of('main'))
def test_every_training_parses_and_is_played_on_the_miniature(line):
    """Not here a second time, but in test_recipes.py, test_hosts.py (SSP) and test_readme.py (Dr. Zero)."""
    module, config, _ = shlex.split(line)
    assert ['-m', f'zeroplay_jax.{module}', f'{config}:mini'] in played_on_the_miniature()
    result = run_python('-c', PARSE, *shlex.split(line))
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize('line', commands_of('report'))
def test_reports_are_written_from_a_recorded_run(line, tmp_path, capsys):
    run = shutil.copytree(GOLDEN / 'runs' / 'drzero', tmp_path / 'run')
    module, *words = [{'RUN': str(run)}.get(word, word) for word in shlex.split(line)]
    assert importlib.import_module(f'zeroplay_jax.{module}').main(words) == 0
    assert 'report.html' in capsys.readouterr().out


@pytest.fixture(scope='module')
def questions(tmp_path_factory):
    """A folder with a few questions and an open task of the miniature world, under the names of public sets."""
    folder = tmp_path_factory.mktemp('questions')
    worlds = [World(number, 'evaluation', 0.25) for number in range(2)]
    lines = list(map(json.dumps, evaluation_questions(worlds, 2, (1, 2))))
    (task,) = evaluation_tasks(worlds[:1], 1, (1,))
    open_task = {'task': task['question'], 'rubrics': task['rubrics']}
    for name, of_set in (
        ('nq', lines[:2]),
        ('hotpotqa', lines[2:]),
        ('TASKS', [json.dumps(open_task)]),
    ):
        (folder / f'{name}.jsonl').write_text('\n'.join(of_set))
    return folder


def miniature(flags, questions, run):
    """The flags of an evaluation on the miniature: its config, lengths and questions, and the clean start as policy."""
    config = importlib.import_module(f'zeroplay_jax.configs.{flags["protocol"]}').get_config('mini')
    run.mkdir()
    record.write(run, record.Record(record.plain_config(config.to_dict())))
    for role in ('solver', 'policy'):
        for name in ('policy', 'iteration1', 'iteration2', 'iteration3'):
            (run / name).mkdir(exist_ok=True)
            (run / name / role).symlink_to(CLEAN)
    sets = ['TASKS'] if 'TASKS' in flags['sets'] else ['nq', 'hotpotqa']
    changed = {name: flags[name].replace('RUN', str(run)) for name in POLICIES if name in flags}
    changed |= {
        'config': f'{flags["config"]}:mini',
        'sets': ','.join(str(questions / f'{name}.jsonl') for name in sets),
    }
    lengths = fields.leaves(config)
    for name in protocols.PROTOCOLS[flags['protocol']]:
        if name.startswith(('rollout.', 'sampler.')):
            changed[f'config.{name}'] = lengths[name]
    return flags | changed


@pytest.mark.parametrize('line', commands_of('evaluate'))
def test_every_evaluation_and_comparison_runs_on_the_miniature(line, questions, tmp_path, capsys):
    given = dict(word[2:].split('=', 1) for word in shlex.split(line)[1:])
    flags = miniature(given, questions, tmp_path / 'RUN') | {'out': tmp_path / 'BASE.json'}
    words = [f'--{name}={value}' for name, value in flags.items()]
    done = run_python('-m', 'zeroplay_jax.evaluate', *words, *SMALL)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f'protocol {given["protocol"]}: ' in done.stderr
    last = {'TASKS.jsonl': 'TASKS'}.get(given['sets'], 'average')
    if given['protocol'] == 'piplay':
        last = 'total'
    assert done.stdout.splitlines()[0].split()[-1] == last
    result = next(tmp_path.glob('BASE*.json'))
    for comparison in commands_of('compare'):
        names = {'BASE.json': str(result), 'OTHER.json': str(result)}
        module, *words = [names.get(word, word) for word in shlex.split(comparison)]
        if f'--protocol={given["protocol"]}' in words:
            assert importlib.import_module(f'zeroplay_jax.{module}').main(words) == 0
            assert capsys.readouterr().out.startswith(r'\begin{tabular}')
