"""A bucket in a folder, which several processes see."""

import hashlib
import os
import pathlib
import shutil
import urllib.parse
import zlib

from zeroplay_jax.retrieval.objects import Conflict, Removed, StoredObject


class FolderBucket:
    """Like `objects.Bucket`; an object is a file, whose name is that of the object without slashes."""

    def __init__(self, folder):
        self.name = 'bucket'
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, name):
        return self.folder / urllib.parse.quote(name, safe='')

    def list(self, prefix, limit=None):
        names = sorted(urllib.parse.unquote(path.name) for path in self.folder.iterdir())
        names = [name for name in names if name.startswith(prefix) and '~' not in name]
        found = [(name, self.read(name)) for name in names[:limit]]
        return [
            StoredObject(name, len(object[0]), str(zlib.crc32(object[0])))
            for name, object in found
            if object
        ]

    def read(self, name):
        try:
            content = self.path(name).read_bytes()
        except FileNotFoundError:
            return None
        return content, int.from_bytes(hashlib.sha256(content).digest()[:6])

    def write(self, name, content, generation=None):
        found = self.read(name)
        if generation is not None and (found[1] if found else 0) != generation:
            raise Conflict(name)
        draft = self.path(f'{name}~{os.getpid()}')
        draft.write_bytes(content)
        os.replace(draft, self.path(name))
        return self.read(name)[1]

    def upload(self, name, path):
        self.write(name, path.read_bytes())

    def download(self, name, path):
        try:
            shutil.copyfile(self.path(name), path)
        except FileNotFoundError:
            raise Removed(name) from None

    def delete(self, name, generation=None):
        found = self.read(name)
        if generation is not None and found and found[1] != generation:
            raise Conflict(name)
        self.path(name).unlink(missing_ok=True)
