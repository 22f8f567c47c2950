"""The example in which an environment of verifiers plays: it learns, and two runs of it have the same bits."""

import pathlib
import re
import subprocess
import sys

import example_runs
import pytest
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
