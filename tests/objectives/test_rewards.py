import subprocess
import sys

import pytest

from zeroplay_jax.objectives.rewards import (
    difficulty,
    drzero_format,
    exact_match,
    extract_last,
    normalize_answer,
)


def test_golden_normal_form_and_exact_match(golden):
    inputs, expected = golden['qa_em_subem']
    pairs = inputs['pred_gold']
    assert [normalize_answer(prediction) for prediction, _ in pairs] == expected['normalised_pred']
    assert [int(exact_match(prediction, golds)) for prediction, golds in pairs] == expected['em']


def test_golden_extraction(golden):
    inputs, expected = golden['qa_em_subem']
    assert [extract_last(text, 'answer') for text in inputs['extraction']] == expected['extracted']


def test_normal_form_keeps_what_is_not_ascii_punctuation():
    assert normalize_answer('The  Café – “an” Über-Thing!') == 'café – “ ” überthing'


@pytest.mark.parametrize(
    'prediction, golds, matches',
    [
        (None, ['x'], False),
        ('', [''], False),
        ('  ', ['the'], False),
        ('the', ['a'], False),
        ('A', ['a'], True),
        ('?', ['!'], False),
        ('Rome', [], False),
        ('Rome', ['Paris', 'the rome'], True),
        ('Rome', 'Rome', True),
        ('R', 'Rome', False),
    ],
)
def test_exact_match_edges(prediction, golds, matches):
    assert exact_match(prediction, golds) is matches


@pytest.mark.parametrize(
    'text, content',
    [
        ('', None),
        ('no tag', None),
        ('</answer>', None),
        ('<answer>a</answer> <answer>b', 'a'),
        ('<answer>a</answer> stray</answer>', 'a'),
        ('<answer>a <answer>b</answer>', 'a <answer>b'),
        ('<answer>\nline one\nline two\n</answer>', 'line one\nline two'),
        ('<answer >a</answer>', None),
        ('<ANSWER>a</ANSWER>', None),
    ],
)
def test_extract_last_edges(text, content):
    assert extract_last(text, 'answer') == content


def test_extract_last_reads_the_tag_asked_for():
    text = '<question>who?</question><answer>me</answer>'
    assert extract_last(text, 'question') == 'who?' and extract_last(text, 'task') is None


def test_golden_difficulty(golden):
    _, expected = golden['proposer_rewards_and_overlong']
    assert [difficulty(k, 5) for k in range(6)] == expected['pi_drzero_difficulty_n5_by_k']
    inputs, expected = golden['hrpo']
    assert [difficulty(k, inputs['n']) for k in inputs['k_correct']] == expected['difficulty']


def test_golden_proposer_reward_is_difficulty_plus_half_the_format(golden):
    inputs, expected = golden['hrpo']
    rewards = [
        difficulty(k, inputs['n']) + inputs['format_weight'] * raw
        for k, raw in zip(inputs['k_correct'], inputs['format_raw'], strict=True)
    ]
    assert rewards == pytest.approx(expected['reward'], abs=1e-9)


def test_parabolic_difficulty_peaks_at_one_half():
    assert [difficulty(k, 4, 'parabolic') for k in range(5)] == [0.0, 0.75, 1.0, 0.75, 0.0]


@pytest.mark.parametrize('solved, n, kind', [(0, 1, 'linear'), (-1, 5, 'linear'), (6, 5, 'linear'), (1, 5, 'cubic')])
def test_difficulty_refuses(solved, n, kind):
    with pytest.raises(ValueError, match='difficulty: '):
        difficulty(solved, n, kind)


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
    cases = [
        dict(
            turns=['<think>x</think>', ' <think>y</think>', 'z'],
            calls=2,
            responses=2,
            hops=4,
            answer=long,
            retrieved=long,
        ),
        dict(),
        dict(question='Is it Lomi?'),
    ]
    for case, parts, total in zip(cases, inputs['drzero_inputs'], expected['drzero_format_reward'], strict=True):
        given = score(**case)
        assert [given['think'], given['tool'], given['answer']] == pytest.approx(parts[1:], abs=1e-9)
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
    assert score(hops=hops, calls=calls, responses=responses)['tool'] == pytest.approx(tool, abs=1e-12)


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


def test_rewards_need_no_jax():
    code = 'import sys; import zeroplay_jax.objectives.rewards; sys.exit("jax" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0
