"""Compares the gradients of all configs with exact ones, by enumeration: python -m benchmarks.gradients > FILE

The small world of benchmarks/exact.py has 729 batches. The expected gradient of an estimator is the sum over them of
probability times gradient: once with advantages, weights and loss of the project, once in closed form. Rows are the
distinct estimators of the configs and their ablations, and four that are only settings. KL terms, and estimators with
a value network, are left out; what a filter of groups excludes is not replaced. Some columns:

  groups  rows that are compared: of a question, or of all questions (HRPO)
  policy  stale: the batch was sampled before an update, as every minibatch but the first
  error   largest difference between the two gradients, relative to the largest component
  length  of the expected gradient, relative to the gradient of the expected reward
  angle   between these two, in degrees
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from benchmarks import exact
from benchmarks.command import parser
from zeroplay_jax.configs import ablations
from zeroplay_jax.configuration import fields
from zeroplay_jax.objectives import advantages, aggregation, losses
from zeroplay_jax.selfplay.recipe import BUILT_IN

_SETTINGS = ('loss', 'baseline', 'scale', 'aggregation', 'filter_groups')
_CLIPS = ('clip_low', 'clip_high')
COLUMNS = (*_SETTINGS, *_CLIPS, 'groups', 'policy', 'role', 'error', 'length', 'angle')
_FURTHER: dict[str, dict[str, Any]] = {
    'RLOO': {'baseline': 'loo'},
    'RLOO, divided by the deviation': {'baseline': 'loo', 'scale': 'std'},
    'Dr. GRPO': {'aggregation': 'constant'},
    'CISPO': {'loss': 'cispo', 'aggregation': 'token'},
}


def _roles() -> Iterator[tuple[str, ConfigDict, bool]]:
    """Yields the trained roles of all configs: name, settings, and whether groups span questions."""
    for name in (*BUILT_IN, *ablations.ROWS):
        config = ablations.get_config(name) if '/' in name else fields.config(name)
        of_proposer = config.get('drzero', {}).get('group') == 'hop'
        for role, spans in {'proposer': of_proposer, 'solver': False}.items():
            if role in config and config[role].baseline != 'value':
                yield f'{name} {role}', config[role], spans
    for name, changes in _FURTHER.items():
        settings = fields.config('ssp').solver.copy_and_resolve_references()
        settings.update({'aggregation': 'seq_mean_token_sum', **changes})
        yield name, settings, False


def estimators() -> dict[tuple[str, ...], tuple[ConfigDict, bool, bool]]:
    """Returns the arguments below of the distinct estimators, by their cells in the table up to the role."""
    distinct = {}
    for name, role, spans in _roles():
        settings = ConfigDict({'filter_groups': False, **role, 'constant_norm': exact.CONSTANT})
        for policy in ('fresh', 'stale')[: settings.minibatches]:
            stale = policy == 'stale'
            # The ratio of a fresh batch is 1, which no clip reaches.
            clips = [settings[clip] if stale else '' for clip in _CLIPS]
            of_loss = [settings[field] for field in _SETTINGS]
            cells = [*of_loss, *clips, 'all' if spans else 'question', policy]
            distinct.setdefault(tuple(map(str, cells)), (name, settings, spans, stale))
    return {(*cells, name): arguments for cells, (name, *arguments) in distinct.items()}


def expected_gradient(settings: Any, spans_questions: bool, stale: bool) -> np.ndarray:
    """Returns what `exact.expected_gradient` does, by the functions of the project."""
    reward = exact.REWARDS[exact.QUESTION, exact.ANSWERS]
    batches, rows = reward.shape
    batch = np.repeat(np.arange(batches), rows)
    group = batch if spans_questions else 2 * batch + np.tile(exact.QUESTION, batches)
    lengths = exact.LENGTHS[exact.ANSWERS].reshape(-1, 1)
    mask = np.arange(2) < lengths
    present = np.ones(lengths.shape, bool)
    table = advantages.RewardTable(
        reward.ravel(), np.full(lengths.shape, np.nan), present, lengths, group, present[:, 0]
    )
    advantage, _ = advantages.evaluate('group', table, settings)
    if settings.filter_groups:
        mask &= advantages.informative_groups(table.reward, group)[:, None]
    total = settings.constant_norm if settings.aggregation == 'constant' else None
    old = exact.log_probs(exact.STALE_LOGITS if stale else exact.LOGITS)
    weights = []
    for of_batch in mask.reshape(batches, rows, 2):
        weights.append(aggregation.token_weights(of_batch, None, settings.aggregation, total))
    loss = losses.resolve_loss(settings.loss)
    clips = {name: settings[name] for name in (*_CLIPS, 'dual_clip')}
    both = np.stack([exact.log_probs(exact.LOGITS), old], axis=-1)
    of_rows = both[exact.QUESTION, exact.ANSWERS].reshape(-1, 2, 2).astype(np.float32)
    of_tokens = np.repeat(advantage.astype(np.float32)[:, None], 2, axis=1)

    def sum_of_losses(log_probs):
        per_token, _ = loss(log_probs, of_rows[..., 1], of_tokens, mask, mask + 0, **clips)
        return aggregation.aggregate(per_token, np.concatenate(weights))

    slopes = jax.grad(sum_of_losses)(of_rows[..., 0])
    return exact.expectation(-np.asarray(slopes, np.float64).reshape(batches, rows, 2), old)


def compare(settings: Any, spans_questions: bool, stale: bool) -> tuple[float, float, float]:
    """Returns error, length and angle of an estimator; see above."""
    given = expected_gradient(settings, spans_questions, stale)
    wanted = exact.expected_gradient(settings, spans_questions, stale)
    true = exact.true_gradient()
    error = np.abs(given - wanted).max() / np.abs(wanted).max()
    length = np.linalg.norm(wanted) / np.linalg.norm(true)
    cosine = (wanted * true).sum() / np.linalg.norm(true) ** 2 / length
    angle = np.degrees(np.arccos(min(cosine, 1.0)))
    return float(error), float(length), float(angle)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser('gradients', __doc__).parse_args(argv)
    print('\t'.join(COLUMNS))
    for cells, arguments in estimators().items():
        error, length, angle = compare(*arguments)
        print(*cells, f'{error:.0e}', f'{length:.3f}', f'{angle:.1f}', sep='\t')


if __name__ == '__main__':
    main()
