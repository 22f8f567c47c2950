import subprocess
import sys

import pytest

from zeroplay_jax.objectives.rewards import (
    difficulty,
    exact_match,
    extract_last,
    f1,
    length_factor,
    majority_answer,
    normalize_answer,
    overlong_penalty,
    rubric_score,
    scope_challenger_format,
    search_bonus,
    sub_exact_match,
    triangle,
)


def test_golden_normal_form_and_exact_match(golden):
    inputs, expected = golden['qa_em_subem']
    pairs = inputs['pred_gold']
    assert [normalize_answer(prediction) for prediction, _ in pairs] == expected['normalised_pred']
    assert [int(exact_match(prediction, golds)) for prediction, golds in pairs] == expected['em']
    assert [int(sub_exact_match(prediction, golds)) for prediction, golds in pairs] == expected[
        'subem_gold_in_pred'
    ]


def test_golden_extraction(golden):
    inputs, expected = golden['qa_em_subem']
    assert [extract_last(text, 'answer') for text in inputs['extraction']] == expected['extracted']


def test_normal_form_keeps_what_is_not_ascii_punctuation():
    assert normalize_answer('The  Café – “an” Über-Thing!') == 'café – “ ” überthing'


@pytest.mark.parametrize(
    'prediction, golds, is_exact, is_contained',
    [
        (None, ['x'], False, False),
        ('', [''], False, False),
        ('the', ['a'], False, False),
        ('A', ['a'], True, True),
        ('?', ['!'], False, False),
        ('Rome', [], False, False),
        ('Rome', ['Paris', 'the rome'], True, True),
        ('Rome', 'Rome', True, True),
        ('R', 'Rome', False, False),
        ('in ancient Rome', 'Rome', False, True),
        ('Rome', 'ancient Rome', False, False),
        ('1942', ['2'], False, True),
        ('Bart', ['a'], False, False),
        ('anything at all', ['the', '?'], False, False),
        ('The Beatles sang', ['Stones', 'the beatles!'], False, True),
    ],
)
def test_edges_of_exact_match_and_containment(prediction, golds, is_exact, is_contained):
    assert exact_match(prediction, golds) is is_exact
    assert sub_exact_match(prediction, golds) is is_contained


@pytest.mark.parametrize(
    'prediction, golds, score',
    [
        (None, ['x'], 0.0),
        ('', ['x'], 0.0),
        ('', [''], 0.0),
        ('x', [], 0.0),
        ('x', ['y'], 0.0),
        ('the Cat', 'cat!', 1.0),
        ('black cat', ['cat'], 2 / 3),
        ('cat', ['black cat'], 2 / 3),
        ('new york city', ['york', 'new york'], 0.8),
        ('b b c', ['b c c'], 2 / 3),
        ('b b c', ['b b d'], 2 / 3),
        ('b b', ['b'], 2 / 3),
        ('A', ['a'], 1.0),
        ('?', ['!'], 0.0),
    ],
)
def test_f1(prediction, golds, score):
    assert f1(prediction, golds) == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize(
    'text, content',
    [
        ('', None),
        ('no tag', None),
        ('</answer>', None),
        ('<answer>a</answer> <answer>b', 'a'),
        ('<answer>a</answer> stray</answer>', 'a'),
        ('<answer>a <answer>b</answer>', 'a <answer>b'),
        ('<question>who?</question><answer>me</answer>', 'me'),
        ('<answer>\nline one\nline two\n</answer>', 'line one\nline two'),
        ('<answer >a</answer>', None),
        ('<ANSWER>a</ANSWER>', None),
    ],
)
def test_extract_last_edges(text, content):
    assert extract_last(text, 'answer') == content


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


@pytest.mark.parametrize(
    'predictions,majority',
    [
        (['Lomi', 'The  LOMI.', 'Puto'], 'Lomi'),
        (['Puto', 'lomi', 'The Lomi'], 'lomi'),
        (['b', 'c', 'c', 'b'], 'b'),
        ([None, None, '', ' ', 'x'], 'x'),
        (['?', 'A', '?'], '?'),
        ([None, ' '], None),
        ([], None),
    ],
)
def test_the_majority_is_counted_in_normal_form(predictions, majority):
    assert majority_answer(predictions) == majority


def test_golden_ssp_rewards(golden):
    inputs, expected = golden['proposer_rewards_and_overlong']
    kinds = {'one_minus': 'ssp_proposer_reward', 'parabolic': 'ssp_intermediate_difficulty_l0_r1'}
    for kind, name in kinds.items():
        given = [difficulty(sum(bits), len(bits), kind) for bits in inputs['ssp_solver_bits']]
        assert given == pytest.approx(expected[name], abs=1e-9)


def test_golden_triangle(golden):
    inputs, expected = golden['scope_rewards']
    for target in (0.5, 0.3):
        given = [triangle(score, target) for score in inputs['g_bar']]
        assert given == pytest.approx(expected[f'f_diff_tau{target}'], abs=1e-9)


@pytest.mark.parametrize(
    'solved, n, kind, target, expected',
    [
        ((0, 1, 2, 3, 4), 4, 'parabolic', 0.5, [0.0, 0.75, 1.0, 0.75, 0.0]),
        ((0, 1, 2, 3, 4), 4, 'solvable', 0.5, [0.0, 1.0, 1.0, 1.0, 0.0]),
        ((0, 1, 2, 3, 4), 4, 'triangle', 0.5, [0.0, 0.5, 1.0, 0.5, 0.0]),
        ((1,), 5, 'triangle', 0.2, [1.0]),
        ((0, 1), 1, 'one_minus', 0.5, [1.0, 0.0]),
        ((0, 1), 1, 'linear', 0.5, [0.0, 0.0]),
        # Graded attempts count in part.
        ((1.5,), 3, 'one_minus', 0.5, [0.5]),
        ((2.5,), 5, 'linear', 0.5, [2.5 / 4]),
        ((0.75, 1.5), 3, 'triangle', 0.5, [0.5, 1.0]),
    ],
)
def test_difficulty_of_a_number_of_solved_attempts(solved, n, kind, target, expected):
    assert [difficulty(count, n, kind, target) for count in solved] == expected


@pytest.mark.parametrize(
    'solved, n, kind', [(0, 0, 'linear'), (0, 0, 'one_minus'), (-1, 5, 'linear'), (6, 5, 'linear')]
)
def test_difficulty_refuses(solved, n, kind):
    with pytest.raises(ValueError, match='difficulty: '):
        difficulty(solved, n, kind)


def test_golden_length_factor(golden):
    inputs, expected = golden['scope_rewards']
    limits = dict(soft=inputs['soft'], hard=inputs['hard'], floor=inputs['ell_min'])
    given = [length_factor(tokens, **limits) for tokens in inputs['lengths']]
    assert given == pytest.approx(expected['length_factor'], abs=1e-9)
    assert given == [length_factor(tokens) for tokens in inputs['lengths']]


def test_a_length_cutoff_leaves_nothing():
    assert length_factor(4096, cutoff=4096) == pytest.approx(0.05)
    assert length_factor(4097, cutoff=4096) == 0.0


def test_golden_scope_rewards(golden):
    """The sums of eqs. 4 and 6, which the recipe weighs, from the parts that live here."""
    inputs, expected = golden['scope_rewards']
    score = rubric_score([bool(bit) for bit in inputs['rubric_bits']])
    assert score == expected['rubric_score']
    solver = inputs['lambda_acc'] * length_factor(1536) * score
    solver += inputs['lambda_fmt'] * 0.75 + inputs['lambda_search'] * search_bonus(2)
    assert solver == pytest.approx(expected['solver_reward_len1536_fmt0.75_2calls'], abs=1e-9)
    parts = scope_challenger_format(
        ['<think>x</think>'], searches=1, malformed=0, expected=2, task='t'
    )
    assert list(parts.values())[:3] == inputs['challenger_format_parts']
    failed = inputs['lambda_fmt'] * parts['raw']
    assert failed == pytest.approx(expected['challenger_reward_gate_fail'], abs=1e-9)
    passed = failed + inputs['lambda_diff'] * triangle(0.35)
    assert passed == pytest.approx(expected['challenger_reward_gate_pass'], abs=1e-9)
    inside = [0.2 <= score <= 0.8 for score in inputs['g_bar']]
    assert inside == expected['keep_in_window_0.2_0.8_inclusive']


@pytest.mark.parametrize(
    'grades, options, score',
    [
        ([True, False], {}, 0.5),
        ([True, False], dict(weights=[3, 1]), 0.75),
        ([True, None], {}, 0.5),
        ([True, None, None], {}, None),
        ([None], {}, None),
        ([False, False, None], dict(weights=[0, 1, 1]), 0.0),
        ([True, None, None], dict(coverage=0.0), 1 / 3),
        ([True, True, None], dict(coverage=1.0), None),
    ],
)
def test_rubric_score(grades, options, score):
    assert rubric_score(grades, **options) == score


@pytest.mark.parametrize('calls, bonus', [(0, 0.0), (1, 1 / 3), (3, 1.0), (9, 1.0)])
def test_search_bonus_saturates(calls, bonus):
    assert search_bonus(calls) == pytest.approx(bonus)


def test_golden_overlong(golden):
    inputs, expected = golden['proposer_rewards_and_overlong']
    limits = dict(limit=inputs['overlong_max'], buffer=inputs['overlong_buffer'])
    given = [overlong_penalty(tokens, **limits) for tokens in inputs['overlong_lengths']]
    assert given == pytest.approx(expected['overlong_penalty'], abs=1e-9)
    assert overlong_penalty(7168, **limits, factor=0.2) == pytest.approx(-0.1)


@pytest.mark.parametrize(
    'function, arguments, message',
    [
        (triangle, (0.5, 1.0), 'triangle: target 1.0'),
        (length_factor, (1, 8, 8), 'length_factor: needs'),
        (length_factor, (1, 4, 8, 1.5), 'length_factor: needs'),
        (search_bonus, (-1,), 'search_bonus: needs'),
        (search_bonus, (1, 0), 'search_bonus: needs'),
        (overlong_penalty, (1, 10, 0), 'overlong_penalty: needs'),
        (overlong_penalty, (1, 10, 11), 'overlong_penalty: needs'),
        (rubric_score, ([],), 'rubric_score: 0 grades'),
        (rubric_score, ([True], [1, 1]), 'rubric_score: 1 grades'),
        (rubric_score, ([True], [-1]), 'rubric_score: 1 grades'),
        (rubric_score, ([True], [0]), 'rubric_score: 1 grades'),
    ],
)
def test_bad_numbers_are_one_clear_line(function, arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        function(*arguments)
    assert '\n' not in str(error.value)


def test_rewards_and_judges_need_no_jax():
    code = (
        'import sys; import zeroplay_jax.objectives.rewards, zeroplay_jax.selfplay.judge; '
        'sys.exit("jax" in sys.modules)'
    )
    assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0
