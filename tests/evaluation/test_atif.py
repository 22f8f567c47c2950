"""ATIF documents: ours are valid for a validator of others, and theirs are shown as our rollouts are."""

import json
import re

import pytest
import sample_run
from nat.atif import (
    Agent,
    FinalMetrics,
    Observation,
    ObservationResult,
    Step,
    SubagentTrajectoryRef,
    ToolCall,
    Trajectory,
)
from nat.atif.content import ContentPart, ImageSource

from zeroplay_jax import export, report
from zeroplay_jax.evaluation import atif
from zeroplay_jax.evaluation.report_builder import read_lines, read_run

SCHEMA = {'type': 'object', 'properties': {'query': {'type': 'string'}}}


@pytest.fixture
def documents(run, tmp_path):
    out = tmp_path / 'out'
    assert export.main([str(run), '--trajectories', '--out', str(out)]) == 0
    return out


def test_documents_of_a_run_are_valid_and_come_back_as_they_were(run, documents):
    records = read_lines(run / 'trajectories.jsonl', [])
    paths = atif.paths(documents)
    assert len(paths) == len(records)
    for path, record in zip(paths, records, strict=True):
        Trajectory.model_validate_json(path.read_text())
        (back,) = atif.read(path)
        for name in ('segments', 'role', 'step', 'phase', 'reward', 'advantage', 'parts'):
            assert back[name] == record[name], name
        assert back['info'].items() >= record['info'].items()
        turns = record.get('turns', [])
        calls = [(call or {}).get('tool') for call in back['turns']][: len(turns)]
        assert calls == [(call or {}).get('tool') for call in turns]


def test_turn_rewards_errors_and_tools_are_kept(run, tmp_path):
    record = read_lines(run / 'trajectories.jsonl', [])[1]
    record['segments'] = [{'source': source, 'text': source} for source in ('env', 'policy', 'env')]
    call = {
        'tool': 'search',
        'arguments': 'no object',
        'error': 'invalid_arguments',
        'documents': None,
    }
    record |= {'turns': [call], 'turn_rewards': [0.25]}
    tools = {'search': {'description': 'finds', 'parameters': SCHEMA, 'purpose': 'ours alone'}}
    document = atif.to_document(record, tools, 0, '1')
    Trajectory.model_validate(document)
    (definition,) = document['agent']['tool_definitions']
    assert definition['function'] == {
        'name': 'search',
        'description': 'finds',
        'parameters': SCHEMA,
    }
    first, turn = document['steps']
    assert first['source'] == 'system' and turn['extra'] == {'reward': 0.25}
    (entry,) = turn['tool_calls']
    assert entry['arguments'] == {} and entry['extra'] == {'error': 'invalid_arguments'}
    assert turn['observation']['results'] == [
        {'content': 'env', 'source_call_id': entry['tool_call_id']}
    ]


@pytest.fixture
def job(tmp_path):
    """A job as Harbor leaves it: a trial with the trajectory of an agent and its reward, beside other JSON."""
    picture = ContentPart(
        type='image', source=ImageSource(media_type='image/png', path='images/a.png')
    )
    calls = [
        ToolCall(tool_call_id=name, function_name=name, arguments={'path': '/'})
        for name in ('ls', 'cat')
    ]
    reference = SubagentTrajectoryRef(trajectory_id='s1')
    results = [
        ObservationResult(source_call_id='ls', content='bin'),
        ObservationResult(source_call_id='cat', subagent_trajectory_ref=[reference]),
    ]
    steps = [
        Step(step_id=1, source='system', message='You are an agent.'),
        Step(
            step_id=2,
            source='user',
            message=[ContentPart(type='text', text=f'What is it? {sample_run.ATTACK}'), picture],
        ),
        Step(step_id=3, source='agent', message='Earlier.', is_copied_context=True),
        Step(
            step_id=4,
            source='agent',
            message='I look.',
            reasoning_content='two calls',
            tool_calls=calls,
            observation=Observation(results=results),
        ),
        Step(step_id=5, source='agent', message='A cat.'),
    ]
    helper = Trajectory(
        trajectory_id='s1',
        agent=Agent(name='helper', version='2'),
        steps=[Step(step_id=1, source='user', message='Look it up')],
    )
    document = Trajectory(
        agent=Agent(name='shell', version='1.0', model_name='some/model'),
        steps=steps,
        final_metrics=FinalMetrics(total_cost_usd=0.01),
        subagent_trajectories=[helper],
    )
    trial = tmp_path / 'job' / 'trial'
    for folder in ('agent', 'verifier'):
        (trial / folder).mkdir(parents=True)
    (trial / 'agent' / 'trajectory.json').write_text(json.dumps(document.to_json_dict()))
    (trial / 'verifier' / 'reward.txt').write_text('0.5\n')
    (trial / 'result.json').write_text('{"reward": 1}')
    return trial.parent


def test_documents_of_others_are_read(job):
    run = read_run(job)
    shell, helper = run['trajectories']
    assert (shell['role'], shell['reward'], helper['role'], helper['reward']) == (
        'shell',
        0.5,
        'helper',
        None,
    )
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
    assert (
        shell['info']['agent_model_name'] == 'some/model'
        and shell['info']['total_cost_usd'] == 0.01
    )


def test_the_page_shows_documents_of_others_without_empty_sections(job, browser, open_run):
    open_run(job)
    assert browser.js('document.title') == 'job – run report'
    shown = '[...document.querySelectorAll("nav a")].filter((x) => !x.hidden).map((x) => x.hash)'
    assert browser.js(shown) == ['#trajectories', '#questions']
    assert browser.js('$("topics").innerText') == 'None of these rollouts proposes a question.'
    assert browser.js('document.querySelectorAll(".block.call").length') == 2
    assert 'What is it?' in browser.js('document.querySelector("#detail .question").innerText')


@pytest.mark.parametrize(
    'changes, problem',
    [
        ({'steps': 3}, '"steps" must be a list'),
        ({'steps': [{'source': 'tool'}]}, 'step 1 must be an object whose "source" is one of'),
        ({'steps': ['text']}, 'step 1 must be an object'),
    ],
)
def test_a_damaged_document_is_one_line(job, capsys, changes, problem):
    path = job / 'trial' / 'agent' / 'trajectory.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert report.main([str(path), '--out', str(job / 'page.html')]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(problem, line) and str(path) in line


def test_fields_of_others_with_our_names_do_no_harm(job, browser, open_run):
    path = job / 'trial' / 'agent' / 'trajectory.json'
    extra = {'drop': 3, 'finish': 1, 'is_proposal': True, 'parts': 5, 'step': 'x', 'phase': 7}
    extra['info'] = {'question': 5, 'rejected': ['x'], 'hops': 'many'}
    steps = [{'source': 'agent', 'tool_calls': 5, 'observation': {'results': 3}}]
    document = json.loads(path.read_text()) | {'extra': extra, 'subagent_trajectories': 7}
    path.write_text(json.dumps(document | {'steps': [*document['steps'], *steps]}))
    (job / 'trial' / 'verifier' / 'reward.txt').write_text('nan')
    (job / 'folder.json').mkdir()
    open_run(job)
    shown = browser.js('document.querySelector("#detail .question").innerText')
    assert 'What is it?' in shown
    assert browser.js('document.querySelector("#config").hidden') is True


def test_results_of_one_turn_are_all_kept(run):
    record = read_lines(run / 'trajectories.jsonl', [])[1]
    texts = ('prompt', 'policy', 'env', 'env')
    record['segments'] = [{'source': text, 'text': text} for text in texts]
    document = atif.to_document(record, {}, 0, '1')
    assert len(document['steps'][-1]['observation']['results']) == 2


def test_a_single_file_gets_its_page_beside_it(job, capsys):
    path = job / 'trial' / 'agent' / 'trajectory.json'
    assert report.main([str(path)]) == 0
    assert (path.parent / 'report.html').is_file()


def test_half_a_document_is_one_line(job, capsys):
    path = job / 'trial' / 'agent' / 'trajectory.json'
    path.write_text(path.read_text()[:500])
    assert report.main([str(job)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f'{path}: cannot be read' in line


def test_a_folder_with_neither_is_refused(tmp_path, capsys, run, documents):
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'empty' / 'other.json').write_text('{"schema_version": 1}')
    assert report.main([str(tmp_path / 'empty')]) == 2
    assert 'pass the workdir of a run' in capsys.readouterr().err
    assert export.main([str(run), '--trajectories', '--out', str(documents)]) == 2
    assert 'exists already; choose another --out' in capsys.readouterr().err
    assert export.main([str(tmp_path), '--trajectories', '--out', str(tmp_path / 'new')]) == 2
    assert 'has no rollouts' in capsys.readouterr().err and not (tmp_path / 'new').exists()
