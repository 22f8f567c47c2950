"""A bucket in memory with the preconditions of the service, which emulators ignore, and with errors on demand."""

import threading
import zlib

from zeroplay_jax.extras.buckets.objects import Conflict, Removed, StoredObject, Unavailable


class MemoryBucket:
    """Like `objects.Bucket`.

    Attributes:
      log: (method, name) of all writes in their order.
      failures: method → the next errors that it raises, of 'list', 'read', 'write', 'download' and 'delete'.
    """

    def __init__(self):
        self.name = 'bucket'
        self.contents = {}
        self.log = []
        self.failures = {}
        self._lock = threading.Lock()
        self._generation = 0

    def _fail(self, method):
        if self.failures.get(method):
            raise self.failures[method].pop(0)

    def list(self, prefix, limit=None):
        self._fail('list')
        with self._lock:
            found = sorted(item for item in self.contents.items() if item[0].startswith(prefix))
        return [
            StoredObject(name, len(content), str(zlib.crc32(content)))
            for name, (content, _) in found[:limit]
        ]

    def read(self, name):
        self._fail('read')
        return self.contents.get(name)

    def write(self, name, content, generation=None):
        self._fail('write')
        with self._lock:
            self._check(name, generation)
            self._generation += 1
            self.contents[name] = (content, self._generation)
            self.log.append(('write', name))
            return self._generation

    def _check(self, name, generation):
        _, stored = self.contents.get(name, (b'', 0))
        if generation is not None and stored != generation:
            raise Conflict(name)

    def upload(self, name, path):
        self.write(name, path.read_bytes())

    def download(self, name, path):
        self._fail('download')
        if name not in self.contents:
            raise Removed(name)
        path.write_bytes(self.contents[name][0])

    def delete(self, name, generation=None):
        self._fail('delete')
        with self._lock:
            self._check(name, generation)
            self.contents.pop(name, None)
            self.log.append(('delete', name))

    def damage(self, name):
        """Flips a bit in the middle of an object."""
        content, generation = self.contents[name]
        middle = len(content) // 2
        flipped = content[middle] ^ 1
        damaged = content[:middle] + bytes([flipped]) + content[middle + 1 :]
        self.contents[name] = (damaged, generation)


def outage(count):
    """Errors that pass."""
    return [Unavailable('gs://bucket/x: 503')] * count
