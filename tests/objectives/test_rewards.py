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
    'prediction, golds, matches',
    [
        (None, ['x'], False),
        ('', [''], False),
        ('Rome', [], False),
        ('in ancient Rome', 'Rome', True),
        ('Rome', 'ancient Rome', False),
        ('1942', ['2'], True),
        ('Bart', ['a'], False),
        ('A', ['a'], True),
        ('anything at all', ['the', '?'], False),
        ('The Beatles sang', ['Stones', 'the beatles!'], True),
    ],
)
def test_sub_exact_match_edges(prediction, golds, matches):
    assert sub_exact_match(prediction, golds) is matches


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


def test_solvable_difficulty_is_1_inside_the_range():
    assert [difficulty(k, 4, 'solvable') for k in range(5)] == [0.0, 1.0, 1.0, 1.0, 0.0]


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
    solved = [(sum(bits), len(bits)) for bits in inputs['ssp_solver_bits']]
    assert [difficulty(*s, 'one_minus') for s in solved] == pytest.approx(
        expected['ssp_proposer_reward'], abs=1e-9
    )
    assert [difficulty(*s, 'parabolic') for s in solved] == pytest.approx(
        expected['ssp_intermediate_difficulty_l0_r1'], abs=1e-9
    )


def test_golden_triangle(golden):
    inputs, expected = golden['scope_rewards']
    for target in (0.5, 0.3):
        given = [triangle(score, target) for score in inputs['g_bar']]
        assert given == pytest.approx(expected[f'f_diff_tau{target}'], abs=1e-9)


def test_triangle_as_a_difficulty_is_that_of_the_solve_rate():
    assert [difficulty(k, 4, 'triangle') for k in range(5)] == [0.0, 0.5, 1.0, 0.5, 0.0]
    assert difficulty(1, 5, 'triangle', 0.2) == 1.0


def test_one_minus_knows_single_rollouts():
    assert [difficulty(k, 1, 'one_minus') for k in (0, 1)] == [1.0, 0.0]


def test_graded_attempts_count_in_part():
    assert difficulty(1.5, 3, 'one_minus') == 0.5
    assert difficulty(2.5, 5, 'linear') == 2.5 / 4
    assert difficulty(0.75, 3, 'triangle') == 0.5 and difficulty(0.5, 1, 'triangle') == 1.0
    assert [difficulty(k, 1, 'linear') for k in (0, 1)] == [0.0, 0.0]


@pytest.mark.parametrize(
    'solved, n, kind',
    [
        (0, 0, 'linear'),
        (0, 0, 'one_minus'),
        (-1, 5, 'linear'),
        (6, 5, 'one_minus'),
    ],
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
    assert (
        length_factor(4096, cutoff=4096) == pytest.approx(0.05)
        and length_factor(4097, cutoff=4096) == 0.0
    )


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
    'grades, weights, score',
    [
        ([True, False], None, 0.5),
        ([True, False], [3, 1], 0.75),
        ([True, None], None, 0.5),
        ([True, None, None], None, None),
        ([None], None, None),
        ([False, False, None], [0, 1, 1], 0.0),
    ],
)
def test_rubric_score(grades, weights, score):
    assert rubric_score(grades, weights) == score


def test_how_many_grades_suffice_is_an_argument():
    assert rubric_score([True, None, None], coverage=0.0) == pytest.approx(1 / 3)
    assert rubric_score([True, True, None], coverage=1.0) is None


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
    'call, message',
    [
        (lambda: triangle(0.5, 1.0), 'triangle: target 1.0'),
        (lambda: length_factor(1, 8, 8), 'length_factor: needs'),
        (lambda: length_factor(1, 4, 8, 1.5), 'length_factor: needs'),
        (lambda: search_bonus(-1), 'search_bonus: needs'),
        (lambda: search_bonus(1, 0), 'search_bonus: needs'),
        (lambda: overlong_penalty(1, 10, 0), 'overlong_penalty: needs'),
        (lambda: overlong_penalty(1, 10, 11), 'overlong_penalty: needs'),
        (lambda: rubric_score([]), 'rubric_score: 0 grades'),
        (lambda: rubric_score([True], [1, 1]), 'rubric_score: 1 grades'),
        (lambda: rubric_score([True], [-1]), 'rubric_score: 1 grades'),
        (lambda: rubric_score([True], [0]), 'rubric_score: 1 grades'),
    ],
)
def test_bad_numbers_are_one_clear_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert '\n' not in str(error.value)


def test_rewards_need_no_jax():
    code = 'import sys; import zeroplay_jax.objectives.rewards; sys.exit("jax" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0
