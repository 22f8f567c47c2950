"""A run whose workdir is in a bucket: it works in a local folder, which is mirrored while the run goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator

from zeroplay_jax.learner.mirror import Mirror
from zeroplay_jax.learner.mirror_restore import bring_down
from zeroplay_jax.retrieval import objects
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.lease import Lease
from zeroplay_jax.runtime.remote_workdir import LEASE_FILE, RUN_FILE, RemoteWorkdir, spool
from zeroplay_jax.types import Preempted, TrainingStopped, UserError


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a run works. All processes must call the methods.

    Attributes:
      hosts: processes of the run.
      workdir: local folder.
      is_remote: whether the folder belongs to a workdir in a bucket.
      damage_lines: lines about damaged checkpoints of such a run; [] on all processes but the first.
      mirror: in the first process of such a run, uploads the folder; else None.
    """

    hosts: Hosts
    workdir: pathlib.Path
    is_remote: bool = False
    damage_lines: list[str] = dataclasses.field(default_factory=list)
    mirror: Mirror | None = None

    def raise_if_failed(self) -> None:
        """Raises UserError (one line) if uploads have failed for `config.bucket.seconds`."""
        self._call(Mirror.raise_if_failed)

    def wait(self) -> None:
        """Waits until the newest checkpoint is in the bucket; raises as `raise_if_failed`."""
        self._call(Mirror.wait)

    def upload_results(self) -> None:
        """Uploads everything that the run has written; raises as `raise_if_failed`."""
        self._call(_finish)

    def delete_policies(self) -> None:
        """Removes exported policies from the bucket; raises as `raise_if_failed`."""
        self._call(Mirror.delete_policies)

    def _call(self, method: Callable[[Mirror], None]) -> None:
        if not self.is_remote:
            return

        def call_in_first() -> None:
            if self.mirror is not None:
                method(self.mirror)

        self.hosts.run_on_all_and_gather(call_in_first)


def _finish(mirror: Mirror) -> None:
    mirror.wait()
    mirror.upload_results()


@contextlib.contextmanager
def opened(hosts: Hosts, workdir: str | pathlib.Path, config) -> Iterator[Place]:
    """Returns a context with the local folder of a run; a folder as it is.

    For a workdir in a bucket, the first process takes the lease, brings the newest checkpoint down and uploads until
    the context ends. If the run ends early by itself or by SIGTERM, the last checkpoint is uploaded before. All
    processes must call it, and see the local folder.

    Raises:
      UserError: one line; the bucket or the run in it cannot be used, or not all processes see the local folder.
      WorkdirError: another process has the lease.
    """
    if not objects.is_address(workdir):
        yield Place(hosts, pathlib.Path(workdir))
        return
    with contextlib.ExitStack() as stack:
        opened_place: list[Place] = []

        def open_in_first() -> str:
            if hosts.is_first:
                opened_place.append(stack.enter_context(_opened(hosts, str(workdir), config)))
                return str(opened_place[0].workdir)
            return ''

        folder = hosts.run_on_all_and_gather(open_in_first)[0]
        place = opened_place[0] if opened_place else Place(hosts, pathlib.Path(folder), True)
        _check_shared(hosts, place.workdir)
        try:
            yield place
        except (Preempted, TrainingStopped) as error:
            try:
                place.wait()
            except UserError as failure:
                # The status of the end is what a launch script looks at.
                error.args = (f'{error}. {failure}',)
            raise


@contextlib.contextmanager
def _opened(hosts: Hosts, address: str, config) -> Iterator[Place]:
    """Does the work of `opened` in the first process."""
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
            folder = spool(config.bucket.spool, run_id, remote.path)
            if stored_id is None:
                stack.callback(_remove_unless_begun, remote, folder, lease)
            manifests = remote.manifests()
            lines = bring_down(remote, folder, manifests)
        except RetrievalError as error:
            raise UserError(str(error)) from None
        mirror = Mirror(
            remote, folder, lease, manifests, config.checkpoint.keep, config.bucket.seconds
        )
        stack.callback(mirror.close)
        yield Place(hosts, folder, True, lines, mirror)


def _remove_unless_begun(remote: RemoteWorkdir, folder: pathlib.Path, lease: Lease) -> None:
    """Removes the id of a run that did not begin, so that the address is empty again."""
    if (folder / 'config.json').exists():
        return
    with contextlib.suppress(RetrievalError):
        if lease.renew():
            remote.bucket.delete(remote.name(RUN_FILE))


def _check_shared(hosts: Hosts, folder: pathlib.Path) -> None:
    """Raises UserError unless all processes see the local folder."""
    if hosts.count == 1:
        return
    mark = folder.parent / f'.seen_by_{hosts.count}'

    def write_mark() -> None:
        if hosts.is_first:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()

    def look() -> None:
        if not mark.exists():
            raise UserError(
                f'{folder}: is not seen by all hosts, and checkpoints of several hosts need one folder; give one of a '
                'file system that all of them mount with --config.bucket.spool=FOLDER'
            )

    hosts.run_on_all_and_gather(write_mark)
    try:
        hosts.run_on_all_and_gather(look)
    finally:
        if hosts.is_first:
            mark.unlink(missing_ok=True)
