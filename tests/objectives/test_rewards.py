"""Rewards against golden values; `rewards.txt` says what single answers, proposals and counts are worth."""

import pathlib

import numpy as np
from pytest import approx
from refused_calls import check_values

from zeroplay_jax.objectives import answers, format_scores, rewards
from zeroplay_jax.objectives.answers import (
    exact_match,
    extract_last,
    normalize_answer,
    sub_exact_match,
)
from zeroplay_jax.objectives.format_scores import (
    drzero_format,
    drzero_separate_format,
    scope_challenger_format,
    scope_solver_format,
    ssp_gate,
)
from zeroplay_jax.objectives.rewards import (
    alpha_at,
    closes_window,
    difficulty,
    length_factor,
    rubric_score,
    search_bonus,
    stratify,
    triangle,
)

PROPOSAL = dict(
    turns=['<think>a</think><search>Gumu</search>', '<think>b</think><question>…'],
    calls=1,
    responses=1,
    hops=2,
    question='What is the birthplace of the author of Gumu?',
    answer='Lomi',
    source='Gumu was written by Peto.',
    retrieved='Peto was born in Lomi.',
)
THINKS = '<think>a</think><search>b</search>'
QUESTION = 'Which town is the birthplace of the author of the old chronicle named Gumu?'
CODE = dict(chars=(10, 1000), words=10, searches=2, distinct=True, whole_words=False)


# Letter → tag of an element of a printed rollout; w: words outside tags.
TAGS = dict(T='think', S='search', C='tool_call', Q='question', A='answer', E='original_evidence')


def turns(structure):
    """The turns of a rollout that a paper prints, such as 'T S / T A', with words of our own."""
    texts = []
    for letters in structure.split('/'):
        tags = [TAGS.get(letter) for letter in letters.split()]
        texts.append('\n'.join(f'<{tag}> words </{tag}>' if tag else 'words' for tag in tags))
    return texts


def proposer(structure, hops):
    """The parts of Dr. Zero's form, and their mean, of a printed proposal whose searches were answered."""
    written = turns(structure)
    calls = structure.count('C')
    texts = {tag: extract_last(written[-1], tag) for tag in ('question', 'answer')}
    parts = drzero_separate_format(written, calls=calls, responses=calls, hops=hops, **texts)
    return list(parts.values())


def solver(structure):
    """The parts of SCOPE's form of a printed solution."""
    written = turns(structure)
    answer = extract_last(written[-1], 'answer')
    parts = scope_solver_format(written, searches=structure.count('S'), answer=answer)
    return [parts[name] for name in ('think', 'tool', 'answer')]


def score(**changes):
    return drzero_format(**(PROPOSAL | changes))


def challenger(turns=(THINKS,), **changes):
    options = dict(searches=1, malformed=0, expected=1, task='t')
    return scope_challenger_format(list(turns), **(options | changes))


def thinking(turns, code):
    """Shares of a challenger and of a solver that get nothing else."""
    proposed = challenger(turns, searches=0, task=None, code=code)
    solved = scope_solver_format(turns, searches=0, answer=None, code=code)
    for part in (proposed, solved):
        assert part['raw'] == approx(part['think'] / 3)
    return proposed['think'], solved['think']


def gate(**changes):
    proposal = dict(question=QUESTION, answers=['Lomi'], queries=['a', 'b']) | changes
    return ssp_gate(*proposal.values()), ssp_gate(*proposal.values(), **CODE)


def test_rewards_are_those_of_the_table():
    names = vars(answers) | vars(format_scores) | vars(rewards) | globals()
    check_values(pathlib.Path(__file__).with_name('rewards.txt'), names)


def test_golden_answers(golden):
    inputs, expected = golden['qa_em_subem']
    assert [extract_last(text, 'answer') for text in inputs['extraction']] == expected['extracted']
    pairs = inputs['pred_gold']
    assert [normalize_answer(prediction) for prediction, _ in pairs] == expected['normalised_pred']
    assert [exact_match(*pair) for pair in pairs] == expected['em']
    assert [sub_exact_match(*pair) for pair in pairs] == expected['subem_gold_in_pred']


def test_golden_proposer_rewards(golden):
    """Difficulties, and their sum with half the score of the format."""
    inputs, expected = golden['proposer_rewards_and_overlong']
    assert [difficulty(k, 5) for k in range(6)] == expected['pi_drzero_difficulty_n5_by_k']
    kinds = {'one_minus': 'ssp_proposer_reward', 'parabolic': 'ssp_intermediate_difficulty_l0_r1'}
    for kind, name in kinds.items():
        given = [difficulty(sum(bits), len(bits), kind) for bits in inputs['ssp_solver_bits']]
        assert given == approx(expected[name], abs=1e-9)
    inputs, expected = golden['hrpo']
    difficulties = [difficulty(k, inputs['n']) for k in inputs['k_correct']]
    assert difficulties == expected['difficulty']
    given = np.array(difficulties) + inputs['format_weight'] * np.array(inputs['format_raw'])
    assert given == approx(expected['reward'], abs=1e-9)


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
        think, tool, answer, raw = score(**case).values()
        assert [think, tool, answer] == approx(parts[1:], abs=1e-9)
        assert 0.5 * raw == approx(total, abs=1e-9)


def test_golden_scope_rewards(golden):
    """The sums of eqs. 4 and 6, which the recipe weighs, from the parts that live here."""
    inputs, expected = golden['scope_rewards']
    for target in (0.5, 0.3):
        given = [triangle(score, target) for score in inputs['g_bar']]
        assert given == approx(expected[f'f_diff_tau{target}'], abs=1e-9)
    limits = dict(soft=inputs['soft'], hard=inputs['hard'], floor=inputs['ell_min'])
    given = [length_factor(tokens, **limits) for tokens in inputs['lengths']]
    assert given == approx(expected['length_factor'], abs=1e-9)
    assert given == [length_factor(tokens) for tokens in inputs['lengths']]

    score = rubric_score([bool(bit) for bit in inputs['rubric_bits']])
    assert score == expected['rubric_score']
    solver = inputs['lambda_acc'] * length_factor(1536) * score
    solver += inputs['lambda_fmt'] * 0.75 + inputs['lambda_search'] * search_bonus(2)
    assert solver == approx(expected['solver_reward_len1536_fmt0.75_2calls'], abs=1e-9)
    *parts, raw = challenger(['<think>x</think>'], expected=2).values()
    assert parts == inputs['challenger_format_parts']
    failed = inputs['lambda_fmt'] * raw
    assert failed == approx(expected['challenger_reward_gate_fail'], abs=1e-9)
    passed = failed + inputs['lambda_diff'] * triangle(0.35)
    assert passed == approx(expected['challenger_reward_gate_pass'], abs=1e-9)
    inside = [0.2 <= score <= 0.8 for score in inputs['g_bar']]
    assert inside == expected['keep_in_window_0.2_0.8_inclusive']


def test_golden_batch_plans(golden):
    inputs, expected = golden['batch_plans']
    for ratio in ('drzero', 'scope'):
        counts = [stratify(inputs[f'{ratio}_ratio'], batch) for batch in inputs['batches']]
        assert counts == expected[f'{ratio}_counts']
    for model, schedule in inputs['pi_alpha'].items():
        given = [alpha_at(schedule, i) for i in range(4)]
        assert given == expected['alpha_iter1to4_clamped'][model]


def test_golden_replay_windows(golden):
    inputs, expected = golden['batch_plans']
    steps, period = inputs['replay']['steps'], inputs['replay']['period']
    closed = [step for step in range(1, steps + 1) if closes_window(step, period)]
    assert closed == expected['replay_cleared_after_steps_1based']
    lengths = np.diff([0, *closed, steps]).tolist()
    assert lengths == expected['replay_window_lengths_if_cleared_at_end_of_step_s']
    # The released code asks with the counter of the next step.
    early = [step for step in range(1, steps + 1) if closes_window(step + 1, period)]
    released = expected['replay_window_lengths_released_code(counter already incremented)']
    assert np.diff([0, *early, steps]).tolist() == released
    assert not any(closes_window(step, 0) for step in range(1, 50))
    assert all(closes_window(step, 1) for step in range(1, 50))
