"""The demonstrations for English texts, on the fifteen texts that ship with the project."""

import dataclasses
import json

import numpy as np
import pytest

pytestmark = pytest.mark.results

pytest.importorskip('zeroplay_jax.extras.inputs')
# ruff: noqa: E402
from demo_parts import said, shown, tag
from example_texts import example_passages
from test_committed_folders import check_hashes, log_of

from tools.checkpoints import base_english, english_demos, supervised
from tools.checkpoints.demo import render
from tools.checkpoints.english_demos import EnglishSetting
from tools.checkpoints.english_texts import Texts
from tools.checkpoints.stages import Stage
from zeroplay_jax.extras.inputs import cloze
from zeroplay_jax.extras.inputs.chains import BRIDGE
from zeroplay_jax.rollout import call_syntax
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.tools.search import SearchTool
from zeroplay_jax.types import POLICY, UserError

DEMOS_PER_ROLE = 20
SHARES = {'copy': 0.7, 'query': 0.3}
SHORT = EnglishSetting(copied_words=(4, 10))
TINY = Stage('tiny', steps=6, rows=2, tokens=128, errors=SHORT, shares=SHARES)


@pytest.fixture(scope='module')
def passages():
    return example_passages()


@pytest.fixture(scope='module')
def texts(passages):
    return Texts(base_english.cut(passages, 60))


@pytest.fixture(scope='module')
def codec(passages, tmp_path_factory):
    folder = tmp_path_factory.mktemp('english')
    base_english.write_config_and_tokenizer(folder, passages)
    return Codec(folder)


@pytest.fixture
def small(monkeypatch):
    """Trainings of a small model, with a line of their log every second step."""
    monkeypatch.setattr(supervised, 'LOG_EVERY', 2)
    sizes = {'hidden_size': 32, 'intermediate_size': 64, 'num_hidden_layers': 1}
    monkeypatch.setattr(base_english, 'ARCHITECTURE', base_english.ARCHITECTURE | sizes)


NO_ERRORS = EnglishSetting()
ERRORS = EnglishSetting(short_query=1.0, wrong_span=1.0, malformed=1.0)


def written(role, texts, setting=NO_ERRORS):
    rng = np.random.default_rng(3)
    return [english_demos.ROLES[role].write(texts, rng, setting) for _ in range(DEMOS_PER_ROLE)]


def policy_text(demo):
    return ''.join(said(demo))


def restored(demo, clause=None):
    """The question, or its clause, with the answer in its blank."""
    text = demo.fields['question'] if clause is None else clause
    return text.replace(cloze.BLANK, tag(policy_text(demo), 'answer'))


def in_one_line(text):
    return ' '.join(text.split())


def texts_of(documents):
    return [in_one_line(document['text']) for document in documents]


@pytest.mark.parametrize('role', english_demos.ROLES)
def test_every_role_writes_episodes_that_fit(role, texts, codec):
    for demo in written(role, texts):
        episode = render(codec, demo, base_english.OBSERVATION_TOKENS)
        assert (episode.sources == POLICY).any()
        assert len(episode.tokens) < 1200


def test_a_solver_reads_its_answer_and_never_its_question(texts):
    syntax = call_syntax.syntax_of('search_r1')
    tools = {'search': SearchTool(lambda queries: [])}
    for demo in written('solver', texts):
        (documents,) = shown(demo)
        question, text = demo.fields['question'], policy_text(demo)
        answer = tag(text, 'answer')
        assert any(answer in document['text'] for document in documents)
        assert cloze.BLANK in question and answer.lower() not in question.lower()
        # Its last thought restores the sentence of the question.
        before, _, filled = tag(text, 'think').partition(' [ ')
        assert filled == f'{answer} ]' and question.startswith(before)
        # The parser of rollouts reads its call.
        first_turn = said(demo)[0]
        assert syntax.parse(first_turn, tools).queries == [tag(first_turn, 'search')]


def test_a_proposal_can_be_answered_from_its_document(texts, codec):
    for demo in written('proposer', texts):
        text = policy_text(demo)
        document, answer = demo.fields['document'], tag(text, 'answer')
        assert restored(demo, tag(text, 'question')) in document
        # The answer has the same tokens in the text and alone: it can be copied token by token.
        tokens, alone = codec.encode(document), codec.encode(f' {answer}')
        windows = [tokens[i : i + len(alone)] for i in range(len(tokens) - len(alone) + 1)]
        assert alone in windows


def is_in_no_document(text, texts):
    return not any(text in document['text'] for document in texts.documents)


def test_deliberate_errors(texts):
    for demo in written('solver', texts, ERRORS):
        assert len(tag(policy_text(demo), 'search').split()) == 3
        # A disguised question is in no document, so both kinds count.
        assert is_in_no_document(restored(demo), texts)
    searches = set()
    for demo in written('solver_two_hops', texts, ERRORS):
        turns = said(demo)
        assert len(tag(turns[0], 'search').split()) == 3
        searches.add(len(turns) - 1)
        clause = demo.fields['question'].rpartition(BRIDGE)[2]
        assert is_in_no_document(restored(demo, clause), texts)
    # Without the passage of the first sentence the solver answers at once.
    assert searches == {1, 2}
    # The teacher's roles have no errors.
    for demo in written('solver_with_path', texts, ERRORS):
        assert len(tag(policy_text(demo), 'search').split()) > 3
    for demo in written('solver_with_path_two_hops', texts, ERRORS):
        assert policy_text(demo).count('<search>') == 2
    # A malformed proposal lacks question or answer.
    for role in ('proposer', 'proposer_two_hops'):
        for text in map(policy_text, written(role, texts, ERRORS)):
            assert ('<answer>' in text) != ('<question>' in text)


def test_a_solver_of_two_hops_reads_the_bridge_and_then_the_answer(texts):
    for demo in written('solver_two_hops', texts):
        question = demo.fields['question']
        turns = said(demo)
        first_texts, second_texts = map(texts_of, shown(demo))
        assert len(turns) == 3 and question.count(BRIDGE) == 2
        thought, clause_query = tag(turns[1], 'think'), tag(turns[1], 'search')
        before, _, bridge = thought.partition(' [ ')
        bridge = bridge.removesuffix(' ]')
        assert question.startswith(before) and bridge not in question
        sentence = question[: question.rindex(BRIDGE)].strip().replace(BRIDGE, bridge)
        assert any(sentence in text for text in first_texts)
        clause = question[question.rindex(BRIDGE) :].replace(BRIDGE, bridge)
        assert any(restored(demo, clause) in text for text in second_texts)
        assert clause_query.startswith(bridge) and cloze.BLANK not in clause_query


@pytest.mark.parametrize('role', ['proposer_two_hops', 'proposer_with_link'])
def test_a_proposal_of_two_hops_is_about_its_document_and_a_passage_found(role, texts):
    for demo in written(role, texts):
        assert demo.fields['hops'] == 2
        text = policy_text(demo)
        bridge, question = tag(text, 'search'), tag(text, 'question')
        (documents,) = shown(demo)
        # With a link, the document says which name leads on.
        name = f'[ {bridge} ]' if role == 'proposer_with_link' else bridge
        sentence = question[: question.rindex(BRIDGE)].strip().replace(BRIDGE, name)
        clause = question[question.rindex(BRIDGE) :].replace(BRIDGE, bridge)
        assert sentence in in_one_line(demo.fields['document'])
        assert any(restored(demo, clause) in passage for passage in texts_of(documents))


def test_a_training_writes_folders(tmp_path, monkeypatch, small):
    # Stocks of other sizes would be empty: fifteen texts are few.
    monkeypatch.setattr(base_english, 'PASSAGE_WORDS', (50,))
    corpus = tmp_path / 'passages.jsonl'
    write_corpus(corpus, 5)
    stages = (dataclasses.replace(TINY, name='clean', steps=2, rows=1, tokens=640, saved=True),)
    base_english.build(corpus, tmp_path / 'out', 0, stages)
    folder = tmp_path / 'out' / 'clean'
    check_hashes(folder)
    assert json.loads((folder / 'config.json').read_text())['hidden_size'] == 32
    assert [entry['step'] for entry in log_of(folder) if 'step' in entry] == [2]


def test_too_few_passages_are_refused(tmp_path):
    corpus = tmp_path / 'passages.jsonl'
    corpus.write_text(json.dumps({'id': '0', 'contents': '"A"\nOne passage is too few.'}) + '\n')
    with pytest.raises(UserError, match='passages to train on'):
        base_english.build(corpus, tmp_path / 'out', 0)


def test_the_held_out_passages_are_those_that_training_does_not_read(tmp_path, monkeypatch, capsys):
    corpus, out = tmp_path / 'passages.jsonl', tmp_path / 'held_out.jsonl'
    write_corpus(corpus, 5)
    arguments = ['base_english', f'--corpus={corpus}', f'--write-held-out={out}']
    monkeypatch.setattr('sys.argv', arguments)
    base_english.main()
    lines = out.read_text().splitlines(keepends=True)
    assert capsys.readouterr().out == f'{len(lines)} passages in {out}\n'
    assert lines and set(lines) < set(corpus.read_text().splitlines(keepends=True))
    read = {*base_english.passages_of(corpus, 'train')}
    read |= {*base_english.passages_of(corpus, 'development')}
    held_out = {*base_english.passages_of(out, 'held_out')}
    assert len(held_out) == len(lines) and not held_out & read


def write_corpus(path, copies):
    """The example texts, several times under other titles, so that every split has some."""
    texts = [(f'{title} {n}', text) for n in range(copies) for title, text in example_passages()]
    records = [{'id': i, 'contents': f'"{title}"\n{text}'} for i, (title, text) in enumerate(texts)]
    path.write_text(''.join(json.dumps(record) + '\n' for record in records))
