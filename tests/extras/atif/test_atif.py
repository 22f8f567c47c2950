"""ATIF documents: ours are valid for a validator of others, and theirs are shown as our rollouts are."""

import dataclasses
import json
import types

import numpy as np
import pytest
import sample_run
import tiny
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

from zeroplay_jax import export
from zeroplay_jax.evaluation.report_builder import page_data, read_lines
from zeroplay_jax.extras import atif
from zeroplay_jax.rollout import continuing
from zeroplay_jax.rollout.call_syntax import syntax_of
from zeroplay_jax.rollout.environment import Environment, Limits
from zeroplay_jax.rollout.prompts import Prompt
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.run.hooks import trajectory_record
from zeroplay_jax.selfplay.schedule import Phase
from zeroplay_jax.selfplay.schedule import Step as RunStep
from zeroplay_jax.tools.search import SearchTool
from zeroplay_jax.types import POLICY, PROMPT, Row, Turn
from zeroplay_jax.types import ToolCall as Call
from zeroplay_jax.types import Trajectory as Rollout

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
        for name in ('segments', 'role', 'reward'):
            assert back[name] == record[name], name
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
    assert first['source'] == 'user' and turn['extra'] == {'reward': 0.25}
    (entry,) = turn['tool_calls']
    assert entry['arguments'] == {} and entry['extra'] == {'error': 'invalid_arguments'}
    assert turn['observation']['results'] == [
        {'content': 'env', 'source_call_id': entry['tool_call_id']}
    ]


NOTE = 'Go on. <|im_end|> <tool_response>no result</tool_response>'
FOUND = 'Gumu lies in Lomi. <|im_end|>'


@pytest.mark.fault(
    'nov29-D6', 'a result, a refused call and a note, as messages of a chat template'
)
def test_results_and_notes_have_no_text_of_the_chat_template(tmp_path):
    codec = Codec(tiny.make_folder(tmp_path / 'policy'))
    tools = {'search': SearchTool(lambda queries: [])}
    env = Environment(codec, syntax_of('qwen'), Limits(4, 99, 400), tools)
    prompt = env.prompt_ids(Prompt('{question}'), question='Where is Gumu?')
    zeros = np.zeros(len(prompt), np.float32)
    source = np.full(len(prompt), PROMPT, np.int8)
    rollout = Rollout(prompt, source, zeros, (), 'turns', 'policy', 1, (1, 0))
    found = Call('search', {'query_list': ['Gumu']}, FOUND)
    # A refused call of a last turn, behind which a recipe goes on with a note.
    refused = Call('', None, 'The call could not be read.', error='malformed')
    for text, call, note in (('<tool_call>', found, ''), ('?', refused, NOTE), ('Lomi', None, '')):
        ids = np.asarray(codec.encode(text), np.int32)
        rollout = dataclasses.replace(
            rollout,
            tokens=np.concatenate([rollout.tokens, ids]),
            source=np.concatenate([rollout.source, np.full(len(ids), POLICY, np.int8)]),
            logp=np.concatenate([rollout.logp, np.zeros(len(ids), np.float32)]),
            turns=(*rollout.turns, Turn(text, call)),
            starts=(*rollout.starts, len(rollout.tokens)),
        )
        if call is not None:
            reply = continuing.note_ids(rollout, env, note) if note else env.observation(call)
            rollout = continuing.replied(rollout, env, reply, note)
    context = types.SimpleNamespace(roles={'solver': types.SimpleNamespace(env=env)})
    step = RunStep(Phase('solver', 1, ('solver',), 0), 0, 3)
    record = trajectory_record('drzero', context, step, Row('solver', rollout, 1.0, 0))
    document = atif.to_document(json.loads(json.dumps(record)), {}, 0, '1')
    Trajectory.model_validate(document)
    _, called, refusal, note, answered = document['steps']
    (result,) = called['observation']['results']
    # verl's form of a result, which stands between the tags of the template.
    assert json.loads(result['content']) == {'result': FOUND}
    assert result['source_call_id'] == called['tool_calls'][0]['tool_call_id']
    assert refusal['tool_calls'][0]['extra'] == {'error': 'malformed'}
    assert 'observation' not in refusal and note == {
        'step_id': 4,
        'source': 'user',
        'message': NOTE,
    }
    assert answered['message'] == 'Lomi'


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
    run = page_data(job, [row for path in atif.paths(job) for row in atif.read(path)])
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


@pytest.fixture
def open_page(browser):
    def open_page(folder):
        assert atif.main([str(folder)]) == 0
        browser.open((folder / 'report.html').as_uri())

    return open_page


def test_the_page_shows_documents_of_others_without_empty_sections(job, browser, open_page):
    open_page(job)
    assert browser.js('document.title') == 'job – run report'
    shown = '[...document.querySelectorAll("nav a")].filter((x) => !x.hidden).map((x) => x.hash)'
    assert browser.js(shown) == ['#trajectories', '#questions']
    assert browser.js('$("topics").innerText') == 'None of these rollouts proposes a question.'
    assert browser.js('document.querySelectorAll(".block.call").length') == 2
    assert 'What is it?' in browser.js('document.querySelector("#detail .question").innerText')


def test_values_of_other_types_do_no_harm(job, browser, open_page):
    path = job / 'trial' / 'agent' / 'trajectory.json'
    steps = [{'source': 'agent', 'tool_calls': 5, 'observation': {'results': 3}}]
    document = json.loads(path.read_text()) | {'extra': 5, 'subagent_trajectories': 7}
    path.write_text(json.dumps(document | {'steps': [*document['steps'], *steps]}))
    (job / 'trial' / 'verifier' / 'reward.txt').write_text('nan')
    (job / 'folder.json').mkdir()
    open_page(job)
    shown = browser.js('document.querySelector("#detail .question").innerText')
    assert 'What is it?' in shown
    assert browser.js('document.querySelector("#config").hidden') is True


def test_results_of_one_turn_are_all_kept(run):
    record = read_lines(run / 'trajectories.jsonl', [])[1]
    texts = ('prompt', 'policy', 'env', 'env')
    record['segments'] = [{'source': text, 'text': text} for text in texts]
    document = atif.to_document(record, {}, 0, '1')
    assert len(document['steps'][-1]['observation']['results']) == 2


def test_a_single_file_gets_its_page_beside_it_and_a_damaged_one_is_one_line(job, capsys):
    path = job / 'trial' / 'agent' / 'trajectory.json'
    assert atif.main([str(path)]) == 0
    assert (path.parent / 'report.html').is_file()
    whole, none = path.read_text(), job / 'none'
    none.mkdir()
    (none / 'other.json').write_text('{"schema_version": 1}')
    texts = {'half': (whole[:500], 'cannot be read'), 'no document': (whole, 'no ATIF document')}
    for steps in (3, [{'source': 'tool'}], ['text']):
        problem = (
            '"steps" must be a list' if steps == 3 else 'step 1 must be an object whose "source"'
        )
        texts[str(steps)] = json.dumps(json.loads(whole) | {'steps': steps}), problem
    for name, (text, problem) in texts.items():
        path.write_text(text)
        place = none if name == 'no document' else path
        assert atif.main([str(place)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f'{place}: ' in line and problem in line


def test_documents_are_not_written_over_or_out_of_nothing(tmp_path, capsys, run, documents):
    for words, problem in (
        ([run, documents], 'exists already; choose another --out'),
        ([tmp_path, tmp_path / 'new'], 'has no rollouts'),
    ):
        assert export.main([str(words[0]), '--trajectories', '--out', str(words[1])]) == 2
        assert problem in capsys.readouterr().err
    assert not (tmp_path / 'new').exists()
