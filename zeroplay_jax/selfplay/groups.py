"""Groups of rollouts: their rewards become advantages, and the dynamic filter selects the groups that teach."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from zeroplay_jax.objectives import advantages
from zeroplay_jax.objectives.advantages import RewardTable
from zeroplay_jax.objectives.losses import resolve_loss
from zeroplay_jax.objectives.types import Stats
from zeroplay_jax.selfplay.rows import from_bytes, to_bytes
from zeroplay_jax.selfplay.task_log import filtered_groups_log
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import Json, Row, UserError


def set_advantages(rows: Sequence[Row], settings: Any) -> Stats:
    """Sets `Row.advantage` from rewards by the function `settings.advantage`; returns statistics as (sum, count).

    Args:
      rows: all rows of one role in a step, dropped ones included; those get advantage 0.
      settings: `config.<role>`. With baseline 'value' the advantage is what the rollout earns, from which a value
        network computes those of the tokens (`ValueNetwork.estimate`).

    Raises:
      UserError: the function returns something else than advantages, or they are per turn and the loss has a ratio
        per rollout, or the turns of a row do not hold all sampled tokens.
    """
    values, stats = _advantages(rows, settings)
    # Dropped rows keep their place, so that values and rows stay aligned.
    for row, value in zip(rows, values):
        if row.drop is not None:
            row.advantage = 0.0
        elif values.ndim == 1:
            row.advantage = float(value)
        else:
            _check_turns(row, settings.advantage)
            row.advantage = value[: len(row.trajectory.turns)].copy()
    if settings.baseline == 'value':
        # Groups mean nothing to a value network.
        return {name: stats[name] for name in ('invalid_rows', 'nonfinite_rows')}
    return stats


def _check_turns(row: Row, advantage: str) -> None:
    """Raises UserError unless every sampled token is in a turn, which gives it its advantage."""
    trajectory = row.trajectory
    in_turns = sum(turn.stop - turn.start for turn in trajectory.turns)
    if in_turns != trajectory.policy_tokens:
        raise UserError(
            f'advantage {advantage!r}: it is per turn, and {in_turns} of the {trajectory.policy_tokens} sampled tokens '
            f'of rollout {trajectory.identity} are in its turns; record context, start and stop of every Turn'
        )


def _advantages(rows: Sequence[Row], settings: Any) -> tuple[np.ndarray, Stats]:
    """Returns what the function of the role says; UserError if it does not go with the loss, or is no advantage."""
    try:
        values, stats = advantages.evaluate(settings.advantage, reward_table(rows), settings)
    except advantages.AdvantageError as error:
        raise UserError(str(error)) from error
    if values.ndim == 2 and not resolve_loss(settings.loss).ratio_per_token:
        raise UserError(
            f'advantage {settings.advantage!r}: gives one advantage per turn, and {settings.loss} has one ratio per '
            'rollout; take token_pg'
        )
    return values, stats


def reward_table(rows: Sequence[Row]) -> RewardTable:
    """Returns what rows earned by turn; a row whose turns are not recorded has one, with all its tokens."""
    tokens_of_row = []
    for row in rows:
        tokens = [turn.stop - turn.start for turn in row.trajectory.turns]
        is_recorded = sum(tokens) == row.trajectory.policy_tokens
        tokens_of_row.append(tokens if is_recorded else [row.trajectory.policy_tokens])
    shape = (len(rows), max(map(len, tokens_of_row), default=0))
    table = RewardTable(
        # float64, because a length factor makes the rewards of a group differ by little, and advantages are divided by
        # their deviation.
        reward=np.array([row.reward for row in rows], np.float64),
        turn_reward=np.full(shape, np.nan),
        turn_mask=np.zeros(shape, bool),
        tokens=np.zeros(shape, np.int64),
        group=np.array([row.group for row in rows], np.int64),
        valid=np.array([row.drop is None for row in rows], bool),
    )
    for index, (row, tokens) in enumerate(zip(rows, tokens_of_row, strict=True)):
        turns = slice(len(tokens))
        table.turn_mask[index, turns] = True
        table.tokens[index, turns] = tokens
        if row.turn_rewards is not None and len(row.turn_rewards) == len(tokens):
            table.turn_reward[index, turns] = row.turn_rewards
    return table


class GroupFilter:
    """Fills batches with groups that have reward variance (DSPO eq. 9, DAPO); carries surplus over to the next step."""

    def __init__(self, config: Config):
        self._config = config
        # Role → rows of the groups beyond a full batch, which the next `select` takes first.
        self._carried_over: dict[str, list[Row]] = {}

    def missing_groups(self, role: str, rows: Sequence[Row]) -> int:
        """Returns how many groups the role's batch lacks, given all rows of the step so far."""
        settings = self._config[role]
        usable = list(self._carried_over.get(role, []))
        for row in rows:
            if row.role == role and row.drop is None:
                usable.append(row)
        # If the filter is off, a group counts as soon as it has one valid row, whatever its rewards.
        if settings.filter_groups:
            groups = set(_informative_groups(usable, settings))
        else:
            groups = {row.group for row in usable}
        return max(settings.batch - len(groups), 0)

    def select(
        self, role: str, rows: Sequence[Row], version: int
    ) -> tuple[list[Row], Stats, list[Json]]:
        """Selects the rows of the first `batch` groups with reward variance, in the order in which tasks were issued.

        Uses up the groups carried over for the role. With `config.<role>.surplus='carry'` it keeps the surplus of
        this step for the next one.

        Args:
          rows: all rows of the role in this step.
          version: version of the role's weights, from which the age of carried-over rollouts is computed.

        Returns:
          rows of the selected groups, dropped ones included; statistics; task-log records of the excluded groups.
        """
        settings = self._config[role]
        # Carried-over groups come first: they are the oldest, and the policy moves away from them with
        # every step.
        candidates = [*self._carried_over.pop(role, []), *rows]
        # The order is that of the tasks. In the order of completion short rollouts would be preferred.
        groups = _informative_groups(candidates, settings)
        batch_groups = set(groups[: settings.batch])
        surplus_groups = set(groups[settings.batch :])
        carries_surplus = settings.surplus == 'carry'
        trained: list[Row] = []
        surplus: list[Row] = []
        excluded_rows: list[Row] = []
        # Dropped rows stay with their group, because `set_advantages` checks the size of groups.
        for row in candidates:
            if row.group in batch_groups:
                trained.append(row)
            elif row.group in surplus_groups and carries_surplus:
                surplus.append(row)
            else:
                excluded_rows.append(row)
        if surplus:
            self._carried_over[role] = surplus
        excluded = filtered_groups_log(excluded_rows, surplus_groups)
        # Ages are numbers of versions that were published since, and measure how off-policy the batch is.
        ages = [version - row.trajectory.version for row in trained]
        all_groups = {row.group for row in candidates}
        # 'kept': share of groups with reward variance; near 0, questions are too easy or too hard. 'full' below 1:
        # `fill_rounds` rounds did not fill the batch.
        stats: Stats = {
            'filter/kept': (len(groups), len(all_groups)),
            'filter/surplus': (len(surplus_groups), 1),
            'filter/full': (len(batch_groups), settings.batch),
            'filter/age': (sum(ages), len(ages)),
        }
        return trained, stats, excluded

    def discard_carried_over(self) -> list[Row]:
        """Forgets the carried-over rows of all roles and returns them for the log; called at the start of a phase."""
        # The new phase trains another role or other questions, so older rollouts would be far off-policy.
        rows: list[Row] = []
        for surplus in self._carried_over.values():
            rows += surplus
        self._carried_over = {}
        return rows

    def carry_over_again(self, rows: Sequence[Row]) -> None:
        """Takes back the rows that `discard_carried_over` returned, because the phase did not begin after all."""
        for row in rows:
            self._carried_over.setdefault(row.role, []).append(row)

    def state(self) -> Json:
        """Returns the carried-over rows by role, for a checkpoint: bytes (`rows.to_bytes`) as text in base64."""
        return {
            role: base64.b64encode(to_bytes(rows)).decode()
            for role, rows in self._carried_over.items()
        }

    def restore(self, state: Json) -> None:
        """Inverse of `state`.

        Raises:
          UserError: one line; the rows of a role are damaged, or another version saved them.
        """
        self._carried_over = {}
        for role, text in state.items():
            try:
                self._carried_over[role] = from_bytes(base64.b64decode(text))
            except ValueError as error:
                raise UserError(
                    f'checkpoint: the rows that role {role} carried over cannot be read ({error}); resume with the '
                    'version that saved them, or begin a new run with the weights of this one (--from)'
                ) from error


def _informative_groups(rows: Sequence[Row], settings: Any) -> list[int]:
    """Returns the keys of the groups that teach, each once, in row order.

    Rewards of undropped rows differ, or with `<role>.advantage` other than 'group' some advantage is not 0.
    """
    if settings.advantage == 'group' or settings.baseline == 'value':
        table = reward_table(rows)
        is_informative = advantages.informative_groups(table.reward, table.group, table.valid)
    else:
        values, _ = _advantages(rows, settings)
        is_informative = np.any(values.reshape(len(rows), -1), axis=1)
    # The keys of a dict keep the order of the rows; those of a set would not.
    keys: dict[int, None] = {}
    for row, informative in zip(rows, is_informative, strict=True):
        if informative:
            keys[row.group] = None
    return list(keys)
