"""main --check: all mistakes of a command at once, without devices, and nothing is created."""

import json
import shutil

import pytest
from config_checks import ROOT
from python_process import config_flags, run_python
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


@pytest.mark.fault('user-5', 'a command with many mistakes and --check')
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


PAGE = """from zeroplay_jax.configs import drzero


def get_config(variant):
    config = drzero.get_config(variant)
    config.retrieval.update(kind='folder', path='corpora/own')
    config.eval.file = 'own.jsonl'
    return config
"""


@pytest.mark.fault('user-4', 'another --index, and the questions of the config')
def test_questions_of_another_corpus_are_named(tmp_path):
    for name in ('corpora/own', 'elsewhere/own', 'mine'):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / 'manifest.json').write_text('{}')
    for name in ('own.jsonl', 'mine.jsonl'):
        (tmp_path / name).write_text('{"question": "Who?", "answers": ["A"]}\n')
    (tmp_path / 'page.py').write_text(PAGE)
    page = ('--config=page.py:mini', '--workdir=run')
    note = 'it is still evaluated on eval.file=own.jsonl; zeroplay inputs cloze makes'
    noted = checked(tmp_path, *page, '--index=mine')
    assert noted.returncode == 0 and len(noted.stderr.splitlines()) == 1 and note in noted.stderr
    for words in (['--index=elsewhere/own'], ['--index=mine', '--config.eval.file=mine.jsonl']):
        assert not checked(tmp_path, *page, *words).stderr
    # A run says it before it looks for devices.
    mesh = config_flags('mesh.replica=64 micro.rows=64 sampler.slots=64')
    refused = checked(tmp_path, *page, '--index=mine', *mesh, flag='--nocheck')
    assert refused.returncode == 2 and note in refused.stderr.splitlines()[0]


@pytest.fixture
def policy(tmp_path):
    return shutil.copytree(BUILT_IN_CHECKPOINT, tmp_path / 'policy')


@pytest.mark.parametrize(
    ('change', 'lines'),
    [
        (
            {'architectures': ['MixtralForCausalLM']},
            ["architectures=['MixtralForCausalLM'] is not"],
        ),
        (
            {'hidden_size': 64},
            [
                'num_key_value_heads=2 is not divisible',
                'is (960, 128), and (960, 64) in a',
            ],
        ),
        # The mesh is not judged by a config that cannot be used.
        ({'layer_types': ['full_attention']}, ['number of `layer_types` (1)']),
    ],
)
def test_the_config_of_a_local_policy_is_read_as_a_run_reads_it(policy, change, lines):
    path = policy / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    words = (MINI, '--workdir=run', f'--policy={policy}', '--config.mesh.model=4')
    refused = checked(policy.parent, *words, '--config.cpu_devices=4')
    *mistakes, last = refused.stderr.splitlines()
    assert len(mistakes) == len(lines) and 'nothing was started' in last, refused.stderr
    for text in lines:
        assert any(text in mistake for mistake in mistakes), refused.stderr


def test_a_folder_without_a_tokenizer_is_read_all_the_same(policy):
    (policy / 'tokenizer.json').unlink()
    change = {'max_position_embeddings': 64, 'intermediate_size': 100}
    path = policy / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused = checked(policy.parent, MINI, '--workdir=run', f'--policy={policy}')
    tokenizer, positions, shape, last = refused.stderr.splitlines()
    assert 'the folder has no tokenizer.json;' in tokenizer and 'exceeds max_position' in positions
    assert f'{policy}: tensor model.layers.0.mlp.' in shape and '(128, 100) in a qwen3' in shape
    assert '3 mistakes' in last


def test_a_chat_template_that_is_missing_and_a_token_that_the_model_does_not_know_are_refused(
    policy,
):
    words = (MINI, '--workdir=run', f'--policy={policy}')
    (policy / 'chat_template.jinja').unlink()
    path = policy / 'tokenizer_config.json'
    text = path.read_text()
    path.unlink()
    mistake, _ = checked(policy.parent, *words).stderr.splitlines()
    assert 'its tokenizer has no chat template' in mistake
    path.write_text(text)
    tokenizer = json.loads((policy / 'tokenizer.json').read_text())
    tokenizer['model']['vocab']['beyond'] = 9999
    (policy / 'tokenizer.json').write_text(json.dumps(tokenizer))
    mistake, _ = checked(policy.parent, *words).stderr.splitlines()
    assert "the token 'beyond' has id 9999, and the model has the ids 0 to" in mistake


def test_a_program_of_an_mcp_server_that_is_not_there_is_refused(tmp_path):
    (tmp_path / 'here').mkdir()
    program = tmp_path / 'here' / 'program'
    program.write_text('#!/bin/sh\n')
    program.chmod(0o755)
    servers = {
        'path': {'command': 'not-there'},
        'folder': {'command': './program'},
        'relative': {'command': './program', 'cwd': str(tmp_path / 'here')},
        'path_of_server': {'command': 'program', 'env': {'PATH': str(tmp_path / 'here')}},
        'found': {'command': 'sh'},
    }
    path = tmp_path / 'servers.json'
    words = (MINI, '--workdir=run', "--config.tools.names=('search','mcp')")
    words += (f'--config.tools.mcp_servers={path}',)
    problem = 'cannot be started (no such program: '
    for name in ('path', 'folder'):
        path.write_text(json.dumps({'mcpServers': {name: servers[name]}}))
        mistake, _ = checked(tmp_path, *words).stderr.splitlines()
        assert f'server {name!r}: {problem}{servers[name]["command"]}); install' in mistake
        assert not checked(tmp_path, *words, '--nofiles').returncode
        del servers[name]
    path.write_text(json.dumps({'mcpServers': servers}))
    assert checked(tmp_path, *words).returncode == 0


TRAINED = ('Who led Sivas?', 'Where is Fretes?', 'What is C#?')
EVALUATED = ('What is C++?', 'where is “Fretes”', 'WHO LED SIVAS', 'Who led Oslo?')


def test_questions_that_are_trained_on_are_named_and_left_out_as_the_warning_says(tmp_path):
    for name, questions in (
        ('a.jsonl', TRAINED),
        ('b.jsonl', EVALUATED[:2]),
        ('c.jsonl', EVALUATED[2:]),
    ):
        lines = [json.dumps({'question': text, 'answers': ['A']}) for text in questions]
        (tmp_path / name).write_text('\n'.join(lines))
    index = tmp_path / 'index'
    index.mkdir()
    (index / 'manifest.json').write_text('{}')
    words = ('--config=configs/dspo.py:mini', '--workdir=run', f'--index={index}')
    words += ('--config.eval.file=b.jsonl,c.jsonl',)
    warned = checked(tmp_path, *words, '--config.inputs.questions=a.jsonl')
    (line,) = warned.stderr.splitlines()
    assert line.startswith(
        "warning: 2 of 4 questions of config.eval.file are trained on, such as 'where is “Fretes”'; "
    )
    _, _, command = line.rpartition(': zeroplay ')
    called = ('-m', 'zeroplay_jax', *command.replace('FILE', 'new.jsonl').split())
    assert run_python(*called, cwd=tmp_path, PYTHONPATH=str(ROOT)).returncode == 0
    assert json.loads((tmp_path / 'new.jsonl').read_text())['question'] == 'What is C#?'
    assert not checked(tmp_path, *words, '--config.inputs.questions=new.jsonl').stderr


def test_documents_that_are_missing_are_one_mistake_and_elsewhere_none(tmp_path):
    words = (MINI, '--workdir=run', '--config.inputs.documents=none.jsonl')
    words += ('--index=http://127.0.0.1:8000', '--config.retrieval.path=')
    words += ('--config.eval.file=q.jsonl',)
    (tmp_path / 'q.jsonl').write_text('{"question": "Who?", "answers": ["A"]}\n')
    mistake, last = checked(tmp_path, *words).stderr.splitlines()
    assert 'config.inputs.documents=none.jsonl: no such file' in mistake and '1 mistake' in last
    elsewhere = checked(tmp_path, *words, '--nofiles')
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert 'on every machine: inputs.documents=none.jsonl, ' in elsewhere.stdout
