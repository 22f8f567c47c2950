"""Results of evaluations, made of scores alone."""

from zeroplay_jax.evaluation import results
from zeroplay_jax.types import Question


def result(scores, **settings):
    base = dict.fromkeys(results.SETTINGS, 'same') | settings
    questions = [Question(f'q{i}', ('a',)) for i in range(len(scores))]
    answered = [results.Answered(score, 1, 0.0, 'a') for score in scores]
    return results.Results(base, {'set': results.SetResults.of(questions, answered)})
