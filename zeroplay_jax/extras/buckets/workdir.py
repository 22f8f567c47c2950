"""The workdir of a run in a bucket (gs://bucket/path): its objects, and local copies of them.

    id.json             id of the run; it names the local folder
    lease.json          the process that runs it (`lease`)
    run.json            record of the run
    checkpoints/8-1f…/  a checkpoint, file by file, as Orbax wrote it; best/… alike; 1f…: id of the lease
    logs/8-1f…/         the logs when checkpoint 8 was uploaded; objects cannot be appended to
    parts/00000003-1f…/ files of each process of a run of several (`mirror`), until the step is complete
    steps/00000008.json written last: all files of checkpoint 8 with sizes and SHA-256. Without it there is no step 8
    policy/…, summary.json, report.html    results, when the run has ended

Needs no JAX, so that a workdir of another run is refused before anything is loaded.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
import uuid
from collections.abc import Iterable
from typing import NamedTuple

from zeroplay_jax.extras.buckets import objects
from zeroplay_jax.extras.buckets.objects import Bucket, Conflict
from zeroplay_jax.retrieval import downloads, json_text
from zeroplay_jax.runtime import workdir as run_workdir
from zeroplay_jax.runtime.record import FILE_NAME, WorkdirError
from zeroplay_jax.types import Json

RUN_FILE = 'id.json'
LEASE_FILE = 'lease.json'
# Folders of a workdir: the last steps, and that of the best evaluation.
CHECKPOINT_FOLDERS = ('checkpoints', 'best')
_STEPS = 'steps/'


class RemoteFile(NamedTuple):
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


class RemoteWorkdir(NamedTuple):
    """A folder in a bucket; `path` has no slashes at its ends."""

    bucket: Bucket
    path: str

    @classmethod
    def open(cls, address: str) -> RemoteWorkdir:
        """Returns the folder at gs://bucket/path.

        Raises:
          RetrievalError: one line; the address has another form, or the bucket cannot be opened.
        """
        bucket, path = objects.split(address)
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
        try:
            # The id becomes the name of a folder.
            return uuid.UUID(json_text.parse_object(stored[0])['id']).hex
        except (ValueError, KeyError, AttributeError) as error:
            raise WorkdirError(
                f'{self.address}/{RUN_FILE}: cannot be read ({error}); choose another workdir'
            ) from None

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

    def manifest_name(self, step: int) -> str:
        """Returns the name of the object that makes a step complete."""
        return self.name(f'{_STEPS}{step:08d}.json')

    def manifests(self) -> dict[int, Manifest]:
        """Returns step → files of all complete steps, in ascending order. One that cannot be read does not count."""
        manifests: dict[int, Manifest] = {}
        for entry in self.bucket.list(self.name(_STEPS)):
            stored = self.bucket.read(entry.name)
            if stored is None:
                continue
            try:
                step, manifest = manifest_of(stored[0])
            except ValueError:
                continue
            if manifest is not None:
                manifests[step] = manifest
        return dict(sorted(manifests.items()))


def manifest_text(step: int, manifest: Manifest | None) -> bytes:
    """Returns the content of an object that lists the files of a step; None: a step that is not there."""
    return json.dumps({'step': step, 'files': manifest}, indent=1, sort_keys=True).encode()


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
      config, free: as in `runtime.workdir.check`.

    Raises:
      WorkdirError, UserError: one line; as `runtime.workdir.check`, or the bucket cannot be used.
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


def folders_of(paths: Iterable[str]) -> list[str]:
    """Returns the folders of checkpoints that files lie in, such as checkpoints/8, each once."""
    return list(dict.fromkeys('/'.join(path.split('/')[:2]) for path in paths))
