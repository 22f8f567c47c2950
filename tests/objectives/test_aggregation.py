import numpy as np
import pytest
from batches import ARRAYS, LOSSES, MODES, SEQUENCE_MODES, close, packed, run, weights

from zeroplay_jax.objectives import aggregation
from zeroplay_jax.objectives.losses import POLICY_LOSSES


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


@pytest.mark.parametrize('name', POLICY_LOSSES)
@pytest.mark.parametrize('mode', SEQUENCE_MODES)
def test_parts_with_the_denominator_of_the_whole_are_its_parts(batch, mode, name):
    """As on several hosts, or where rollouts without an advantage are left out."""
    batch['advantage'][[0, 2]] = 0
    whole, gradient, _ = run(name, batch, weights(batch, mode))
    assert not np.any(np.asarray(gradient)[[0, 2]])
    total = aggregation.denominator(batch['mask'].sum(1), mode)
    kept = {k: v[[1, 3, 4, 5]] for k, v in batch.items()}
    close(run(name, kept, weights(kept, mode, total=total))[0], whole)


@pytest.mark.parametrize('name', LOSSES)
def test_a_row_of_weight_zero_is_as_good_as_absent(batch, name):
    """Rows that only fill a batch up; even their NaN does not get through."""
    mode = 'seq_mean_token_mean'
    alone = run(name, batch, weights(batch, mode))
    filled = {k: np.concatenate([v, v[:2]]) for k, v in batch.items()}
    for key in ARRAYS:
        filled[key][-1] = np.nan
    weight = np.concatenate([weights(batch, mode), np.zeros((2, 9), np.float32)])
    value, gradient, _ = run(name, filled, weight)
    close(value, alone[0])
    close(np.asarray(gradient)[:6], alone[1])
    assert not np.any(np.nan_to_num(np.asarray(gradient)[6]))


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
