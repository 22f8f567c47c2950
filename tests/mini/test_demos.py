import re

import numpy as np
import pytest
from demo_parts import said, shown, tag

from tools.checkpoints import base_model, demos
from tools.checkpoints import library as library_lib
from tools.checkpoints.demo import render
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.types import ENV, POLICY, PROMPT

pytestmark = pytest.mark.results

CLEAN = demos.ErrorRates()


@pytest.fixture(scope='module')
def library():
    return library_lib.Library(range(3), 'train', deal=1)


@pytest.fixture(scope='module')
def codec(tmp_path_factory):
    folder = tmp_path_factory.mktemp('folder')
    base_model.write_config_and_tokenizer(folder)
    return Codec(folder)


def written(library, name, count=40, uneven=CLEAN):
    rng = np.random.default_rng(0)
    return [demos.ROLES[name].write(library, rng, uneven) for _ in range(count)]


def truth(library, text):
    answers = {world.resolve(text) for world in library.worlds}
    (answer,) = answers - {(None, text.count(' of '))}
    return answer


def test_every_role_of_the_five_systems_is_in_the_mixture():
    asked = 'solver solver_with_path proposer proposer_from_answer answer_from_documents challenger task_solver'
    shares = {name: role.share for name, role in demos.ROLES.items()}
    assert all(shares[name] > 0 for name in asked.split())
    assert shares['solver'] + shares['proposer'] > sum(shares.values()) / 2


def test_retelling_and_copy_keep_every_sentence(library):
    for demo in written(library, 'retelling'):
        shown_texts = {tuple(sorted(d['text'].rstrip('.').split('. '))) for d in shown(demo)[0]}
        for text in said(demo):
            assert tuple(sorted(tag(text, 'answer').rstrip('.').split('. '))) in shown_texts
    for demo in written(library, 'copy'):
        (first, who), (second, _) = demo.parts
        assert who == PROMPT
        assert sorted(first.split()) == sorted(second.split())


@pytest.mark.parametrize('name', ['solver', 'solver_with_path', 'answer_from_documents'])
def test_solvers_are_right_and_think_before_they_act(library, name):
    for demo in written(library, name):
        text = demo.fields['question']
        answer, hops = truth(library, text)
        assert tag(said(demo)[-1], 'answer') == answer
        assert all(turn.startswith('<think>') for turn in said(demo))
        assert len(shown(demo)) == (0 if name == 'answer_from_documents' else hops)
        assert all(len(found) == library_lib.TOP_K for found in shown(demo))


def test_thoughts_carry_the_rest_of_the_question(library):
    demo = next(d for d in written(library, 'solver') if len(shown(d)) == 3)
    thoughts = [tag(turn, 'think') for turn in said(demo)]
    assert demo.fields['question'] == f'What is {thoughts[0]}?'
    assert [t.count(' of ') for t in thoughts] == [3, 2, 1, 1]


def test_proposer_asks_what_it_was_told(library):
    for demo in written(library, 'proposer'):
        last = said(demo)[-1]
        text, answer = tag(last, 'question'), tag(last, 'answer')
        assert truth(library, text) == (answer, demo.fields['hops'])
        assert len(shown(demo)) == demo.fields['hops'] - 1
        assert re.match(r'\(Title: (\w+)\)', demo.fields['document'])[1] in text
        assert answer.lower() not in text.lower()
        seen = shown(demo)[-1][0]['text'] if shown(demo) else demo.fields['document']
        assert answer in seen


def test_proposer_from_answer_reaches_the_answer_it_was_given(library):
    for demo in written(library, 'proposer_from_answer'):
        text = tag(said(demo)[-1], 'question')
        assert truth(library, text) == (demo.fields['answer'], demo.fields['hops'])
        assert tag(said(demo)[-1], 'answer') == demo.fields['answer']


def test_challenger_and_task_solver(library):
    for demo in written(library, 'challenger'):
        assert tag(said(demo)[-1], 'task').startswith('Describe ')
        assert len(shown(demo)) == demo.fields['hops'] - 1
    for demo in written(library, 'task_solver'):
        assert tag(said(demo)[-1], 'answer') == shown(demo)[-1][0]['text']


def test_uneven_solver_errs_and_the_path_keeps_it_right(library):
    def share_of_right_answers(role):
        uneven = demos.ErrorRates(early_answer=0.6, wrong_fact=0.6)
        demonstrations = written(library, role, 200, uneven)
        answers = [tag(said(demo)[-1], 'answer') for demo in demonstrations]
        truths = [truth(library, demo.fields['question'])[0] for demo in demonstrations]
        return np.mean(np.array(answers) == np.array(truths))

    assert share_of_right_answers('solver_with_path') == 1
    assert 0.2 < share_of_right_answers('solver') < 0.7


def test_uneven_proposer_errs_in_each_way(library):
    def share(uneven, wrong):
        return np.mean([wrong(d, said(d)[-1]) for d in written(library, 'proposer', 200, uneven)])

    unthinking = lambda d, last: '<think>' not in last
    malformed = lambda d, last: tag(last, 'question') is None or tag(last, 'answer') is None
    other_hops = lambda d, last: len(shown(d)) != d.fields['hops'] - 1
    assert 0.4 < share(demos.ErrorRates(no_think=0.5), unthinking) < 0.6
    assert 0.4 < share(demos.ErrorRates(malformed=0.5), malformed) < 0.6
    assert 0.2 < share(demos.ErrorRates(wrong_hops=0.5), other_hops) < 0.6
    assert share(CLEAN, lambda *x: unthinking(*x) or malformed(*x) or other_hops(*x)) == 0


@pytest.mark.parametrize('name', list(demos.ROLES))
def test_rendering_keeps_text_and_limits(library, codec, name):
    for demo in written(library, name, 20):
        tokens, source = render(codec, demo)
        assert tokens.dtype == np.int32 and source.dtype == np.int8 and tokens.shape == source.shape
        policy = codec.decode(tokens[source == POLICY])
        assert policy == ''.join(said(demo))
        assert (source == ENV).any() == bool(shown(demo))
        if demo.role is not None:
            assert (source[:10] == PROMPT).all()
            if name != 'answer_from_documents':
                assert (source == PROMPT).sum() <= 96
        for turn in said(demo):
            assert len(codec.encode(turn)) <= 64


def test_search_is_the_real_ranking(library):
    world = library.worlds[0]
    for title in world.titles[:30]:
        found = library.search(title)
        assert found[0]['title'] == title
        assert len({d['title'] for d in found}) == library_lib.TOP_K
    twins = [(a, b) for w in library.worlds for a, b in w.originals.items()]
    assert np.mean([b in {d['title'] for d in library.search(a)} for a, b in twins]) > 0.2
