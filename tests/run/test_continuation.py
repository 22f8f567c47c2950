"""A run with more iterations than the other: which ones continue its schedule, and what they take along."""

import json

import jax.numpy as jnp
import pytest
from run_records import write_record

from zeroplay_jax.configs import drzero
from zeroplay_jax.configuration.fields import frozen
from zeroplay_jax.learner.checkpoint import Checkpointer, saved_steps
from zeroplay_jax.run import branch, run_folder
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.selfplay.schedule import Phase, Step

PHASE = Phase('solver', 8, ('solver',), iteration=1)
STEPS = [Step(PHASE, number, number) for number in range(8)]
FILES = {'policy.path': {'model.safetensors': {'bytes': 1, 'sha256': 'a'}}}
TOOLS = {'solver': {'search': {'description': 'Searches.', 'note': ''}}}


def save(workdir, *steps):
    checkpoints = Checkpointer(workdir, keep=2)
    for step in steps:
        state = {'cursor': step, 'evaluations': {}}
        checkpoints.save(step, {'solver': {'params': {'x': jnp.ones(4)}}}, state)
    checkpoints.close()


def copy(source, workdir):
    workdir.mkdir()
    place = run_folder.Place(workdir)
    with branch.found(Hosts(), place, str(source), is_resumed=False) as found:
        branch.copy(Hosts(), place, found, STEPS, {'seed': 0})
    return found


def test_a_kill_while_a_log_is_rewritten_leaves_no_further_log(tmp_path, monkeypatch):
    log = tmp_path / 'metrics.jsonl'
    log.write_text('{"step": 1, "run": "there"}\n')

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(branch.os, 'replace', die)
        branch._replace_hash(log, 'there', 'here')
    # What a restart goes over.
    assert list(tmp_path.glob('*.jsonl')) == [log]
    branch._replace_hash(log, 'there', 'here')
    assert json.loads(log.read_text())['run'] == 'here' and list(tmp_path.iterdir()) == [log]


def test_a_checkpoint_that_loses_its_checksums_meanwhile_is_not_copied(tmp_path, monkeypatch):
    """Its run removes it, and what is left of it may be incomplete."""
    save(tmp_path / 'old', 2, 4)
    copytree = branch.shutil.copytree

    def copy_late(*args, **options):
        (tmp_path / 'old' / 'checkpoints' / '4' / 'checksums.sha256').unlink(missing_ok=True)
        return copytree(*args, **options)

    monkeypatch.setattr(branch.shutil, 'copytree', copy_late)
    assert copy(tmp_path / 'old', tmp_path / 'new').step == 2
    assert saved_steps(tmp_path / 'new' / 'checkpoints') == [2]


def write(workdir, inputs, tools):
    (workdir / 'checkpoints').mkdir(parents=True, exist_ok=True)
    config = drzero.get_config('mini')
    write_record(workdir, config, inputs=inputs, tools=tools)


@pytest.mark.parametrize(
    ('inputs', 'tools', 'is_longer'),
    [
        (FILES | {run_folder.SERVER: {'wiki-1': {}}}, TOOLS, True),
        (FILES | {run_folder.SERVER: {'wiki-2': {}}}, TOOLS, False),
        (FILES, TOOLS, False),
        (FILES | {run_folder.SERVER: {'wiki-1': {}}}, {'solver': {}}, False),
        (
            FILES | {run_folder.SERVER: {'wiki-1': {}}},
            {'solver': {'search': {'description': 'Finds.', 'note': ''}}},
            False,
        ),
    ],
)
def test_another_search_index_or_tool_is_another_schedule(tmp_path, inputs, tools, is_longer):
    config = drzero.get_config('mini')
    old, new = tmp_path / 'old', tmp_path / 'new'
    write(old, FILES | {run_folder.SERVER: {'wiki-1': {}}}, TOOLS)
    write(new, inputs, tools)
    config.schedule.iterations += 1
    source = branch.Source(old, 4, old / 'checkpoints' / '4')
    assert branch.is_longer(new, source, frozen(config)) == is_longer
