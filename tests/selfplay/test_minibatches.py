"""How the rows of a step are divided into the minibatches of its updates, and which of them are computed."""

import types

import numpy as np
import pytest

from zeroplay_jax.selfplay.update import split_minibatches, trained_rows
from zeroplay_jax.types import Row, identity_rng


def rows_of_documents(documents, samples):
    """Rows in the order of issue: from 1 hop to 4, groups are hop counts (HRPO)."""
    rows = []
    for index in range(documents):
        hops = 1 + 4 * index // documents
        for sample in range(samples):
            trajectory = types.SimpleNamespace(
                identity=(7, index, 0, sample), policy_tokens=3, turns=()
            )
            rows.append(Row('proposer', trajectory, 0.0, hops))
    return rows


def split(rows, count, seed=0):
    return split_minibatches(rows, count, identity_rng(seed), groups_span_prompts=True)


def test_every_minibatch_of_a_proposer_has_all_hop_counts():
    rows = rows_of_documents(64, 2)
    parts = split(rows, 4)
    assert [len(part) for part in parts] == [32] * 4
    for part in parts:
        assert {row.group for row in part} == {1, 2, 3, 4}
        assert min(np.unique([row.group for row in part], return_counts=True)[1]) >= 2
        documents = [row.trajectory.identity[1] for row in part]
        assert documents[0::2] == documents[1::2] == sorted(documents[0::2])
    assert sorted(map(id, sum(parts, []))) == sorted(map(id, rows))
    # Drawn by the seed.
    assert split(rows, 4) == parts != split(rows, 4, seed=1)


def test_few_prompts_leave_minibatches_empty():
    parts = split(rows_of_documents(2, 3), 4)
    assert sorted(map(len, parts)) == [0, 0, 3, 3]


@pytest.mark.parametrize(
    'baseline, changes, expected',
    [
        ('mean', {}, [0]),
        ('mean', {'kl_coef': 0.1}, [0, 1]),
        # More may have been expected than a reward of 0.
        ('value', {}, [0, 1]),
    ],
)
def test_rows_without_a_gradient_are_left_out(baseline, changes, expected):
    rows = rows_of_documents(3, 1)
    rows[0].advantage, rows[1].advantage, rows[2].advantage = 1.0, 0.0, 1.0
    rows[2].drop = 'ungraded'
    settings = dict(kl_coef=0.0, entropy_coef=0.0, baseline=baseline)
    computed = trained_rows(rows, types.SimpleNamespace(**settings | changes), 0.0)
    assert computed == [rows[index] for index in expected]
