"""Tries an advantage on rewards drawn at random: what a group is computed with must not change its advantages.

All processes of a run compute the advantages of all rows of a step, before these are divided into minibatches, packed
and cut into micro-batches. So a function that reads a table alone cannot depend on that. What stands in the table
beside a group depends on the batch and on the rounds of its tasks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from zeroplay_jax.objectives.advantages import AdvantageError, RewardTable, evaluate

_GROUPS, _SAMPLES, _TURNS = 6, 4, 5
_BESIDE = 'with other groups in the batch'
# Sums of another order differ by less: of the value, and of the largest one.
_RELATIVE, _OF_LARGEST = 1e-6, 1e-9


def check_advantage(name: str, settings: Any) -> bool:
    """Compares the advantages of a table with those of the same rows in other tables.

    Args:
      name: 'package.module:function'.
      settings: `config.<role>`, with which it will be called.

    Returns:
      Whether they are per turn.

    Raises:
      AdvantageError: they differ, or the function raises an error; the message is one line.
    """
    table = _draw(np.random.default_rng(0))
    expected = _values(name, table, settings)
    other_order = np.random.default_rng(1).permutation(len(table.reward))
    permuted = np.empty_like(expected)
    permuted[other_order] = _values(name, _rows(table, other_order), settings)
    alone = np.empty_like(expected)
    for group in np.unique(table.group):
        rows = np.flatnonzero(table.group == group)
        alone[rows] = _values(name, _rows(table, rows), settings)
    padded = _values(name, _padded(table), settings)
    if expected.ndim == 2:
        padded = padded[:, :_TURNS]
    renumbered = dataclasses.replace(table, group=table.group * 7 - 3)
    others_dropped = dataclasses.replace(table, reward=np.where(table.valid, table.reward, np.nan))
    cases = {
        'when it is called again': _values(name, table, settings),
        'with the order of the rows': permuted,
        _BESIDE: alone,
        'with empty turns behind the last ones': padded,
        'with the numbers that groups have': _values(name, renumbered, settings),
        'with the rewards of rows that are dropped (valid is False)': _values(
            name, others_dropped, settings
        ),
    }
    used = table.valid if expected.ndim == 1 else table.turn_mask & table.valid[:, None]
    tolerance = _OF_LARGEST * np.abs(expected[used]).max(initial=0.0)
    for case, values in cases.items():
        if not np.allclose(values[used], expected[used], _RELATIVE, tolerance):
            fix = 'compute it from the valid rows of the same group alone'
            if case == _BESIDE:
                # The filter asks which groups teach before the batch is complete.
                fix += ', or whiten it in a loss with batch_means (objectives/README.md)'
            raise AdvantageError(f'advantage {name!r}: an advantage changes {case}; {fix}')
    return expected.ndim == 2


def _draw(rng: np.random.Generator) -> RewardTable:
    """Returns groups of rows with different numbers of turns; some turns have no reward, some rows are dropped."""
    rows = _GROUPS * _SAMPLES
    turns = rng.integers(1, _TURNS + 1, rows)
    # One row has every turn.
    turns[0] = _TURNS
    turn_mask = np.arange(_TURNS) < turns[:, None]
    has_reward = turn_mask & (rng.random(turn_mask.shape) < 0.7)
    valid = rng.random(rows) < 0.9
    return RewardTable(
        reward=rng.normal(size=rows),
        turn_reward=np.where(has_reward, rng.normal(size=turn_mask.shape), np.nan),
        turn_mask=turn_mask,
        tokens=np.where(turn_mask, rng.integers(1, 50, turn_mask.shape), 0),
        group=rng.permutation(np.repeat(np.arange(_GROUPS), _SAMPLES)),
        valid=valid,
    )


def _rows(table: RewardTable, rows: np.ndarray) -> RewardTable:
    """Returns the table of some rows, in this order."""
    return RewardTable(**{name: array[rows] for name, array in vars(table).items()})


def _padded(table: RewardTable) -> RewardTable:
    """Returns the table with a further turn that no row has."""
    absent = ((0, 0), (0, 1))
    return dataclasses.replace(
        table,
        turn_reward=np.pad(table.turn_reward, absent, constant_values=np.nan),
        turn_mask=np.pad(table.turn_mask, absent),
        tokens=np.pad(table.tokens, absent),
    )


def _values(name: str, table: RewardTable, settings: Any) -> np.ndarray:
    """Returns the advantages of a table, of which the function cannot change an array."""
    arrays = {field: array.copy() for field, array in vars(table).items()}
    for array in arrays.values():
        array.flags.writeable = False
    try:
        values, _ = evaluate(name, RewardTable(**arrays), settings)
    except AdvantageError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines() or ['']
        raise AdvantageError(
            f'advantage {name!r}: raised {type(error).__name__}: {reason[0]}; correct it there'
        ) from error
    return values
