import numpy as np
import pytest
from batches import LOSSES, MODES, close, packed, run, weights

from zeroplay_jax.objectives import aggregation


@pytest.mark.parametrize('name', LOSSES)
def test_packing_padding_order_and_micro_batches_change_nothing(batch, name):
    """Rollouts in rows of their own, and the same ones packed, reordered, padded and cut into micro-batches."""
    for mode in MODES:
        value, gradient, stats = run(name, batch, weights(batch, mode))
        for order in (range(6), (3, 1, 4, 0, 5, 2)):
            rest, sequence, places = packed(batch, 4, 16, order)
            weight = weights(rest, mode, sequence)
            for parts in (1, 2):
                results = []
                for cut in np.split(np.arange(4), parts):
                    rows = {key: array[cut] for key, array in rest.items()}
                    results.append(run(name, rows, weight[cut]))
                values, gradients, part_stats = zip(*results)
                close(sum(map(float, values)), value)
                other = np.concatenate(gradients)
                for index, (row, span, size) in places.items():
                    close(other[row, span], np.asarray(gradient)[index, :size])
                assert np.all(np.isfinite(other)) and not np.any(other[~rest['mask']])
                for key, (total, count) in stats.items():
                    close(sum(part[key][0] for part in part_stats), total)
                    assert sum(part[key][1] for part in part_stats) == count


def test_a_sum_is_weighted_and_skips_weight_zero():
    values = np.array([[1.0, np.nan, 3.0], [0.5, 2.0, np.inf]], np.float32)
    weight = np.array([[0.25, 0.0, 2.0], [4.0, 0.5, 0.0]], np.float32)
    assert aggregation.aggregate(values, weight) == 0.25 + 6.0 + 2.0 + 1.0


def test_weights_count_a_sequence_across_gaps_and_skip_empty_ones():
    mask = np.array([[1, 0, 1, 1, 0], [0, 0, 1, 0, 0]], bool)
    sequence = np.array([[4, 4, 4, 2, 2], [0, 0, 4, -1, -1]])
    close(aggregation.token_weights(mask, sequence, 'token'), mask / 4)
    close(aggregation.token_weights(mask, sequence, 'seq_mean_token_sum'), mask / 2)
    close(
        aggregation.token_weights(mask, sequence, 'seq_mean_token_mean'),
        [[1 / 6, 0, 1 / 6, 1 / 2, 0], [0, 0, 1 / 6, 0, 0]],
    )
    close(aggregation.token_weights(mask, sequence, 'constant', 8.0), mask / 8)
    lengths = np.array([3, 1, 0])
    assert aggregation.denominator(lengths, 'token') == 4
    assert aggregation.denominator(lengths, 'seq_mean_token_sum') == 2
