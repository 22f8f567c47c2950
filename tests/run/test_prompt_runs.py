"""A run with prompts of a user: its rollouts begin with them, and so does what goes on, asks and exports."""

import pathlib
import shutil

import pytest
from killed_runs import run_until
from run_files import check_same_run, lines

from zeroplay_jax import ask
from zeroplay_jax.configs import drzero
from zeroplay_jax.configuration import places, rules
from zeroplay_jax.export import export
from zeroplay_jax.run import loop
from zeroplay_jax.runtime import record
from zeroplay_jax.settings.kinds import prompts_name

EXAMPLE = pathlib.Path(__file__).parents[2] / 'configs' / 'drzero_prompts.toml'


def config_with(path):
    config = drzero.get_config('mini')
    config.prompts = str(path)
    config.world.update(train=(0, 1), evaluation=(0, 1))
    config.schedule.hop_ratio = (1, 1)
    for role in (config.proposer, config.solver):
        role.update(steps=1, batch=4, samples=2)
    config.pool.update(batch=4, samples=1, batches=1)
    config.reward.solves = 2
    config.eval.update(questions=1, hops=(1,))
    config.rollout.update(prompt_tokens=640, max_turns=2, turn_tokens=32)
    config.sampler.update(context=1024, slots=16)
    config.micro.update(rows=2, tokens=1024)
    config.update(progress=False, stop_after_empty_steps=0, log_trajectories=64)
    return config


def begun(path, workdir):
    """The config as the command has it when the run begins or goes on."""
    config = config_with(path)
    places.keep_prompts(config, workdir)
    rules.check(config)
    return config


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """A run with the example of the project."""
    workdir = tmp_path_factory.mktemp('prompts') / 'run'
    loop.run(begun(EXAMPLE, workdir), workdir)
    return workdir


def test_rollouts_and_the_record_have_them(whole):
    text = EXAMPLE.read_text()
    run = record.read(whole)
    assert run.config['prompts'] == text
    assert run.inputs['prompts'] == {prompts_name(text): {}}
    opening = {}
    for line in lines(whole, 'trajectories.jsonl'):
        opening[line['role']] = line['segments'][0]['text']
    assert opening['proposer'].startswith('<|im_start|>system\nYou write quiz questions')
    assert 'Write {a question} between' in opening['proposer']
    assert 'You may search 1 times.' in opening['solver']


def test_a_killed_run_goes_on_without_the_file(whole, tmp_path, monkeypatch, capsys):
    path = tmp_path / 'my.toml'
    shutil.copy(EXAMPLE, path)
    workdir = tmp_path / 'run'
    run_until(2, monkeypatch, begun(path, workdir), workdir)
    path.unlink()
    capsys.readouterr()
    config = begun(path, workdir)
    assert f'with which {workdir} began' in capsys.readouterr().err
    loop.run(config, workdir)
    check_same_run(whole, workdir)


def test_what_asks_and_exports_takes_those_of_the_run(whole, tmp_path):
    assert ask.settings(whole / 'policy' / 'solver').prompts == EXAMPLE.read_text()
    for folder in export(whole, tmp_path / 'out'):
        card = (folder / 'README.md').read_text()
        assert f'| prompts | {prompts_name(EXAMPLE.read_text())} |' in card
        assert f'`{folder.name}`, system message:' in card
        assert ('You may search 1 times.' in card) == (folder.name == 'solver')
