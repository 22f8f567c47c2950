"""main --check: all mistakes of a command at once, without devices, and nothing is created."""

import json
import os
import subprocess
import sys

import pytest
from config_checks import ROOT
from run_records import write_record

from zeroplay_jax.configuration import check
from zeroplay_jax.configuration.check import is_asked_for
from zeroplay_jax.configuration.fields import config as packaged_config
from zeroplay_jax.settings.kinds import ConfigError, Mistakes, fail


def checked(folder, *arguments, flag='--check'):
    command = [sys.executable, '-m', 'zeroplay_jax.main', *arguments, flag]
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


MINI = '--config=configs/drzero.py:mini'
# Flags, and the beginnings of the lines about them, each of which names its own mistake.
CASES = {
    'names, types, bounds, rules and files': (
        [
            MINI,
            '--workdir=run',
            '--config.nonsense=4',
            '--config.seed=x',
            '--config.reward.solves=0',
            '--config.solver.samples=1',
            '--config.solver.minibatches=3',
            '--config.eval.file=none.jsonl',
            '--config.inputs.documents=none.jsonl',
            '--config.inputs.tasks=none.jsonl',
            '--policy=nowhere',
            '--frob=1',
            'loose',
        ],
        [
            'config.nonsense: no such field',
            'config.seed=x: must be a whole number',
            'config.reward.solves=0: not possible',
            'config.solver.samples=1: a rollout is compared',
            'config.solver.minibatches=3: the 8 prompts',
            'config.eval.file=none.jsonl: the miniature world',
            'config.inputs.documents=none.jsonl: not possible',
            'config.inputs.tasks: recipe drzero does not read it',
            'config.policy.path=nowhere: no such folder',
            '--frob: no such flag',
            "'loose' is not a flag",
        ],
    ),
    'a missing config and folder': (
        ['--config=configs/drzerro.py', '--config.mesh.replica=x', '--config.reward.solves=0'],
        [
            '--config=configs/drzerro.py: no such file',
            'config.mesh.replica=x: must be',
            'config.reward.solves=0: not possible',
            'no folder for the run',
        ],
    ),
    'a mesh that does not fit, files elsewhere': (
        [
            *('--config=configs/drzero.py', '--workdir=/mnt/run', '--nofiles', '--on=v5litepod-16'),
            *('--config.mesh.replica=3', '--config.mesh.fsdp=1', '--index=/mnt/index'),
            *('--policy', '', '--config.drzero.grup=hop'),
        ],
        [
            'config.mesh: replica=3, fsdp=1, model=1: is made of 3 devices, and v5litepod-16 has 16',
            'config.micro.rows=8: cannot be split evenly over 3 devices',
            'config.sampler.slots=256: cannot be split evenly over 3 devices',
            'config.drzero.grup: no such field; did you mean config.drzero.group?',
            '--policy: names nothing',
        ],
    ),
    'a recipe that does not exist': (
        [MINI, '--workdir=run', '--config.recipe=drzerro', '--config.seed=x'],
        ['config.recipe=drzerro: no such recipe', 'config.seed=x: must be a whole number'],
    ),
    'documents behind a server': (
        [
            *(MINI, '--workdir=run', '--config.retrieval.kind=http', '--config.retrieval.path='),
            '--config.seed=x',
        ],
        [
            'config.seed=x: must be a whole number',
            "config.retrieval.path='': not an index folder",
            'config.eval.file=',
        ],
    ),
}


@pytest.mark.fault('user-5', 'a command with many mistakes and --check')
@pytest.mark.parametrize('case', CASES)
def test_every_mistake_has_its_line(case, tmp_path, user_reads):
    words, expected = CASES[case]
    result = checked(tmp_path, *words)
    assert result.returncode == 2 and not result.stdout
    *lines, last = result.stderr.splitlines()
    for beginning in expected:
        assert any(line.startswith(f'zeroplay_jax: {beginning}') for line in lines), beginning
    assert len(lines) == len(expected), result.stderr
    assert last == f'zeroplay_jax: {len(expected)} mistakes; nothing was started'
    assert not list(tmp_path.iterdir())
    user_reads(last)


@pytest.mark.parametrize(
    'words',
    [
        [MINI, '--workdir=run'],
        ['--config', 'configs/quickstart.py', '--workdir', 'run', '--config.seed', '1'],
        [MINI, '--workdir=gs://bucket/run', '--policy=gs://bucket/policy', '--config.offload'],
        [
            *('--config=configs/drzero.py', '--workdir=/mnt/run', '--nofiles', '--on=v5litepod-16'),
            *('--config.mesh.replica=4', '--config.mesh.model=2', '--index=/mnt/wiki18_e5'),
        ],
    ],
)
def test_a_sound_command_is_called_sound(words, tmp_path):
    result = checked(tmp_path, *words)
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert result.stdout.startswith('the command is sound; not checked: memory')
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ('flag', 'is_check'),
    [
        *[(flag, True) for flag in ('--check', '-check', '--check=1', '-check=true', '--check=T')],
        *[(flag, False) for flag in ('--check=false', '--check=0', '--checks', '--nocheck')],
    ],
)
def test_every_form_of_the_flag_is_read_as_absl_reads_it(flag, is_check):
    assert is_asked_for(['main', '--config=x.py', flag]) == is_check


def test_files_may_be_left_out_by_a_value(tmp_path):
    words = [MINI, '--workdir=run', '--policy=nowhere', '--files=false']
    assert (
        checked(tmp_path, *words).returncode
        == checked(tmp_path, *words[:-1], '--nofiles').returncode
    )


def test_a_run_can_be_resumed_on_the_machine_that_is_named(tmp_path):
    page = ('--config=configs/drzero.py:mini', '--config.mesh.replica=-1', '--workdir=run')
    config = packaged_config('drzero', 'mini', {'mesh.replica': -1})
    write_record(tmp_path / 'run', config)
    on = '--on=4'
    resumed = checked(tmp_path, *page, on)
    assert resumed.returncode == 0, resumed.stderr
    other = checked(tmp_path, *page, on, '--config.solver.steps=4')
    assert other.returncode == 2 and 'solver.steps' in other.stderr


@pytest.mark.fault('user-4', 'another --index, and the questions of the config')
def test_questions_of_another_corpus_are_named(tmp_path, user_reads):
    for name in ('corpora/own', 'elsewhere/own', 'mine'):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / 'manifest.json').write_text('{}')
    line = json.dumps({'question': 'Who?', 'answers': ['A']})
    for name in ('own.jsonl', 'mine.jsonl'):
        (tmp_path / name).write_text(line + '\n')
    (tmp_path / 'page.py').write_text(
        'from zeroplay_jax.configs import drzero\n\n\n'
        'def get_config(variant):\n'
        '    config = drzero.get_config(variant)\n'
        "    config.retrieval.update(kind='folder', path='corpora/own')\n"
        "    config.eval.file = 'own.jsonl'\n"
        '    return config\n'
    )
    page = ('--config=page.py:mini', '--workdir=run')
    note = 'it is still evaluated on eval.file=own.jsonl; python -m zeroplay_jax.inputs cloze makes'
    noted = checked(tmp_path, *page, '--index=mine')
    assert noted.returncode == 0 and len(noted.stderr.splitlines()) == 1 and note in noted.stderr
    for words in ([], ['--index=elsewhere/own'], ['--index=mine', '--config.eval.file=mine.jsonl']):
        assert not checked(tmp_path, *page, *words).stderr
    # A run says it before it looks for devices.
    mesh = ('--config.mesh.replica=64', '--config.micro.rows=64', '--config.sampler.slots=64')
    refused = checked(tmp_path, *page, '--index=mine', *mesh, flag='--nocheck')
    assert refused.returncode == 2 and note in refused.stderr.splitlines()[0]
    user_reads(noted.stderr.strip())


@pytest.mark.parametrize(
    ('name', 'devices', 'hosts'),
    [
        *(('8', 8, 1), ('2*4', 8, 2), ('v5litepod-1', 1, 1), ('v5litepod-8', 8, 1)),
        *(('v5litepod-16', 16, 4), ('v6e-8', 8, 1), ('v6e-256', 256, 64), ('v5p-8', 4, 1)),
        *(('v5p-32', 16, 4), ('v4-16', 8, 2), ('v3-32', 32, 4), ('2*v5litepod-16', 32, 8)),
    ],
)
def test_machines_have_the_devices_of_their_type(name, devices, hosts):
    target = check.machine(name)
    assert (target.devices, target.hosts) == (devices, hosts)


@pytest.mark.parametrize(
    'name', ['', 'v9-8', 'v5litepod', 'v5p-1', 'v5litepod-10', '0', '2x4', '-8']
)
def test_other_machines_are_refused(name):
    with pytest.raises(ConfigError, match='--on='):
        check.machine(name)


def test_free_axes_of_a_mesh_are_resolved_and_replicas_do_not_span_hosts():
    config = packaged_config('drzero')
    config.mesh.update(replica=4, fsdp=-1, model=2)
    check.resolve_mesh(config, check.machine('v5litepod-16'))
    assert config.mesh.to_dict() == {'replica': 4, 'fsdp': 2, 'model': 2}
    config.mesh.update(replica=2, fsdp=4)
    with pytest.raises(ConfigError, match='multiple of 4'):
        check.resolve_mesh(config, check.machine('v5litepod-16'))


def test_a_crash_is_hidden_behind_a_mistake_only():
    def refuses_and_crashes(crash):
        if not crash:
            fail('seed', 1, 'a problem', 'a fix')
        raise KeyError

    mistakes = Mistakes()
    mistakes.of(refuses_and_crashes, False)
    mistakes.of(lambda: fail('seed', 2, 'a consequence', 'a fix'))
    assert mistakes.lines == ['config.seed=1: a problem; a fix']
    with pytest.raises(KeyError):
        mistakes.of(refuses_and_crashes, True)
