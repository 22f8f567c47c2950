"""The dynamic filter: batches of groups with reward variance only (DSPO eq. 9, DAPO)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zeroplay_jax.objectives import advantages
from zeroplay_jax.selfplay.row_metrics import Stats
from zeroplay_jax.selfplay.serialization import row_from_json, row_to_json
from zeroplay_jax.selfplay.task_log import filtered_groups_log
from zeroplay_jax.types import Json, Row


class GroupFilter:
    """Selects groups with reward variance and carries surplus groups over to the next step."""

    def __init__(self, config):
        self._config = config
        # By role: groups beyond a full batch.
        self._carried_over: dict[str, list[Row]] = {}

    def missing_groups(self, role: str, rows: Sequence[Row]) -> int:
        """Groups that the role's batch lacks, given the rows of the step so far."""
        settings = self._config[role]
        usable = [*self._carried_over.get(role, [])]
        usable += [row for row in rows if row.role == role and row.drop is None]
        if settings.filter_groups:
            informative = _has_reward_variance(usable)
            usable = [row for row, keep in zip(usable, informative) if keep]
        groups = {row.group for row in usable}
        return max(settings.batch - len(groups), 0)

    def select(
        self, role: str, rows: Sequence[Row], version: int
    ) -> tuple[list[Row], Stats, list[Json]]:
        """The first `batch` groups with reward variance, in the order of issue.

        Args:
          version: of the role's weights, for the age of carried-over rollouts.

        Returns:
          rows to train on; statistics; task-log records of the excluded groups.
        """
        settings = self._config[role]
        candidates = [*self._carried_over.pop(role, []), *rows]
        informative = _has_reward_variance(candidates)
        # Order of issue, not of completion: otherwise short rollouts would be preferred.
        groups = list(
            dict.fromkeys(row.group for row, keep in zip(candidates, informative) if keep)
        )
        batch_groups = set(groups[: settings.batch])
        surplus_groups = set(groups[settings.batch :])
        excluded_rows = [row for row in candidates if row.group not in batch_groups]
        if settings.surplus == 'carry' and surplus_groups:
            surplus = [row for row in candidates if row.group in surplus_groups]
            self._carried_over[role] = surplus
            excluded_rows = [row for row in excluded_rows if row.group not in surplus_groups]
        excluded = filtered_groups_log(excluded_rows, surplus_groups)
        trained = [row for row in candidates if row.group in batch_groups]
        ages = [version - row.trajectory.version for row in trained]
        all_groups = {row.group for row in candidates}
        stats: Stats = {
            'filter/kept': (len(groups), len(all_groups)),
            'filter/surplus': (len(surplus_groups), 1),
            'filter/full': (len(batch_groups), settings.batch),
            'filter/age': (sum(ages), len(ages)),
        }
        return trained, stats, excluded

    def discard_carried_over(self) -> list[Row]:
        """Forgets all surplus, at the start of a phase; returns it for the log."""
        rows = [row for surplus in self._carried_over.values() for row in surplus]
        self._carried_over = {}
        return rows

    def state(self) -> Json:
        """For a checkpoint."""
        return {
            role: [row_to_json(row) for row in rows] for role, rows in self._carried_over.items()
        }

    def restore(self, state: Json) -> None:
        """Inverse of `state`."""
        self._carried_over = {
            role: [row_from_json(row) for row in rows] for role, rows in state.items()
        }


def _has_reward_variance(rows: Sequence[Row]) -> np.ndarray:
    """bool [B]: rows of groups whose rewards differ."""
    return advantages.informative_groups(
        np.array([row.reward for row in rows], np.float64),
        np.array([row.group for row in rows], np.int64),
        np.array([row.drop is None for row in rows], bool),
    )
