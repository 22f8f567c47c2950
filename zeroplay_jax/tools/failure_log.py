"""A log of failed calls that a broken tool cannot flood."""

from __future__ import annotations

import logging
import threading


class FailureLog:
    """Logs the first failed call of a tool, and again whenever the number of failed calls has doubled.

    A broken tool fails in every rollout, thousands of times per step with the same cause. Safe to
    use from several threads.

    Args:
      tool: name of the tool.
    """

    def __init__(self, tool: str):
        self._tool = tool
        self._lock = threading.Lock()
        self._count = 0
        self._next_logged = 1

    def add(self, cause: str) -> None:
        """Counts one failed call; logs it if it is the first, or if the number has doubled since the last line."""
        with self._lock:
            self._count += 1
            count = self._count
            if count < self._next_logged:
                return
            self._next_logged = 2 * count
        if count == 1:
            logging.warning('tool %s: a call failed: %s', self._tool, cause)
        else:
            # The cause is logged again, because it may differ from that of the first failure.
            logging.warning('tool %s: %d calls failed, the last: %s', self._tool, count, cause)
