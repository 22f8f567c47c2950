"""ATIF documents: ours are valid for a validator of others, and theirs are shown as our rollouts are."""

import pathlib

import pytest
import run_library
import sample_run
from nat.atif import Trajectory

from examples.folding import recipe as folding
from zeroplay_jax.evaluation.report_builder import page_data, read_lines
from zeroplay_jax.extras import atif


@pytest.fixture
def documents(run, tmp_path):
    out = tmp_path / 'out'
    assert atif.main([str(run), '--documents', str(out)]) == 0
    return out


def test_documents_of_a_run_are_valid_and_come_back_as_they_were(run, documents):
    records = read_lines(run / 'trajectories.jsonl', [])
    paths = atif.paths(documents)
    assert len(paths) == len(records)
    for path, record in zip(paths, records, strict=True):
        Trajectory.model_validate_json(path.read_text())
        (back,) = atif.read(path)
        for name in ('segments', 'role', 'reward'):
            assert back[name] == record[name], name
        turns = record.get('turns', [])
        calls = [(call or {}).get('tool') for call in back['turns']][: len(turns)]
        assert calls == [(call or {}).get('tool') for call in turns]


def test_turn_rewards_errors_and_tools_are_kept(run):
    record = read_lines(run / 'trajectories.jsonl', [])[1]
    sources = ('env', 'policy', 'env', 'env')
    record['segments'] = [{'source': source, 'text': source} for source in sources]
    call = {'tool': 'search', 'arguments': 'no object', 'error': 'invalid_arguments'}
    record |= {'turns': [call | {'documents': None}], 'turn_rewards': [0.25]}
    tools = {'search': {'description': 'finds', 'parameters': {}, 'purpose': 'ours alone'}}
    document = atif.to_document(record, tools, 0, '1', atif.Frames())
    Trajectory.model_validate(document)
    (definition,) = document['agent']['tool_definitions']
    assert definition['function'] == {'name': 'search', 'description': 'finds', 'parameters': {}}
    first, turn = document['steps']
    assert first['source'] == 'user' and turn['extra'] == {'reward': 0.25}
    (entry,) = turn['tool_calls']
    assert entry['arguments'] == {} and entry['extra'] == {'error': 'invalid_arguments'}
    result, more = turn['observation']['results']
    assert result == {'content': 'env', 'source_call_id': entry['tool_call_id']}
    assert more['content'] == 'env'


@pytest.fixture
def job(tmp_path):
    """A job as Harbor leaves it: a trial with the trajectory of an agent and its reward, beside other JSON."""
    document = (pathlib.Path(__file__).parent / 'shell.json').read_text(encoding='utf-8')
    Trajectory.model_validate_json(document)
    trial = tmp_path / 'job' / 'trial'
    for folder in ('agent', 'verifier'):
        (trial / folder).mkdir(parents=True)
    (trial / 'agent' / 'trajectory.json').write_text(document)
    (trial / 'verifier' / 'reward.txt').write_text('0.5\n')
    (trial / 'result.json').write_text('{"reward": 1}')
    return trial.parent


def test_documents_of_others_are_read(job):
    run = page_data(job, [row for path in atif.paths(job) for row in atif.read(path)])
    shell, helper = run['trajectories']
    assert (shell['role'], shell['reward']) == ('shell', 0.5)
    assert (helper['role'], helper['reward']) == ('helper', None)
    assert [(source, run['texts'][text]) for source, text in shell['segments']] == [
        ('prompt', 'You are an agent.'),
        ('prompt', f'What is it? {sample_run.ATTACK}\n[image: images/a.png]'),
        ('prompt', 'Earlier.'),
        ('policy', '<think>two calls</think>I look.'),
        ('policy', ''),
        ('env', 'bin'),
        ('env', ' [subagent: {"trajectory_id": "s1"}]'),
        ('policy', 'A cat.'),
    ]
    assert [call and call['tool'] for call in shell['turns']] == ['ls', 'cat', None]
    assert shell['info']['total_cost_usd'] == 0.01


def test_documents_are_not_written_over(capsys, run, documents):
    assert atif.main([str(run), '--documents', str(documents)]) == 2
    assert 'exists already; choose another folder' in capsys.readouterr().err


def test_what_a_recipe_says_between_turns_is_a_step_of_a_user(tmp_path, tmp_path_factory):
    workdir = run_library.whole('folding', tmp_path_factory)
    out = tmp_path / 'documents'
    assert atif.main([str(workdir), '--documents', str(out)]) == 0
    said = []
    for path in out.iterdir():
        document = Trajectory.model_validate_json(path.read_text())
        # The first step is the prompt.
        said += [step.message for step in document.steps[1:] if step.source == 'user']
        observed = [step.observation for step in document.steps if step.observation]
        contents = [result.content for each in observed for result in each.results]
        assert not any('<|im_' in text or folding.SUM_UP in text for text in contents)
    assert set(said) == {folding.SUM_UP, folding.GO_ON}
