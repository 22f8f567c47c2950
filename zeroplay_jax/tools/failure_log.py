"""A log of failed calls that a broken tool cannot flood."""

from __future__ import annotations

import logging
import threading


class FailureLog:
    """Logs the first failed call of a tool or judge, and again whenever the number of failed calls has doubled.

    A broken tool fails in every rollout, thousands of times per step with the same cause. Safe to
    use from several threads.

    Args:
      caller: begins every line, such as 'tool search'.
    """

    def __init__(self, caller: str):
        self._caller = caller
        self._lock = threading.Lock()
        self._count = 0
        self._next_logged = 1
        self._failed_before_run = 0

    def take_failed_before_run(self) -> int:
        """Returns how many calls failed before they were run since this method was last called."""
        with self._lock:
            count = self._failed_before_run
            self._failed_before_run = 0
        return count

    def add(self, cause: str, before_run: bool = False) -> None:
        """Counts one failed call; logs it if it is the first, or if the number has doubled since the last line.

        Args:
          cause: reason of the failure.
          before_run: whether the call failed while its arguments were checked, so that `Tool.run` never got it.
        """
        with self._lock:
            self._failed_before_run += before_run
            self._count += 1
            count = self._count
            if count < self._next_logged:
                return
            self._next_logged = 2 * count
        if count == 1:
            logging.warning('%s: a call failed: %s', self._caller, cause)
        else:
            # The cause is logged again, because it may differ from that of the first failure.
            logging.warning('%s: %d calls failed, the last: %s', self._caller, count, cause)
