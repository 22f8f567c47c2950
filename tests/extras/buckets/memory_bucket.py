"""A bucket in memory with the preconditions of the service, which emulators ignore, and with errors on demand."""

import threading
import zlib

from zeroplay_jax.extras.buckets.objects import Conflict, Removed, StoredObject, Unavailable


class MemoryBucket:
    """Like `objects.Bucket`.

    Attributes:
      log: (method, name) of all writes in their order.
      errors: the next ones that writes raise.
      failures: method → the next errors that it raises, of 'list', 'read', 'download' and 'delete'.
    """

    def __init__(self, name='bucket'):
        self.name = name
        self.contents = {}
        self.log = []
        self.errors = []
        self.failures = {}
        self._lock = threading.Lock()
        self._generation = 0

    def _fail(self, method):
        if self.failures.get(method):
            raise self.failures[method].pop(0)

    def list(self, prefix, limit=None):
        self._fail('list')
        with self._lock:
            names = sorted(name for name in self.contents if name.startswith(prefix))
            entries = [(name, self.contents.get(name)) for name in names[:limit]]
        return [
            StoredObject(name, len(entry[0]), str(zlib.crc32(entry[0])))
            for name, entry in entries
            if entry is not None
        ]

    def read(self, name):
        self._fail('read')
        with self._lock:
            return self.contents.get(name)

    def write(self, name, content, generation=None):
        with self._lock:
            if self.errors:
                raise self.errors.pop(0)
            if generation is not None and self._generation_of(name) != generation:
                raise Conflict(name)
            self._generation += 1
            self.contents[name] = (content, self._generation)
            self.log.append(('write', name))
            return self._generation_of(name)

    def _generation_of(self, name):
        return self.contents.get(name, (b'', 0))[1]

    def upload(self, name, path):
        self.write(name, path.read_bytes())

    def download(self, name, path):
        self._fail('download')
        found = self.contents.get(name)
        if found is None:
            raise Removed(name)
        path.write_bytes(found[0])

    def delete(self, name, generation=None):
        self._fail('delete')
        with self._lock:
            if generation is not None and self._generation_of(name) != generation:
                raise Conflict(name)
            self.contents.pop(name, None)
            self.log.append(('delete', name))

    def damage(self, name):
        """Flips a bit in the middle of an object."""
        content = bytearray(self.contents[name][0])
        content[len(content) // 2] ^= 1
        self.contents[name] = (bytes(content), self.contents[name][1])


def outage(count):
    """Errors that pass."""
    return [Unavailable('gs://bucket/x: 503')] * count
