"""Expected gradients of policy-gradient estimators, by enumeration in float64; nothing here calls the project.

Two questions have three answers each: one token ends the answer or goes on, and a second one may follow. A batch has
three rollouts of each question, so that there are 729 batches.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Of each answer, [questions, answers].
REWARDS = np.array([[1.0, 0.0, 0.25], [0.5, 0.75, 0.0]])
# Of the first token (two of four) and of the second, [questions, 4].
LOGITS = np.array([[0.3, -0.2, 0.5, 0.1], [-0.4, 0.2, 0.0, 0.6]])
# Of the policy that sampled, for a minibatch after the first one.
STALE_LOGITS = LOGITS + np.array([[0.6, -0.3, -0.5, 0.4], [0.1, -0.3, 0.6, -0.6]])
# The logits that the tokens of an answer choose, and their number.
CHOICES = np.array([[0, 2], [1, 2], [1, 3]])
LENGTHS = np.array([1, 2, 2])
SAMPLES = 3
# Of the rows of a batch.
QUESTION = np.repeat([0, 1], SAMPLES)
# [batches, rows]
ANSWERS = np.indices((3,) * len(QUESTION)).reshape(len(QUESTION), -1).T
# Whether an answer has a token, [answers, 2].
HAS_TOKEN = np.arange(2) < LENGTHS[:, None]
# Denominator of 'constant'.
CONSTANT = 12.0


def log_probs(logits: np.ndarray) -> np.ndarray:
    """Returns the log-probabilities of the tokens of all answers, [questions, answers, 2]; 0 where there is none."""
    pairs = logits.reshape(-1, 2, 2)
    normalised = pairs - np.log(np.exp(pairs).sum(2, keepdims=True))
    return normalised.reshape(-1, 4)[:, CHOICES] * HAS_TOKEN


def token_gradients() -> np.ndarray:
    """Returns the gradients of `log_probs` at LOGITS, [questions, answers, 2, 4]: 1 if chosen, minus probability."""
    pairs = np.exp(LOGITS).reshape(-1, 2, 2)
    probabilities = (pairs / pairs.sum(2, keepdims=True)).reshape(-1, 1, 1, 4)
    of_token = np.repeat(np.eye(2), 2, axis=1)
    chosen = np.eye(4)[CHOICES]
    return (chosen - probabilities * of_token) * HAS_TOKEN[..., None]


def true_gradient() -> np.ndarray:
    """Returns the gradient of the expected reward, the mean over questions, [questions, 4]."""
    reward = REWARDS[QUESTION, ANSWERS] / len(QUESTION)
    return expectation(np.stack([reward, reward], axis=2), log_probs(LOGITS))


def expected_gradient(settings: Any, spans_questions: bool, stale: bool) -> np.ndarray:
    """Returns the expected gradient of an estimator, uphill, [questions, 4].

    Args:
      settings: fields of `config.<role>`.
      spans_questions: whether all rows are one group; otherwise those of a question.
      stale: whether STALE_LOGITS sampled.
    """
    old = log_probs(STALE_LOGITS if stale else LOGITS)
    log_ratio = (log_probs(LOGITS) - old)[QUESTION, ANSWERS]
    reward = REWARDS[QUESTION, ANSWERS]
    groups = reward.reshape(len(reward), -1, len(QUESTION) if spans_questions else SAMPLES)
    advantage = _advantages(groups, settings).reshape(reward.shape)
    differs = np.broadcast_to(np.ptp(groups, 2, keepdims=True) > 0, groups.shape)
    trained = differs.reshape(reward.shape) | (not settings.filter_groups)
    factor = _factor(log_ratio, advantage[..., None], settings)
    per_row = advantage * _weights(trained, settings.aggregation)
    return expectation(per_row[..., None] * factor, old)


def expectation(per_token: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Returns the mean over all batches of Σ per_token · ∇log-probability, [questions, 4].

    Args:
      per_token: [batches, rows, 2].
      old: log-probabilities of the policy that samples, as of `log_probs`.
    """
    probability = np.exp(old[QUESTION, ANSWERS].sum((1, 2)))
    slopes = token_gradients()[QUESTION, ANSWERS]
    of_rows = np.einsum('b,brt,brtl->rl', probability, per_token, slopes)
    return of_rows.reshape(len(REWARDS), SAMPLES, 4).sum(1)


def _advantages(groups, settings):
    """Returns the advantages, [batches, groups, rows], of rewards of this shape."""
    sums, size = groups.sum(2, keepdims=True), groups.shape[2]
    baselines = {'mean': sums / size, 'loo': (sums - groups) / (size - 1), 'none': 0.0}
    above = groups - baselines[settings.baseline]
    if settings.scale == 'none':
        return above
    return above / (groups.std(2, ddof=1, keepdims=True) + 1e-6)


def _weights(trained, mode):
    """Returns the weight of each token of a row, [batches, rows]."""
    lengths = LENGTHS[ANSWERS]
    if mode == 'constant':
        return trained / CONSTANT
    counted = lengths if mode == 'token' else 1
    # A batch without a group that teaches makes no update.
    total = np.maximum((trained * counted).sum(1, keepdims=True), 1)
    return trained / total / (lengths if mode == 'seq_mean_token_mean' else 1)


def _factor(log_ratio, advantage, settings):
    """Returns what multiplies advantage times gradient of the log-probability, [batches, rows, 2]."""
    low, high = settings.clip_low, settings.clip_high
    lengths = LENGTHS[ANSWERS][..., None]
    change = np.exp(log_ratio) - 1
    if settings.loss == 'cispo':
        return np.clip(change, -low, high) + 1
    if settings.loss == 'sequence_pg':
        change = np.exp(log_ratio.sum(2, keepdims=True) / lengths) - 1
    if settings.loss == 'geometric_pg':
        change = log_ratio
    # The loss of a token beyond the limit on the side of its advantage is constant.
    has_slope = np.where(advantage > 0, change <= high, change >= -low)
    if settings.loss == 'geometric_pg':
        limited = np.where(has_slope, log_ratio, np.where(advantage > 0, high, -low))
        change = np.exp(limited.sum(2, keepdims=True) / lengths) - 1
    return (change + 1) * has_slope
