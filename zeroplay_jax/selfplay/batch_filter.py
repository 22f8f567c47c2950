"""The dynamic filter: fills batches with groups that have reward variance (DSPO eq. 9, DAPO)."""

from __future__ import annotations

from collections.abc import Sequence

from zeroplay_jax.objectives import advantages
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.selfplay.row_exchange import collect_records
from zeroplay_jax.selfplay.row_metrics import Stats, reward_columns
from zeroplay_jax.selfplay.serialization import row_from_json, row_to_json
from zeroplay_jax.selfplay.task_log import filtered_groups_log
from zeroplay_jax.types import Json, Row


class GroupFilter:
    """Selects groups with reward variance and carries surplus groups over to the next step."""

    def __init__(self, config, hosts: Hosts):
        self._config = config
        self._hosts = hosts
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
            groups = set(_informative_groups(usable))
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
        groups = _informative_groups(candidates)
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
        """Returns the carried-over rows by role as JSON, for a checkpoint, which process 0 writes.

        All processes must call it; the others get no rows.
        """
        records = {}
        for role, rows in self._carried_over.items():
            records[role] = collect_records(self._hosts, rows, row_to_json)
        return records

    def restore(self, state: Json) -> None:
        """Inverse of `state`."""
        self._carried_over = {}
        for role, records in state.items():
            self._carried_over[role] = [row_from_json(record) for record in records]


def _informative_groups(rows: Sequence[Row]) -> list[int]:
    """Returns the keys of the groups in which the rewards of undropped rows differ, each once, in row order."""
    rewards, groups, valid = reward_columns(rows)
    is_informative = advantages.informative_groups(rewards, groups, valid)
    # The keys of a dict keep the order of the rows; those of a set would not.
    keys: dict[int, None] = {}
    for row, informative in zip(rows, is_informative, strict=True):
        if informative:
            keys[row.group] = None
    return list(keys)
