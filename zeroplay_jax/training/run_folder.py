"""The workdir of a run of several processes: the first one locks it, writes its config and removes outdated files."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
from collections.abc import Callable, Iterator

from zeroplay_jax.configuration import resumption
from zeroplay_jax.runtime import workdir as run_workdir
from zeroplay_jax.runtime.hosts import Hosts

# File that holds the number of steps after which the last report was written.
REPORTED_FILE = '.reported'


@contextlib.contextmanager
def claimed(hosts: Hosts, workdir: pathlib.Path, config) -> Iterator[Callable[[], None]]:
    """Locks the workdir and compares its config.json with `config`, on the first process; errors are raised on all.

    The lock is released when the context ends.

    Yields:
      A function that writes config.json; on the other processes it does nothing.
    """
    # run_on_all_and_gather shares errors, so the lock is taken inside it; the ExitStack holds it until this context
    # ends. `writers` passes the function out of the call; it is empty on the other processes.
    with contextlib.ExitStack() as stack:
        writers: list[Callable[[], None]] = []

        def claim_locally() -> None:
            if hosts.is_first:
                claim = run_workdir.claim(
                    workdir,
                    config.to_dict(),
                    resumption.changeable_fields(config),
                    resumption.defaults(config),
                )
                writers.append(stack.enter_context(claim))

        hosts.run_on_all_and_gather(claim_locally)
        yield writers[0] if writers else _write_nothing


def _write_nothing() -> None:
    """Does nothing: only the first process writes the config."""


def is_reported(hosts: Hosts, workdir: pathlib.Path, cursor: int) -> bool:
    """Returns whether the report of a run that stopped before step `cursor` was written; equal on all processes."""
    path = workdir / REPORTED_FILE
    # errors='replace': damage to this file must not end the run.
    is_written = path.is_file() and path.read_text('utf-8', 'replace').strip() == str(cursor)
    # The first process decides: only its folder has the reports.
    return hosts.gather(is_written)[0]


def remove_exports(hosts: Hosts, workdir: pathlib.Path) -> None:
    """Removes the exported weights of a run that stopped and now continues: they will be outdated."""
    if hosts.is_first:
        shutil.rmtree(workdir / 'policy', ignore_errors=True)
