"""Rewards and advantages per turn, from the rows of a recipe to the tokens of a micro-batch."""

import dataclasses
import functools
import types

import numpy as np
import pytest

from zeroplay_jax.configs import common
from zeroplay_jax.selfplay.collection import Collector
from zeroplay_jax.selfplay.context import Episodes
from zeroplay_jax.selfplay.groups import _informative_groups, reward_table, set_advantages
from zeroplay_jax.selfplay.metrics import invalid_reason
from zeroplay_jax.selfplay.records import teaches
from zeroplay_jax.selfplay.rows import from_bytes, to_bytes
from zeroplay_jax.selfplay.schedule import Phase, Step
from zeroplay_jax.selfplay.update import micro_batches
from zeroplay_jax.settings.rollouts import Rollout
from zeroplay_jax.types import ENV, POLICY, PROMPT, Row, Trajectory, Turn, UserError

NONE = float('nan')


def settings(**changes):
    role = common.get_config().solver
    fields = dict(advantage='turn', baseline='loo', scale='none', loss='token_pg')
    role.update(fields | changes)
    return role


def context_of(*lengths):
    """A prompt of three tokens, then turns of these lengths with a result of two tokens between them."""
    source = [PROMPT] * 3
    turns = []
    for length in lengths:
        if turns:
            source += [ENV] * 2
        turns.append((len(source), len(source) + length))
        source += [POLICY] * length
    tokens = np.arange(len(source), dtype=np.int32)
    source = np.array(source, np.int8)
    logp = np.where(source == POLICY, np.float32(-1), np.float32(0))
    return Trajectory(tokens, source, logp, (), 'answer', 'w', 0, (0, 0)), turns


def rollout(*contexts):
    """A rollout with these contexts, each the lengths of its turns."""
    parts, turns = [], []
    for number, lengths in enumerate(contexts):
        trajectory, spans = context_of(*lengths)
        parts.append(trajectory)
        turns += [Turn('t', None, True, number, start, stop) for start, stop in spans]
    return dataclasses.replace(parts[-1], earlier=tuple(parts[:-1]), turns=tuple(turns))


def make_rows():
    """Two groups: one of three rows, of which one is dropped, and one of a rollout with thoughts dropped."""
    return [
        Row('solver', rollout((2, 1, 3)), 1.0, 5, turn_rewards=np.array([0.5, NONE, 0.25])),
        Row('solver', rollout((4,)), 0.0, 5, turn_rewards=np.array([0.125])),
        Row('solver', rollout((1, 1)), 0.0, 5, turn_rewards=np.array([9.0, 9.0]), drop='ungraded'),
        Row('solver', rollout((1, 2), (3,)), 0.0, -1, turn_rewards=np.array([NONE, 2.0, 1.0])),
        Row('solver', rollout((2, 2)), 1.0, -1),
    ]


# Returns from each turn on minus those of the other row of the group.
EXPECTED = [[1.625, 1.25, 1.25], [-1.625], None, [2.0, 2.0, 0.0], [-2.0, -2.0]]


def test_turns_have_the_advantages_of_what_follows_them():
    rows = make_rows()
    stats = set_advantages(rows, settings())
    for row, expected in zip(rows, EXPECTED, strict=True):
        if expected is None:
            assert row.advantage == 0.0 and not row.is_informative
        else:
            assert row.advantage.tolist() == expected and row.is_informative
    assert stats['group_size'] == (4.0, 2.0) and stats['invalid_rows'] == (1.0, 5.0)
    assert teaches(rows, settings(), 0.0) and not teaches(rows[2:3], settings(), 0.0)
    # Rows wait for their batch as bytes.
    for row, same in zip(rows, from_bytes(to_bytes(rows)), strict=True):
        np.testing.assert_array_equal(row.advantage, same.advantage)
        np.testing.assert_array_equal(row.turn_rewards, same.turn_rewards)


def test_the_filter_keeps_groups_that_differ_in_their_turns_alone():
    given = (4, [0.5, 0.0]), (4, [0.0, 0.5]), (5, [0.5, 0.0]), (5, [0.5, 0.0])
    rows = [
        Row('solver', rollout((2, 1)), 1.0, group, turn_rewards=np.array(rewards))
        for group, rewards in given
    ]
    assert _informative_groups(rows, settings()) == [4]
    assert _informative_groups(rows, settings(advantage='group')) == []


def token_advantages(rows, shape, **changes):
    """rollout and context → advantages of the sampled tokens, and the sum of all weights."""
    batches = micro_batches(rows, settings(**changes), shape)
    kept = [np.concatenate([getattr(batch, name) for batch in batches]) for name in FIELDS]
    advantage, mask, segment, weight = kept
    assert not advantage[~mask & (segment == 0)].any()
    packed = []
    for row in range(len(segment)):
        for number in range(1, segment[row].max(initial=0) + 1):
            packed.append(advantage[row][(segment[row] == number) & mask[row]].tolist())
    return packed, weight.sum()


FIELDS = ('advantage', 'mask', 'segment', 'weight')


@pytest.mark.parametrize('shape', [(1, 13), (2, 26), (1, 64)])
def test_sampled_tokens_have_the_advantage_of_their_turn_however_they_are_packed(shape):
    rows = make_rows()
    set_advantages(rows, settings())
    expected = [
        [1.625] * 2 + [1.25] * 4,
        [-1.625] * 4,
        # The first context of the rollout, and the second.
        [2.0] * 3,
        [0.0] * 3,
        [-2.0] * 4,
    ]
    packed, weight = token_advantages(rows, shape)
    assert sorted(packed) == sorted(expected) and weight == pytest.approx(1)


def test_a_ratio_per_rollout_is_refused_with_advantages_per_turn():
    with pytest.raises(UserError, match='one advantage per turn, and sequence_pg has one ratio'):
        set_advantages(make_rows(), settings(loss='sequence_pg'))


def test_a_row_without_recorded_turns_is_one_turn_of_the_table_and_has_no_advantage_per_turn():
    bare = dataclasses.replace(rollout((2, 1)), turns=(Turn('t'), Turn('u')))
    rows = [*make_rows(), Row('solver', bare, 1.0, 5)]
    assert reward_table(rows).tokens[-1].tolist() == [3, 0, 0]
    with pytest.raises(UserError, match=r'0 of the 3 sampled tokens of rollout \(0, 0\) are'):
        set_advantages(rows, settings())


def test_with_a_value_network_advantages_are_the_returns_of_turns():
    rows = make_rows()
    stats = set_advantages(rows, settings(baseline='value', scale='batch'))
    assert rows[0].advantage.tolist() == [1.75, 1.25, 1.25]
    assert rows[3].advantage.tolist() == [3.0, 3.0, 1.0]
    assert set(stats) == {'invalid_rows', 'nonfinite_rows'}
    # A reward of 0 is informative, and stays in the batch.
    rows[3].advantage[:] = 0
    packed, _ = token_advantages(rows, (1, 13), baseline='value')
    assert [0.0] * 3 in packed


def test_an_infinite_turn_reward_is_as_bad_as_an_infinite_reward():
    good, bad = make_rows()[:2]
    bad.turn_rewards[0] = np.inf
    assert invalid_reason(good, Rollout()) is None
    assert invalid_reason(bad, Rollout()) == 'nonfinite_reward'


def test_a_recipe_gives_one_turn_reward_per_turn():
    collector = types.SimpleNamespace(config=types.SimpleNamespace(recipe='their.recipe'))
    check = functools.partial(
        Collector._check_row, collector, Episodes(), Step(Phase('proposer', 1), 0, 0)
    )
    row = make_rows()[0]
    row.turn_rewards = [1, None, True]
    check(row)
    np.testing.assert_array_equal(row.turn_rewards, [1.0, NONE, 1.0])
    row.turn_rewards = [1.0]
    with pytest.raises(UserError, match=r'their.recipe: .* turn_rewards \[1\.\] for 3 turns'):
        check(row)
