"""The workdir of a run in a bucket (gs://bucket/path): its objects, and the local folder in which the run works.

    id.json             id of the run; it names the local folder
    lease.json          the process that runs it (`lease`)
    run.json            record of the run
    checkpoints/8-1f…/  a checkpoint, file by file, as Orbax wrote it; best/… alike; 1f…: id of the lease
    logs/8-1f…/         the logs when checkpoint 8 was uploaded; objects cannot be appended to
    parts/00000003-1f…/ files of each process of a run of several (`training.mirror`), until the step is complete
    steps/00000008.json written last: all files of checkpoint 8 with sizes and SHA-256. Without it there is no step 8
    policy/…, summary.json, report.html    results, when the run has ended

Needs no JAX, so that a workdir of another run is refused before anything is loaded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import socket
import sys
import tempfile
import threading
import time
import uuid

from zeroplay_jax.retrieval import downloads, json_text, objects
from zeroplay_jax.retrieval.objects import Bucket, Conflict, StoredObject, Unavailable
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.runtime import workdir as run_workdir
from zeroplay_jax.runtime.record import FILE_NAME, WorkdirError
from zeroplay_jax.types import Json, UserError

RUN_FILE = 'id.json'
LEASE_FILE = 'lease.json'
# Folders of a workdir: the last steps, and that of the best evaluation.
CHECKPOINT_FOLDERS = ('checkpoints', 'best')
_STEPS = 'steps/'
# Attempts to read a run that removes its oldest checkpoint meanwhile.
_READS = 5
_NO_RUN = 'holds no run that has saved a step; check the address'


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file of a step.

    Attributes:
      object: name of its object in the workdir.
      size: bytes.
      sha256: of its content, in hexadecimal digits.
    """

    object: str
    size: int
    sha256: str


# Path of a file in a local workdir → its object.
Manifest = dict[str, RemoteFile]


@dataclasses.dataclass(frozen=True)
class RemoteWorkdir:
    """A folder in a bucket.

    Attributes:
      bucket: the bucket.
      path: of the folder, without slashes at its ends.
    """

    bucket: Bucket
    path: str

    @classmethod
    def open(cls, address: str) -> RemoteWorkdir:
        """Returns the folder at gs://bucket/path.

        Raises:
          RetrievalError: one line; the address has another form, or the bucket cannot be opened.
        """
        bucket, path = objects.split(address)
        if not path:
            raise RetrievalError(f'--workdir={address}: names a bucket; give gs://bucket/path')
        return cls(objects.open_bucket(bucket), path)

    @property
    def address(self) -> str:
        """The address."""
        return f'gs://{self.bucket.name}/{self.path}'

    def name(self, file: str) -> str:
        """Returns the name of an object of this folder."""
        return f'{self.path}/{file}'

    def run_id(self) -> str | None:
        """Returns the id of the run; None if there is no run.

        Raises:
          WorkdirError: the folder holds other objects.
        """
        stored = self.bucket.read(self.name(RUN_FILE))
        if stored is None:
            for entry in self.bucket.list(self.name(''), limit=2):
                # A process that takes the lease of an empty folder writes the id next.
                if entry.name != self.name(LEASE_FILE):
                    raise WorkdirError(
                        f'workdir {self.address} holds {entry.name!r} but no {RUN_FILE}; choose an empty one'
                    )
            return None
        content, _ = stored
        try:
            run_id = json_text.parse_object(content)['id']
            if not isinstance(run_id, str) or not run_id.replace('-', '').isalnum():
                raise ValueError('it has no id')
        except (ValueError, KeyError) as error:
            raise WorkdirError(
                f'{self.address}/{RUN_FILE}: cannot be read ({error}); choose another workdir'
            ) from None
        return run_id

    def create_run(self) -> str:
        """Writes the id of a new run and returns it; if another process was faster, returns its id."""
        content = json.dumps({'id': uuid.uuid4().hex}).encode()
        try:
            self.bucket.write(self.name(RUN_FILE), content, generation=0)
        # Or an earlier attempt of this very request had arrived.
        except Conflict:
            pass
        run_id = self.run_id()
        assert run_id is not None
        return run_id

    def write_manifest(self, step: int, manifest: Manifest) -> None:
        """Writes the object that makes a step complete."""
        self.bucket.write(self.name(_manifest_name(step)), manifest_text(step, manifest))

    def delete_manifest(self, step: int) -> None:
        """Removes the object that makes a step complete."""
        self.bucket.delete(self.name(_manifest_name(step)))

    def manifests(self) -> dict[int, Manifest]:
        """Returns step → files of all complete steps, in ascending order. One that cannot be read does not count."""
        manifests: dict[int, Manifest] = {}
        for entry in self.bucket.list(self.name(_STEPS)):
            stored = self.bucket.read(entry.name)
            if stored is None:
                continue
            content, _ = stored
            try:
                step, manifest = manifest_of(content)
            except ValueError:
                continue
            if manifest is not None:
                manifests[step] = manifest
        return dict(sorted(manifests.items()))


def manifest_text(step: int, manifest: Manifest | None) -> bytes:
    """Returns the content of an object that lists the files of a step; None: a step that is not there."""
    files = None
    if manifest is not None:
        files = {path: dataclasses.astuple(file) for path, file in sorted(manifest.items())}
    return json.dumps({'step': step, 'files': files}, indent=1).encode()


def manifest_of(content: bytes) -> tuple[int, Manifest | None]:
    """Returns step and files in the content of an object that `manifest_text` wrote.

    Raises:
      ValueError: it cannot be read.
    """
    try:
        fields = json_text.parse_object(content)
        step = int(fields['step'])
        if fields['files'] is None:
            return step, None
        return step, {path: RemoteFile(*file) for path, file in fields['files'].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from None


def checkpoint_files(manifest: Manifest) -> Manifest:
    """Returns the files of a manifest that belong to checkpoints."""
    return {
        path: file
        for path, file in manifest.items()
        if path.partition('/')[0] in CHECKPOINT_FOLDERS
    }


def checkpoint_folders(manifest: Manifest) -> dict[str, str]:
    """Returns the folders of checkpoints in a manifest, such as checkpoints/8, and those of their objects."""
    folders = {}
    for path, file in checkpoint_files(manifest).items():
        local_folder = '/'.join(path.split('/')[:2])
        folders[local_folder] = '/'.join(file.object.split('/')[:2])
    return folders


def _manifest_name(step: int) -> str:
    return f'{_STEPS}{step:08d}.json'


def spool(root: str, run_id: str, path: str, process: int | None = None) -> pathlib.Path:
    """Returns the local folder of a process of a run.

    Args:
      root: folder of all such folders; '': in the user's cache.
      run_id: id of the run. A run that was begun anew at an address has another one, and another folder.
      path: of the run in its bucket; its last part, the name of the run, is that of the folder as well.
      process: index of this process of several; None: there is one. Each has a folder of its own, also where they share
        a file system. That of process 0 is not that of a run of one process, which would take shards for a checkpoint.
    """
    parent = pathlib.Path(root) if root else downloads.cache_folder() / 'spool'
    folder = run_id if process is None else f'{run_id}.process_{process}'
    return parent.expanduser().absolute() / folder / path.rpartition('/')[2]


def check(address: str, root: str, config: Json, free: tuple[str, ...]) -> None:
    """Compares the config of the run at an address, if there is one, with `config`; writes nothing to the bucket.

    Args:
      address: gs://bucket/path.
      root: as in `spool`.
      config, free: as in `workdir.check`.

    Raises:
      WorkdirError, UserError: one line; as `workdir.check`, or the bucket cannot be used.
    """
    remote = RemoteWorkdir.open(address)
    run_id = remote.run_id()
    if run_id is None:
        return
    folder = spool(root, run_id, remote.path)
    stored = remote.bucket.read(remote.name(FILE_NAME))
    with tempfile.TemporaryDirectory() as copy:
        if stored is not None:
            # Not in the local folder of the run, which another process may use.
            folder = pathlib.Path(copy)
            (folder / FILE_NAME).write_bytes(stored[0])
        try:
            run_workdir.check(folder, config, free)
        except WorkdirError as error:
            # The user knows the address only.
            raise WorkdirError(str(error).replace(str(folder), address)) from None


class StepRemoved(UserError):
    """The run has removed the step that is to be copied."""


def newest_step(address: str) -> int:
    """Returns the number of the newest complete step of a run in a bucket.

    Args:
      address: of the workdir of a run, or of its folder 'best'.

    Raises:
      UserError: one line; there is no run that has saved a step, or it cannot be read.
    """
    run, _ = _run_and_folder(address)
    manifests = RemoteWorkdir.open(run).manifests()
    if not manifests:
        raise UserError(f'{run}: {_NO_RUN}')
    return max(manifests)


def local_run(
    workdir: str | pathlib.Path, checkpoints: str = '', step: int | None = None
) -> pathlib.Path:
    """Returns the local copy of a run in a bucket, brought up to date, to be read only; a path as it is.

    The copy has logs, records and results, but policies only if the run has ended.

    Args:
      workdir: gs://bucket/path, or a path.
      checkpoints: 'checkpoints' brings the newest checkpoint as well, 'best' that of the best evaluation.
      step: number of the step in the bucket that is copied; None: the newest one.

    Raises:
      StepRemoved: there is no such step.
      UserError: one line; there is no run, or it cannot be read.
    """
    if not objects.is_address(workdir):
        return pathlib.Path(workdir)
    remote = RemoteWorkdir.open(str(workdir))
    for _ in range(_READS):
        stored = {entry.name: entry for entry in remote.bucket.list(remote.name(''))}
        manifests = remote.manifests()
        chosen = max(manifests, default=None) if step is None else step
        if chosen is None and remote.name(FILE_NAME) not in stored:
            raise UserError(f'{workdir}: {_NO_RUN}')
        if step is not None and step not in manifests:
            raise StepRemoved(f'{workdir}: step {step} was removed; run the command again')
        manifest = manifests[chosen] if chosen is not None else {}
        try:
            return _copy(remote, manifest, stored, checkpoints)
        # The run has uploaded a newer step and removed this one.
        except (objects.Removed, KeyError):
            continue
    raise UserError(f'{workdir}: changes faster than it is read; run the command again')


def local_source(workdir: str, step: int | None = None) -> str:
    """Returns the value of --from with a run in a bucket replaced by its local copy.

    Args:
      workdir: workdir of a run, or its folder 'best'.
      step: as in `local_run`.

    Raises:
      StepRemoved, UserError: as `local_run`.
    """
    if not objects.is_address(workdir):
        return workdir
    run, folder = _run_and_folder(workdir)
    if folder:
        return str(local_run(run, folder, step) / folder)
    return str(local_run(run, 'checkpoints', step))


def _run_and_folder(address: str) -> tuple[str, str]:
    """Returns the address of a run, and 'best' if `address` names this folder of it, else ''."""
    run, _, folder = address.rstrip('/').rpartition('/')
    return (run, folder) if folder == 'best' else (address, '')


def _copy(
    remote: RemoteWorkdir,
    manifest: Manifest,
    stored: dict[str, StoredObject],
    checkpoints: str,
) -> pathlib.Path:
    """Brings the files of a run down; returns their folder.

    Raises:
      objects.Removed, KeyError: an object was removed meanwhile.
    """
    copies = {}
    for path, file in manifest.items():
        is_checkpoint = path.partition('/')[0] in CHECKPOINT_FOLDERS
        if is_checkpoint and not (checkpoints and path.startswith(f'{checkpoints}/')):
            continue
        copies[remote.name(path)] = stored[remote.name(file.object)]
    for name, entry in stored.items():
        # Results and records have no folder; neither have the two objects of the run itself, which no command reads.
        is_result = '/' not in name.removeprefix(remote.name(''))
        if is_result:
            copies[name] = entry
    # Without checkpoints, those of an earlier copy stay.
    cleaned = remote.name(checkpoints or RUN_FILE)
    root = downloads.update(remote.bucket, copies, remote.address, cleaned)
    return root / remote.path


# ---- lease -----------------------------------------------------------------------------------------
#
# A lease on a folder in a bucket: an object that says which process writes there, in place of a lock of a file system.
#
# The object is created only if it does not exist, and every renewal names the generation that it replaces. Whoever
# finds a lease takes it over when it was not renewed for `SECONDS`, measured by its own clock, so that clocks need not
# agree.


# A lease that was not renewed for this long is free.
SECONDS = 60.0
_RENEWALS_PER_LEASE = 4
# They stand in the names of objects, too.
_ID_DIGITS = 8
_LOOKS_PER_LEASE = 30


class Lease:
    """The lease of this process on a folder of a bucket, renewed by a thread until it is released.

    Attributes:
      id: hexadecimal digits that no other lease of the folder has.
      lost: a line about the process that took the lease, or why it cannot be renewed; '' while this process has it.
    """

    def __init__(self, bucket: Bucket, name: str, seconds: float = SECONDS):
        """Takes the lease; waits if another process has left one.

        Args:
          bucket: the bucket.
          name: of the object.
          seconds: after which a lease that is not renewed is free.

        Raises:
          WorkdirError: another process renews the lease.
          RetrievalError: the bucket cannot be used.
        """
        self.id = uuid.uuid4().hex[:_ID_DIGITS]
        self.lost = ''
        self._bucket = bucket
        self._name = name
        self._place = f'gs://{bucket.name}/{name}'
        self._seconds = seconds
        holder = {
            'host': socket.gethostname(),
            'machine': _machine(),
            'process': os.getpid(),
            # Distinguishes two leases of one process.
            'id': self.id,
        }
        self._content = json.dumps(holder).encode()
        self._generation = self._take()
        self._lock = threading.Lock()
        self._is_released = threading.Event()
        self._thread = threading.Thread(target=self._keep, name='lease', daemon=True)
        self._thread.start()

    def renew(self) -> bool:
        """Renews the lease; returns whether this process has it still.

        Raises:
          Unavailable: the bucket did not answer.
        """
        with self._lock:
            if self.lost or self._is_released.is_set():
                return False
            try:
                self._generation = self._bucket.write(self._name, self._content, self._generation)
            except Conflict:
                self._check_holder()
            return not self.lost

    def release(self) -> None:
        """Removes the object, if it is still that of this process, so that the next process need not wait."""
        self._is_released.set()
        self._thread.join()
        with self._lock:
            if self.lost:
                return
            try:
                self._bucket.delete(self._name, self._generation)
            # The lease expires by itself.
            except (Conflict, RetrievalError):
                pass

    def _check_holder(self) -> None:
        """Called after a conflict: sets `lost`, unless the renewal before had arrived though it seemed to fail."""
        stored = self._bucket.read(self._name)
        holder = 'somebody who removed it'
        if stored is not None:
            content, generation = stored
            if content == self._content:
                self._generation = generation
                return
            holder = _holder(content)
        self.lost = f'{self._place}: the lease of this run was taken by {holder}'

    def _keep(self) -> None:
        """Renews the lease until it is released or lost."""
        while not self._is_released.wait(self._seconds / _RENEWALS_PER_LEASE):
            try:
                if not self.renew():
                    return
            # An outage shorter than the lease does no harm; after a longer one the next renewal says who has it.
            except Unavailable:
                continue
            # Rights or credentials that were taken away do not come back by themselves.
            except RetrievalError as error:
                self.lost = str(error)
                return

    def _take(self) -> int:
        """Returns the generation of the object that this process wrote."""
        expected = 0
        while True:
            try:
                return self._bucket.write(self._name, self._content, expected)
            except Conflict:
                expected = self._wait_until_free()

    def _wait_until_free(self) -> int:
        """Waits until the lease of another process is free; returns the generation to replace, 0 for none."""
        stored = self._bucket.read(self._name)
        if stored is None:
            return 0
        content, generation = stored
        in_use = WorkdirError(
            f'{self._place}: the run is in use by {_holder(content)}; wait for it or choose another workdir. If that '
            f'process is gone for sure: gcloud storage rm {self._place}'
        )
        if _has_ended_here(content):
            return generation
        print(
            f'waits up to {self._seconds:.0f} s for the lease of {_holder(content)} on {self._place}',
            file=sys.stderr,
        )
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            time.sleep(self._seconds / _LOOKS_PER_LEASE)
            stored = self._bucket.read(self._name)
            if stored is None:
                return 0
            _, present_generation = stored
            if present_generation != generation:
                raise in_use
        return generation


def _machine() -> str:
    """Returns an id of this machine since it was started, and of the processes seen here; '' if it has none."""
    try:
        boot = pathlib.Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()
        # Containers have the boot id of their machine, and may have its name, but count their own processes.
        return f'{boot} {os.readlink("/proc/self/ns/pid")}'
    except OSError:
        return ''


def _read(content: bytes) -> Json:
    """Returns the fields of a lease; {} if it cannot be read."""
    try:
        return json_text.parse_object(content)
    except ValueError:
        return {}


def _holder(content: bytes) -> str:
    """Returns the process in a lease in words."""
    fields = _read(content)
    return f'process {fields.get("process", "?")} on {fields.get("host", "an unknown host")}'


def _has_ended_here(content: bytes) -> bool:
    """Returns whether the process in a lease ran on this machine and is gone; False if that is unknown."""
    fields = _read(content)
    process = fields.get('process')
    is_same_machine = fields.get('host') == socket.gethostname() and fields.get('machine')
    if not is_same_machine or fields['machine'] != _machine() or not isinstance(process, int):
        return False
    # Under its own number, this process finds a lease that an earlier one has left.
    return process == os.getpid() or not pathlib.Path(f'/proc/{process}').exists()
