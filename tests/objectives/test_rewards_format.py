import pytest

from zeroplay_jax.objectives.rewards import (
    drzero_format,
    scope_challenger_format,
    scope_solver_format,
    ssp_gate,
)

GOOD = dict(
    turns=['<think>a</think><search>Gumu</search>', '<think>b</think><question>…'],
    calls=1,
    responses=1,
    hops=2,
    question='What is the birthplace of the author of Gumu?',
    answer='Lomi',
    source='Gumu was written by Peto.',
    retrieved='Peto was born in Lomi.',
)


def score(**changes):
    return drzero_format(**(GOOD | changes))


def test_a_perfect_proposal_scores_one():
    assert score() == {'think': 1.0, 'tool': 1.0, 'answer': 1.0, 'raw': 1.0}


def test_golden_format_reward(golden):
    """The golden cases give the parts; texts that have exactly these parts must give the expected totals."""
    inputs, expected = golden['proposer_rewards_and_overlong']
    long = 'one two three four five six'
    turns = ['<think>x</think>', ' <think>y</think>', 'z']
    cases = [
        dict(turns=turns, calls=2, responses=2, hops=4, answer=long, retrieved=long),
        dict(),
        dict(question='Is it Lomi?'),
    ]
    totals = expected['drzero_format_reward']
    for case, parts, total in zip(cases, inputs['drzero_inputs'], totals, strict=True):
        given = score(**case)
        parts_given = [given['think'], given['tool'], given['answer']]
        assert parts_given == pytest.approx(parts[1:], abs=1e-9)
        assert 0.5 * given['raw'] == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize(
    'turns, share',
    [
        ([], 0.0),
        (['text <think>late</think>'], 0.0),
        (['<think>open'], 0.0),
        (['</think><think>'], 0.0),
        (['\n <think></think>x', 'no'], 0.5),
    ],
)
def test_think_counts_turns_that_begin_with_a_closed_block(turns, share):
    assert score(turns=turns)['think'] == share


@pytest.mark.parametrize(
    'hops, calls, responses, tool',
    [
        (1, 0, 0, 1.0),
        (1, 1, 2, 1.0),
        (1, 3, 3, 1.0),
        (2, 0, 0, 0.0),
        (2, 1, 2, 0.0),
        (3, 1, 1, 2 / 3),
        (4, 2, 2, 0.75),
        (4, 5, 5, 1.0),
    ],
)
def test_tool_part(hops, calls, responses, tool):
    given = score(hops=hops, calls=calls, responses=responses)
    assert given['tool'] == pytest.approx(tool, abs=1e-12)


@pytest.mark.parametrize(
    'answer, changes, part',
    [
        ('Yes.', dict(), 1.0),
        ('No', dict(calls=0, responses=0), 1.0),
        ('elsewhere', dict(), 0.0),
        ('Peto', dict(calls=0, responses=0), 1.0),
        ('Lomi', dict(calls=0, responses=0), 0.0),
        ('Lomi', dict(responses=2), 0.0),
        ('the LOMI!', dict(), 1.0),
        ('b c d e f', dict(source='b c d e f'), 1.0),
        ('b c d e f g', dict(source='b c d e f g'), 0.5),
        ('b c d e f g h i j k', dict(source='b c d e f g h i j k'), 0.5),
        ('b c d e f g h i j k l', dict(source='b c d e f g h i j k l'), 0.0),
        ('the', dict(), 0.0),
    ],
)
def test_answer_part(answer, changes, part):
    assert score(answer=answer, **changes)['answer'] == part


@pytest.mark.parametrize(
    'changes',
    [
        dict(question=None),
        dict(answer=None),
        dict(question='  '),
        dict(answer=''),
        dict(answer='The'),
        dict(answer='gumu'),
        dict(answer='author of the Gumu'),
    ],
)
def test_missing_or_leaked_scores_nothing(changes):
    assert score(**changes)['raw'] == 0.0


def test_a_multi_hop_proposal_without_search_may_still_earn_the_rest():
    given = score(turns=['x', '<think>y</think>'], calls=0, responses=0, answer='elsewhere')
    assert given['raw'] == 0.375


@pytest.mark.parametrize('changes', [dict(hops=0), dict(calls=-1), dict(responses=-1)])
def test_format_refuses(changes):
    with pytest.raises(ValueError, match='drzero_format: needs'):
        score(**changes)


THINKS = '<think>a</think><search>b</search>'


def challenger(turns=(THINKS,), **changes):
    options = dict(searches=1, malformed=0, expected=1, task='t')
    return scope_challenger_format(list(turns), **(options | changes))


@pytest.mark.parametrize(
    'turns, paper, code',
    [
        ([], 0.0, 0.0),
        ([THINKS, 'plain'], 0.5, 0.5),
        (['First: ' + THINKS, THINKS], 1.0, 0.5),
        (['<think>open', '</think><think>'], 0.0, 0.0),
    ],
)
def test_scope_thinking_counts_anywhere_or_at_the_start(turns, paper, code):
    for variant, share in ((False, paper), (True, code)):
        proposed = challenger(turns, searches=0, task=None, code=variant)
        solved = scope_solver_format(turns, searches=0, answer=None, code=variant)
        assert proposed['think'] == solved['think'] == share
        assert proposed['raw'] == solved['raw'] == pytest.approx(share / 3)


@pytest.mark.parametrize(
    'searches, malformed, paper, code',
    [(0, 0, 0.0, 0.0), (1, 0, 0.5, 0.5), (3, 0, 1.0, 1.0), (2, 1, 1.0, 0.5), (1, 2, 0.5, 0.0)],
)
def test_scope_challenger_tool_part(searches, malformed, paper, code):
    for variant, part in ((False, paper), (True, code)):
        given = challenger(searches=searches, malformed=malformed, expected=2, code=variant)
        total = pytest.approx((2 + part) / 3)
        assert given == {'think': 1.0, 'tool': part, 'task': 1.0, 'raw': total}


def test_scope_code_pays_for_no_search_where_none_is_asked():
    given = challenger(searches=0, expected=0, task=' ', code=True)
    assert given['tool'] == 1.0 and given['task'] == 0.0


@pytest.mark.parametrize(
    'turns, searches, part',
    [([THINKS], 1, 0.0), ([THINKS] * 3, 1, 0.5), ([THINKS] * 3, 5, 1.0), ([], 0, 0.0)],
)
def test_scope_solver_tool_part(turns, searches, part):
    given = scope_solver_format(turns, searches=searches, answer=' a ')
    assert given['tool'] == part and given['answer'] == 1.0
    assert scope_solver_format(turns, searches=searches, answer='  ')['answer'] == 0.0


@pytest.mark.parametrize(
    'changes', [dict(searches=-1), dict(malformed=-1), dict(expected=-1), dict(expected=0)]
)
def test_scope_format_refuses(changes):
    with pytest.raises(ValueError, match='scope_challenger_format: needs'):
        challenger(**changes)


def test_scope_solver_format_refuses():
    with pytest.raises(ValueError, match='scope_solver_format: searches -1'):
        scope_solver_format([THINKS], searches=-1, answer='a')


QUESTION = 'Which town is the birthplace of the author of the old chronicle named Gumu?'
CODE = dict(chars=(10, 1000), words=10, searches=2, distinct=True, whole_words=False)


@pytest.mark.parametrize(
    'changes, paper, code',
    [
        ({}, None, None),
        (dict(question=None), 'no_question', 'no_question'),
        (dict(question=' \n'), 'no_question', 'no_question'),
        (dict(question='Who is it'), 'short_question', 'short_question'),
        (dict(question='Where was the author of Gumu born?'), None, 'short_question'),
        (dict(question=QUESTION * 20), None, 'long_question'),
        (dict(answers=['Lomi', 'the GUMU!']), 'leaks_answer', None),
        (dict(answers=['gumu']), 'leaks_answer', 'leaks_answer'),
        (dict(answers=['o']), None, 'leaks_answer'),
        (dict(answers=['the']), 'leaks_answer', 'leaks_answer'),
        (dict(queries=[]), 'few_searches', 'few_searches'),
        (dict(queries=['a']), None, 'few_searches'),
        (dict(queries=['a', ' a']), None, 'repeated_query'),
    ],
)
def test_ssp_gate_of_paper_and_code(changes, paper, code):
    proposal = dict(question=QUESTION, answers=['Lomi'], queries=['a', 'b']) | changes
    assert ssp_gate(*proposal.values()) == paper
    assert ssp_gate(*proposal.values(), **CODE) == code


def test_ssp_gate_refuses_a_proposal_made_from_nothing():
    with pytest.raises(ValueError, match='ssp_gate: answers are empty'):
        ssp_gate(QUESTION, [], ['a'])
