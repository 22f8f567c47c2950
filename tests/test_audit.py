"""An auditor that shares no code with the project repeats runs of all systems, and notices mistakes."""

import json
import re
import shutil
import sys

import pytest
import run_library
import torch
from python_process import ROOT
from run_files import lines

from benchmarks.audit.__main__ import BAR
from benchmarks.audit.files import read_lines
from benchmarks.audit.replay import audit
from benchmarks.audit.rewards import largest_error

# Run → a mistake that the auditor makes on purpose.
RUNS = {
    'drzero': 'one_group',
    'piplay': 'teacher_lags',
    'ssp': 'other_baseline',
    'dspo': 'norms_decay',
    'truncated': 'all_ids',
    'scope': 'kl_estimate',
    'ppo': 'denominator',
}


# Several processes of tests share the machine.
torch.set_num_threads(1)


@pytest.mark.parametrize('name', RUNS)
def test_a_run_is_what_its_rollouts_and_rewards_say(name, tmp_path_factory):
    workdir = run_library.whole(name, tmp_path_factory)
    trained = set()
    for step in lines(workdir):
        norms = [name for name in step if name.endswith('/gradient_norm')]
        trained |= {(step['step'], name.partition('/')[0]) for name in norms}
    found = {(record['step'], record['role']): record for record in audit(workdir)}
    assert trained and trained <= found.keys()
    for record in found.values():
        # Rounding has its largest share in the first updates.
        assert record['rewards'] < 1e-9
        assert record['advantages'] == 0 and record['distance'] <= 5 * BAR
        for own, of_run in (('loss', 'run_loss'), ('norm', 'run_gradient_norm')):
            of_run = record[of_run]
            assert record[own] == pytest.approx(of_run, 1e-4, 1e-7, nan_ok=True)


@pytest.mark.parametrize('name', RUNS)
def test_a_mistake_is_noticed(name, tmp_path_factory):
    workdir = run_library.whole(name, tmp_path_factory)
    records = [*audit(workdir, RUNS[name])]
    assert max(record['distance'] for record in records) >= 10 * BAR


@pytest.mark.parametrize('name', ['rows.jsonl', 'step2'])
def test_a_run_without_its_rows_or_weights_is_refused(name, tmp_path, tmp_path_factory):
    workdir = run_library.whole('dspo', tmp_path_factory)
    shutil.copytree(workdir, tmp_path / 'run', ignore=shutil.ignore_patterns(name))
    with pytest.raises(ValueError, match=name):
        [*audit(tmp_path / 'run')]


def test_a_reward_that_the_text_does_not_earn_is_noticed(tmp_path_factory):
    workdir = run_library.whole('dspo', tmp_path_factory)
    config = json.loads((workdir / 'run.json').read_text())['config']
    (right, *_) = [row for row in read_lines(workdir / 'rows.jsonl') if row['reward'] == 1]
    assert largest_error([right], config) == 0
    right['segments'][-1]['text'] = '<answer>another</answer>'
    assert largest_error([right], config) == 1


def test_the_auditor_shares_no_code_with_what_it_audits():
    known = {*sys.stdlib_module_names, 'numpy', 'safetensors', 'torch', 'transformers'}
    for path in (ROOT / 'benchmarks' / 'audit').glob('*.py'):
        for name in re.findall(r'^ *(?:from|import) ([\w.]+)', path.read_text(), re.M):
            assert name.startswith('benchmarks.audit') or name.partition('.')[0] in known
    assert not (ROOT / 'benchmarks' / '__init__.py').read_text()
