"""Results of evaluations, made of scores alone."""

from zeroplay_jax.evaluation import question_sets
from zeroplay_jax.types import Question


def result(scores, **settings):
    base = dict.fromkeys(question_sets.SETTINGS, 'same') | settings
    questions = [Question(f'q{i}', ('a',)) for i in range(len(scores))]
    answered = [question_sets.Answered(score, 1, 0.0, 'a') for score in scores]
    return question_sets.results(base, {'set': (questions, answered)})
