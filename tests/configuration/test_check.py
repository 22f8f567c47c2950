"""main --check: all mistakes of a command at once, without devices, and nothing is created."""

import json
import re
import shutil

import pytest
from config_checks import ROOT
from python_process import run_python
from run_records import write_record

from zeroplay_jax.configuration.fields import config as packaged_config
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT


def checked(folder, *arguments, flag='--check'):
    words = ('-m', 'zeroplay_jax.main', *arguments, flag)
    return run_python(*words, cwd=folder, PYTHONPATH=str(ROOT))


MINI = '--config=configs/drzero.py:mini'
MISTAKES = """
    config.nonsense=4: no such field
    config.seed=x: invalid literal for int
    config.reward.solves=0: give 2 or more
    config.solver.samples=1: a rollout is compared
    config.solver.minibatches=3: the 8 prompts
    config.eval.file=none.jsonl: the miniature world
    config.inputs.documents=none.jsonl: no such file
    config.inputs.tasks=none.jsonl: recipe drzero does not read it
    config.policy.path=nowhere: no such folder
    frob=1: is not a flag
"""


def test_every_mistake_has_its_line(tmp_path):
    """Names, types, bounds, rules and files; tests/refusals.txt has more."""
    mistakes = [line.strip().split(': ') for line in MISTAKES.strip().splitlines()]
    result = checked(tmp_path, MINI, '--workdir=run', *(f'--{flag}' for flag, _ in mistakes))
    assert result.returncode == 2 and not result.stdout
    *lines, last = result.stderr.splitlines()
    for flag, problem in mistakes:
        assert any(flag.split('=')[0] in line and problem in line for line in lines), flag
    assert len(lines) == len(mistakes), result.stderr
    assert last == f'zeroplay_jax: {len(mistakes)} mistakes; nothing was started'
    assert not list(tmp_path.iterdir())


def test_a_run_can_be_resumed_on_the_machine_that_is_named(tmp_path):
    write_record(tmp_path / 'run', packaged_config('drzero', 'mini', {'mesh.replica': -1}))
    words = (MINI, '--config.mesh.replica=-1', '--workdir=run', '--on=4')
    assert checked(tmp_path, *words).returncode == 0
    other = checked(tmp_path, *words, '--config.solver.steps=4')
    assert other.returncode == 2 and 'solver.steps' in other.stderr


@pytest.mark.parametrize(
    ('change', 'lines'),
    [
        ({'hidden_size': 64}, ['num_key_value_heads=2 is', r'\(960, 128\), and \(960, 64\)']),
        # The mesh is not judged by a config that cannot be used.
        ({'layer_types': ['full_attention']}, [r'number of `layer_types` \(1\)']),
    ],
)
def test_the_config_of_a_local_policy_is_read_as_a_run_reads_it(tmp_path, change, lines):
    policy = shutil.copytree(BUILT_IN_CHECKPOINT, tmp_path / 'policy')
    path = policy / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    words = (MINI, '--workdir=run', f'--policy={policy}', '--config.mesh.model=4')
    refused = checked(tmp_path, *words, '--config.cpu_devices=4').stderr
    assert len(refused.splitlines()) == len(lines) + 1 and 'nothing was started' in refused
    assert all(re.search(text, refused) for text in lines), refused


def test_a_program_of_an_mcp_server_that_is_not_there_is_refused(tmp_path):
    path = tmp_path / 'servers.json'
    words = [MINI, '--workdir=run', "--config.tools.names=('search','mcp')"]
    words += [f'--config.tools.mcp_servers={path}']
    servers = {'a': {'command': 'true'}, 'b': {'command': 'not-there'}}
    path.write_text(json.dumps({'mcpServers': servers}))
    done = checked(tmp_path, *words)
    problem = "server 'b': cannot be started (no such program: not-there); install"
    assert done.returncode == 2 and problem in done.stderr
    assert checked(tmp_path, *words, '--nofiles').returncode == 0


TRAINED = ('Who led Sivas?', 'Where is Fretes?', 'What is C#?')
EVALUATED = ('What is C++?', 'where is “Fretes”', 'WHO LED SIVAS', 'Who led Oslo?')


def test_questions_that_are_trained_on_are_named(tmp_path):
    sets = {'a': TRAINED, 'b': EVALUATED[:2], 'c': EVALUATED[2:]}
    for name, questions in sets.items():
        lines = [json.dumps({'question': text, 'answers': ['A']}) for text in questions]
        (tmp_path / f'{name}.jsonl').write_text('\n'.join(lines))
    index = tmp_path / 'index'
    index.mkdir()
    (index / 'manifest.json').write_text('{}')
    words = ('--config=configs/dspo.py:mini', '--workdir=run', f'--index={index}')
    words += ('--config.inputs.questions=a.jsonl', '--config.eval.file=b.jsonl,c.jsonl')
    (line,) = checked(tmp_path, *words).stderr.splitlines()
    said = (
        "warning: 2 of 4 questions of config.eval.file are trained on, such as 'where is “Fretes”'"
    )
    assert line.startswith(said) and 'zeroplay inputs' in line
