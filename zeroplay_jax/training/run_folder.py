"""The workdir of a run of several processes: the first one locks it, writes its config and identity, and removes
outdated files."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

from zeroplay_jax.configuration import fields
from zeroplay_jax.learner.checkpoint import FOLDER, saved_steps
from zeroplay_jax.runtime import identity
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
    # run_on_first shares errors, so the lock is taken inside it; the ExitStack holds it until this context
    # ends. `writers` passes the function out of the call; it is empty on the other processes.
    with contextlib.ExitStack() as stack:
        writers: list[Callable[[], None]] = []

        def claim_locally() -> None:
            claim = run_workdir.claim(
                workdir,
                config.to_dict(),
                fields.changeable_fields(config),
                fields.defaults(config),
            )
            writers.append(stack.enter_context(claim))

        hosts.run_on_first(claim_locally)
        yield writers[0] if writers else _write_nothing


def _write_nothing() -> None:
    """Does nothing: only the first process writes the config."""


def check_identity(hosts: Hosts, workdir: pathlib.Path, config, inputs: dict[str, Any]) -> None:
    """Compares the identities of a resumed run with its config and inputs, on the first process.

    All processes must call it, when damaged checkpoints were set aside. A warning says that the newest checkpoint, of
    an earlier version, has none.

    Args:
      inputs: as `input_record.check` returned them.

    Raises:
      UserError: one line; a checkpoint or identity.json is of another run.
    """

    def check_locally() -> None:
        current = _identity_of(config, inputs)
        there = identity.read(workdir)
        identity.check_current(workdir / identity.FILE_NAME, there, current)
        steps = [workdir / FOLDER / str(step) for step in saved_steps(workdir / FOLDER)]
        for step in steps:
            identity.check_current(step, identity.check_checkpoint(step, workdir), current)
        if identity.of_checkpoint(steps[-1]) is None:
            print(
                f'warning: {steps[-1]}: an earlier version saved it without saying of which run it is; it is taken as '
                'one of this config',
                file=sys.stderr,
            )

    hosts.run_on_first(check_locally)


def record_identity(
    hosts: Hosts, workdir: pathlib.Path, config, inputs: dict[str, Any], is_resumed: bool
) -> identity.Identity:
    """Writes identity.json of a new run; returns the identity of the run, equal on all processes.

    All processes must call it. A resumed run keeps its identity; one of an earlier version gets one.

    Args:
      inputs: content of inputs.json, on the first process.
      is_resumed: whether the run has a checkpoint.
    """

    def record_locally() -> identity.Identity:
        recorded = None
        if is_resumed:
            newest = saved_steps(workdir / FOLDER)[-1]
            recorded = identity.of_checkpoint(workdir / FOLDER / str(newest))
            recorded = recorded or identity.read(workdir)
        current = recorded or _identity_of(config, inputs)
        identity.write(workdir, current)
        return current

    return hosts.run_on_first(record_locally)


def _identity_of(config, inputs: dict[str, Any]) -> identity.Identity:
    changeable = fields.changeable_fields(config)
    return identity.identity_of(config.to_dict(), changeable, inputs)


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
