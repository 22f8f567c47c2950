"""A lease on a folder in a bucket: an object that says which process writes there, in place of a lock of a file system.

The object is created only if it does not exist, and every renewal names the generation that it replaces. Whoever finds
a lease takes it over when it was not renewed for `SECONDS`, measured by its own clock, so that clocks need not agree.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import sys
import threading
import time
import uuid

from zeroplay_jax.extras.buckets.objects import Bucket, Conflict, Unavailable
from zeroplay_jax.retrieval import json_text
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.runtime.record import WorkdirError
from zeroplay_jax.types import Json

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
        # The id distinguishes two leases of one process.
        holder = {**_this_process(), 'id': self.id}
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
        # Otherwise the lease expires by itself.
        with self._lock, contextlib.suppress(Conflict, RetrievalError):
            if not self.lost:
                self._bucket.delete(self._name, self._generation)

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
            if stored[1] != generation:
                raise WorkdirError(
                    f'{self._place}: the run is in use by {_holder(content)}; wait for it or choose another workdir. '
                    f'If that process is gone for sure: gcloud storage rm {self._place}'
                )
        return generation


def _this_process() -> Json:
    """Returns what a lease says about its holder."""
    return {'host': socket.gethostname(), 'machine': _machine(), 'process': os.getpid()}


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
    fields, here = _read(content), _this_process()
    is_same_machine = all(fields.get(name) == here[name] for name in ('host', 'machine'))
    process = fields.get('process')
    if not here['machine'] or not is_same_machine or not isinstance(process, int):
        return False
    # Under its own number, this process finds a lease that an earlier one has left.
    return process == os.getpid() or not pathlib.Path(f'/proc/{process}').exists()
