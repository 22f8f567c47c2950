"""Results of evaluations, made of scores alone."""

from zeroplay_jax.evaluation import results
from zeroplay_jax.types import Question


def result(sets, documents=(), **settings):
    """A result of {set: scores of its questions}, or of one set's scores; a tuple has the scores of several samples."""
    base = dict.fromkeys(results.SETTINGS, 'same') | settings
    of_sets = {}
    for name, scores in (sets if isinstance(sets, dict) else {'set': sets}).items():
        questions = [Question(f'{name} {i}', ('a',)) for i in range(len(scores))]
        for question, document in zip(questions, documents):
            question.origin['document'] = document
        answered = []
        for score in scores:
            one = results.Answered(score, 1, 0.0, 'a')
            if isinstance(score, tuple):
                one = results.Answered(max(score), 1, 0.0, 'a', score, score[0])
            answered.append(one)
        of_sets[name] = results.SetResults.of(questions, answered)
    return results.Results(base, of_sets)
