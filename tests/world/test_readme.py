"""The commands of the pages, as a reader gives them: in a copy of the project, the long ones in a small setting.

Of several that differ by a flag or a path one is played; tests/test_commands.py holds the flags of all.
"""

import json
import os
import re
import shlex
import sys

import pytest
from launch_cases import planned
from page_commands import PYTHON, RULES, as_module, blocks, runnable
from project_copy import copy_project
from python_process import FAST, config_flags
from python_process import run as run_command
from run_files import lines


def flags(fields):
    return shlex.join(config_flags(fields))


# Without writers no command loads TensorFlow.
ONE_STEP = 'sampler.slots=16 micro.rows=2 solver.steps=1 stop_after_empty_steps=0 log.writers=()'
PROPOSED = f'{ONE_STEP} proposer.steps=1 pool.batch=8 pool.batches=1'
WORLDS = 'world.train=(0,4) world.evaluation=(0,2)'
# So many rollouts that they do not all earn the same: README asks the trained policy.
FEW = flags(
    f'{PROPOSED} {WORLDS} proposer.batch=16 solver.batch=8 solver.samples=5 reward.solves=2 schedule.iterations=1 '
    'eval.questions=2 eval.every=0'
)
MINI = flags(f'{PROPOSED} {WORLDS} solver.batch=4 eval.questions=2')
GIVEN = flags(f'{ONE_STEP} {WORLDS} solver.batch=4 solver.minibatches=1 eval.questions=1')
# How a command that begins so is made small: what is put behind it.
SMALL = {
    'make quickstart': f'ARGS="{FEW}"',
    'zeroplay train --config=configs/dspo.py:mini': GIVEN,
    'zeroplay train --config=configs/drzero.py:mini': MINI,
    'zeroplay evaluate': flags('eval.questions=3'),
}


def made_by(command):
    """The files that are there after a command."""
    return [file for part, file in RULES['made'].items() if part in command]


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    """A copy of what git tracks, and the environment that is there."""
    copy = copy_project(tmp_path_factory.mktemp('readme') / 'zeroplay')
    # The page about corpora names the fields of a file like this one.
    row = {'key': 'a', 'heading': 'Otters', 'paragraph': 'An otter sleeps on its back.'}
    (copy / 'passages.jsonl').write_text(json.dumps(row) + '\n')
    (copy / 'easy_recipe').mkdir()
    (copy / 'easy_recipe' / 'easy.py').write_text(easy_recipe())
    return copy


def easy_recipe():
    """The complete recipe of the page about recipes."""
    texts = [text for text in blocks('docs/recipes.md', 'python') if 'def episode' in text]
    return next(text for text in texts if 'Easy questions first' in text)


def succeeded(project, command):
    """What a command prints."""
    for there, here in RULES['shared'].items():
        command = command.replace(there, here)
    for known, flags_behind in SMALL.items():
        if command.startswith(known):
            command = f'{command} {flags_behind}'
    command = as_module(command)
    words = ['bash', '-c', command]
    # A command with something else for the shell than quotes is the shell's.
    unquoted = re.sub('"[^"$`]*"|\'[^\']*\'', '', command)
    if command.startswith(PYTHON) and not re.search(r'[|<>;&$*?(){}~`\\"\']', unquoted):
        words = [sys.executable, *shlex.split(command.removeprefix(PYTHON))]
    done = run_command(words, project, os.environ | FAST | {'PYTEST_ADDOPTS': ''}, timeout=400)
    assert done.returncode == 0, (done.stdout[-1500:], done.stderr[-2500:])
    return done.stdout


def played():
    """In the order of the pages: the later ones take what the earlier ones have made."""
    found = []
    for command in [command for page in RULES['played'] for command in runnable(page)]:
        is_left = any(part in command for part in RULES['like_others'])
        if not is_left and command not in found:
            found.append(command)
    return found


@pytest.mark.parametrize('command', played())
def test_a_command_of_the_pages_does_what_it_says(project, command):
    printed = succeeded(project, planned(command))
    for made in made_by(command):
        assert (project / made).is_file(), printed[-1500:]
    if 'mini/parts/base' in command:
        start, trained = printed.split('policy ')[1:]
        assert 'judge' in start.splitlines()[-1] and 'runs/quickstart' in trained  # as on the page


def test_the_recipe_of_the_documentation_was_run(project):
    rows = lines(project / 'runs/easy', 'trajectories.jsonl')
    solved = [row for row in rows if row['role'] == row['phase'] == 'solver']
    # Questions of one, two and three hops.
    hops = {(row['iteration'], row['info']['hops']) for row in solved}
    assert hops == {(0, 1), (1, 2), (2, 3)}
