"""The small runs of the configs have something to learn."""

import numpy as np

import zeroplay_jax as zp


def test_the_solver_of_a_small_run_sometimes_answers_questions_of_two_hops():
    config = zp.config('drzero', 'mini', {'eval.questions': 12})
    index = zp.open_index(settings=config)
    questions = [question for question in index.questions if question.hops == 2]
    rollouts = zp.sample_rollouts(
        zp.load_policy(settings=config),
        index,
        [question.text for question in questions],
        samples=config.solver.samples,
        temperature=config.solver.temperature,
    )
    rewards = zp.score(rollouts, [question.answers for question in questions])
    # Where all rewards of a group are equal, no reward or loss of anybody's has an effect.
    is_informative = np.ptp(rewards, axis=1) > 0
    assert is_informative.mean() > 1 / 3
