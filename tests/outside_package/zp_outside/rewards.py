"""A reward by name: `config.reward.answer`."""

from zeroplay_jax.objectives.answers import normalize_answer


def last_word(prediction, golds):
    """Whether the last words agree: 1 for 'the city of Bitas' where 'Bitas' is accepted."""
    predicted = normalize_answer(prediction or '').split()[-1:]
    accepted = [normalize_answer(gold).split()[-1:] for gold in golds]
    return float(bool(predicted) and predicted in accepted)
