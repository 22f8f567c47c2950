"""A run whose workdir is in a bucket: it works in a local folder, which is mirrored while the run goes on.

Of a run of several processes each has a local folder of its own, and uploads the shards that it owns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import socket
import sys
import time
from collections.abc import Callable, Iterator

from zeroplay_jax.learner.mirror import SUFFIX_DIGITS, Mirror
from zeroplay_jax.learner.mirror_part import PartMirror
from zeroplay_jax.learner.mirror_restore import bring_down, bring_down_on_all, unwritable
from zeroplay_jax.retrieval import objects
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.runtime import workdir as run_workdir
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.lease import Lease
from zeroplay_jax.runtime.remote_parts import Parts
from zeroplay_jax.runtime.remote_workdir import (
    LEASE_FILE,
    RUN_FILE,
    Manifest,
    RemoteWorkdir,
    manifest_of,
    manifest_text,
    spool,
)
from zeroplay_jax.types import Preempted, TrainingStopped, UserError

# Between two looks whether everything is uploaded.
_WAIT_SECONDS = 0.1
# Between two looks whether a local folder is free.
_LOCK_SECONDS = 0.5
# In which a process ends after it has missed the heartbeat of process 0.
_STOP_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a run works. All processes must call the methods.

    Attributes:
      hosts: processes of the run.
      workdir: local folder.
      damage_lines: lines about damaged checkpoints of a run in a bucket; [] on all processes but the first.
      mirror: uploads the folder of a run in a bucket: all of it in the first process, and checkpoints only in the
        others; None for a workdir that is a folder.
    """

    hosts: Hosts
    workdir: pathlib.Path
    damage_lines: list[str] = dataclasses.field(default_factory=list)
    mirror: Mirror | PartMirror | None = None

    @property
    def is_remote(self) -> bool:
        """Whether the folder belongs to a workdir in a bucket."""
        return self.mirror is not None

    @property
    def is_shared(self) -> bool:
        """Whether all processes have the same folder."""
        return self.mirror is None or self.hosts.count == 1

    def raise_if_failed(self) -> None:
        """Raises UserError (one line) if uploads have failed for `config.bucket.seconds`."""
        if self.mirror is not None:
            self.hosts.run_on_all_and_gather(self.mirror.raise_if_failed)

    def wait(self) -> None:
        """Waits until the newest checkpoint is in the bucket; raises as `raise_if_failed`."""
        if self.mirror is None:
            return
        # Process 0 must not wait for one whose uploads have failed.
        while any(self.hosts.run_on_all_and_gather(self.mirror.is_pending)):
            time.sleep(_WAIT_SECONDS)

    def upload_results(self) -> None:
        """Uploads everything that the run has written; raises as `raise_if_failed`."""
        self.wait()
        self._call_in_first(Mirror.upload_results)

    def delete_policies(self) -> None:
        """Removes exported policies from the bucket; raises as `raise_if_failed`."""
        self._call_in_first(Mirror.delete_policies)

    def _call_in_first(self, method: Callable[[Mirror], None]) -> None:
        if self.mirror is None:
            return

        def call() -> None:
            if isinstance(self.mirror, Mirror):
                method(self.mirror)

        self.hosts.run_on_all_and_gather(call)


@contextlib.contextmanager
def opened(hosts: Hosts, workdir: str | pathlib.Path, config) -> Iterator[Place]:
    """Returns a context with the local folder of a run; a folder as it is.

    For a workdir in a bucket, the first process takes the lease, and all bring the newest checkpoint down and upload
    until the context ends. If the run ends early by itself or by SIGTERM, the last checkpoint is uploaded before. All
    processes must call it.

    Raises:
      UserError: one line; the bucket, the run in it or the local folder cannot be used.
      WorkdirError: another process has the lease, or a local folder for longer than processes of a killed run live.
    """
    if not objects.is_address(workdir):
        yield Place(hosts, pathlib.Path(workdir))
        return
    with contextlib.ExitStack() as stack:
        opened_runs: list[_Run] = []

        def open_in_first() -> _Shared | None:
            if not hosts.is_first:
                return None
            run = stack.enter_context(_opened(hosts, str(workdir), config))
            opened_runs.append(run)
            return run.shared()

        shared = hosts.run_on_all_and_gather(open_in_first)[0]
        run = opened_runs[0] if opened_runs else None
        folder = _folder(hosts, config, shared[0], str(workdir))
        # A process of a run whose first process was killed may still write its folder, which no lease protects.
        seconds = config.distributed.heartbeat + _STOP_SECONDS
        reserved = _reserved(folder, str(workdir), seconds)
        hosts.run_on_all_and_gather(lambda: stack.enter_context(reserved))
        if hosts.count == 1:
            assert run is not None
            place = _place_of_one(hosts, run, folder, config)
        else:
            place = _place_of_several(hosts, str(workdir), shared, run, folder, config)
        if place.mirror is not None:
            stack.callback(place.mirror.close)
        try:
            yield place
        except (Preempted, TrainingStopped) as error:
            try:
                place.wait()
            except UserError as failure:
                # The status of the end is what a launch script looks at.
                error.args = (f'{error}. {failure}',)
            raise


# Id of the run, digits of the id of the lease, and the complete steps in the bucket as text.
_Shared = tuple[str, str, list[str]]


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run in a bucket that the first process has opened.

    Attributes:
      remote: its workdir.
      run_id: its id.
      lease: of this process on the workdir.
      manifests: complete steps in the bucket.
    """

    remote: RemoteWorkdir
    run_id: str
    lease: Lease
    manifests: dict[int, Manifest]

    def shared(self) -> _Shared:
        """Returns what the other processes need."""
        texts = [manifest_text(step, files).decode() for step, files in self.manifests.items()]
        return self.run_id, self.lease.id[:SUFFIX_DIGITS], texts


@contextlib.contextmanager
def _opened(hosts: Hosts, address: str, config) -> Iterator[_Run]:
    """Takes the lease of a run in a bucket, in the first process; returns a context with the run.

    Raises:
      UserError, WorkdirError: as `opened`.
    """
    with contextlib.ExitStack() as stack:
        try:
            remote = RemoteWorkdir.open(address)
            # A folder of other objects is refused before a lease is written to it.
            remote.run_id()
            lease = Lease(remote.bucket, remote.name(LEASE_FILE))
            stack.callback(lease.release)
            # Read after the lease was taken, because its last holder wrote them, or removed the id of its run.
            stored_id = remote.run_id()
            run_id = stored_id or remote.create_run()
            if stored_id is None:
                folder = _folder(hosts, config, run_id, address)
                stack.callback(_remove_unless_begun, remote, folder, lease)
            manifests = remote.manifests()
        except RetrievalError as error:
            raise UserError(str(error)) from None
        yield _Run(remote, run_id, lease, manifests)


def _folder(hosts: Hosts, config, run_id: str, address: str) -> pathlib.Path:
    """Returns the local folder of this process."""
    process = hosts.index if hosts.count > 1 else None
    _, path = objects.split(address)
    return spool(config.bucket.spool, run_id, path, process)


@contextlib.contextmanager
def _reserved(folder: pathlib.Path, address: str, seconds: float) -> Iterator[None]:
    """Reserves the local folder of this process while the context is open.

    Args:
      folder: the folder.
      address: of the run.
      seconds: to wait for a process that has the folder.

    Raises:
      InUse: one line; the folder is still in use by another process.
      UserError: one line; the folder cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            # The lock lies beside the folder of the run, so that a run that does not begin leaves none.
            _enter_when_free(stack, folder.parent, address, seconds)
        except OSError as error:
            raise unwritable(folder, error) from None
        yield


def _enter_when_free(
    stack: contextlib.ExitStack, folder: pathlib.Path, address: str, seconds: float
) -> None:
    """Reserves a folder until the stack is closed; waits for another process that has it, with a line on stderr."""
    place = f'local folder {folder} on {socket.gethostname()}'
    deadline: float | None = None
    while True:
        try:
            stack.enter_context(run_workdir.locked(folder))
            return
        except run_workdir.InUse:
            pass
        now = time.monotonic()
        if deadline is None:
            print(
                f'waits up to {seconds:.0f} s for the process that has the {place}', file=sys.stderr
            )
            deadline = now + seconds
        if now >= deadline:
            raise run_workdir.InUse(
                f'{address}: another process has the {place}; end it, or wait until it has ended'
            )
        time.sleep(_LOCK_SECONDS)


def _place_of_one(hosts: Hosts, run: _Run, folder: pathlib.Path, config) -> Place:
    """Returns the place of a run of one process, with its newest checkpoint."""
    remote, manifests = run.remote, run.manifests
    try:
        lines = bring_down(remote, folder, manifests)
    except RetrievalError as error:
        raise UserError(str(error)) from None
    keep, seconds = config.checkpoint.keep, config.bucket.seconds
    mirror = Mirror(remote, folder, run.lease, manifests, keep, seconds)
    return Place(hosts, folder, lines, mirror)


def _place_of_several(
    hosts: Hosts,
    address: str,
    shared: _Shared,
    run: _Run | None,
    folder: pathlib.Path,
    config,
) -> Place:
    """Returns the place of this process of several, with the newest checkpoint.

    Args:
      hosts: processes of the run.
      address: of its workdir.
      shared: what the first process has found.
      run: the run, in the first process.
      folder: local folder of this process.
      config: of the run.
    """
    _, lease, texts = shared
    manifests: dict[int, Manifest] = {}
    for text in texts:
        step, files = manifest_of(text.encode())
        assert files is not None
        manifests[step] = files

    def open_on_each() -> RemoteWorkdir:
        try:
            return RemoteWorkdir.open(address)
        except RetrievalError as error:
            raise UserError(str(error)) from None

    remotes: list[RemoteWorkdir] = []
    # A host without credentials is an error in all processes.
    hosts.run_on_all_and_gather(lambda: remotes.append(open_on_each()))
    (remote,) = remotes
    lines = bring_down_on_all(hosts, remote, folder, manifests)
    parts = Parts(remote, lease, hosts.count)
    keep, seconds = config.checkpoint.keep, config.bucket.seconds
    if run is None:
        newest = max(manifests, default=-1)
        part_mirror = PartMirror(remote, folder, parts, hosts.index, newest, seconds)
        return Place(hosts, folder, mirror=part_mirror)
    mirror = Mirror(remote, folder, run.lease, manifests, keep, seconds, parts)
    return Place(hosts, folder, lines, mirror)


def _remove_unless_begun(remote: RemoteWorkdir, folder: pathlib.Path, lease: Lease) -> None:
    """Removes the id of a run that did not begin, so that the address is empty again."""
    if (folder / 'config.json').exists():
        return
    with contextlib.suppress(RetrievalError):
        if lease.renew():
            remote.bucket.delete(remote.name(RUN_FILE))
