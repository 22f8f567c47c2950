"""Rewards by name: `config.reward.difficulty` and `config.reward.answer`."""

from zeroplay_jax.objectives.answers import normalize_answer


def plateau(solved, n, target):
    """1 for a question that some but not all rollouts answered, ½ at either end."""
    del target
    return 1.0 if 0 < solved < n else 0.5


def last_word(prediction, golds):
    """Whether the last words agree: 1 for 'the city of Bitas' where 'Bitas' is accepted."""
    predicted = normalize_answer(prediction or '').split()[-1:]
    accepted = [normalize_answer(gold).split()[-1:] for gold in golds]
    return float(bool(predicted) and predicted in accepted)
