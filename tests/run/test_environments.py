"""The examples in which an environment of another library plays: they learn, and runs of one have the same bits."""

import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tomllib

import example_runs
import pytest
from host_processes import free_port
from run_files import check_same_run, lines

from zeroplay_jax.run import loop

ROOT = pathlib.Path(__file__).parents[2]


def check_steps(workdir, count):
    """Returns the rows of a run with so many steps, of which one taught and none lost a rollout."""
    steps = [record for record in lines(workdir) if record['phase'] == 'solver']
    assert len(steps) == count
    assert any(step.get('solver/gradient_norm', 0.0) > 0 for step in steps)
    assert all(step['dropped_episodes'] == 0 for step in steps)
    rows = [row for row in lines(workdir, 'trajectories.jsonl') if row['phase'] == 'solver']
    assert rows and not any(row['drop'] for row in rows)
    return rows


def replies(row):
    return [segment['text'] for segment in row['segments'] if segment['source'] == 'env']


def environment_with(folder, requirement):
    """The Python of a new environment with a package; the test skips where no registry has it."""
    subprocess.run([sys.executable, '-m', 'venv', folder], check=True)
    python = folder / 'bin' / 'python'
    command = [python, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check']
    done = subprocess.run([*command, requirement], capture_output=True, text=True, timeout=900)
    if done.returncode:
        assert 'conflicting dependencies' not in done.stderr
        pytest.skip(f'{requirement} cannot be installed: {done.stderr.strip().splitlines()[-1]}')
    return python


@pytest.mark.long
@pytest.mark.fault('nov29-D5', 'a taskset and a harness of verifiers 0.4')
def test_an_environment_of_verifiers_of_today_trains_two_steps(tmp_path):
    readme = (ROOT / 'examples' / 'verifiers_env' / 'README.md').read_text()
    (requirement,) = re.findall(r'pip install (verifiers==\S+)', readme)
    config = example_runs.make_config('verifiers_env')
    config.environment.python = str(environment_with(tmp_path / 'python', requirement))
    config.solver.steps = 2
    runs = [tmp_path / name for name in ('one', 'other')]
    for workdir in runs:
        loop.run(config.copy_and_resolve_references(), workdir)
    rows = check_steps(runs[0], 2)
    assert {len(row['turns']) for row in rows} <= {1, 2, 3}
    assert any('information>Doc 1' in text for row in rows for text in replies(row))
    calls = [call for row in rows for call in row['turns'] if call]
    assert any(call['text'].startswith('Doc 1') for call in calls)
    assert {name for row in rows for name in row['parts']} == {'is_named', 'is_short'}
    check_same_run(*runs)


OPENENV = """
import pathlib, sys, threading, time
import example_runs, uvicorn
from examples.openenv_env.server import app
from zeroplay_jax.run import loop
port, workdir = sys.argv[1:]
server = uvicorn.Server(uvicorn.Config(app, port=int(port), log_level='error'))
threading.Thread(target=server.run, daemon=True).start()
while not server.started:
    time.sleep(0.05)
config = example_runs.make_config('openenv_env')
config.openenv.url = f'http://127.0.0.1:{port}'
loop.run(config, pathlib.Path(workdir))
"""


@pytest.mark.long
@pytest.mark.fault('nov29-D7', 'the extra openenv under its live name')
def test_a_server_of_openenv_trains_three_steps(tmp_path):
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    python = environment_with(tmp_path / 'python', *project['optional-dependencies']['openenv'])
    # All else is that of this environment; its own packages come first.
    (packages,) = (tmp_path / 'python').glob('lib/python*/site-packages')
    (packages / 'shared.pth').write_text(sysconfig.get_path('purelib') + '\n')
    command = [python, '-c', OPENENV, str(free_port()), tmp_path / 'run']
    environment = os.environ | {'PYTHONPATH': f'{ROOT}:{ROOT / "tests"}'}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = check_steps(tmp_path / 'run', 3)
    assert all('Now with' in text for row in rows for text in replies(row))
    assert {len(row['turns']) for row in rows} == {3}
