"""A bucket in a folder, which several processes see."""

import collections.abc
import hashlib
import os
import pathlib
import urllib.parse

from memory_bucket import MemoryBucket


class FolderContents(collections.abc.MutableMapping):
    """Name of an object → (content, generation); a file has the name of its object without slashes."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def _path(self, name):
        return self.folder / urllib.parse.quote(name, safe='')

    def __iter__(self):
        names = (urllib.parse.unquote(path.name) for path in self.folder.iterdir())
        return (name for name in names if '~' not in name)

    def __len__(self):
        return len(list(self))

    def __getitem__(self, name):
        try:
            content = self._path(name).read_bytes()
        except FileNotFoundError:
            raise KeyError(name) from None
        return content, int.from_bytes(hashlib.sha256(content).digest()[:6])

    def __setitem__(self, name, entry):
        draft = self._path(f'{name}~{os.getpid()}')
        draft.write_bytes(entry[0])
        os.replace(draft, self._path(name))

    def __delitem__(self, name):
        self._path(name).unlink(missing_ok=True)


class FolderBucket(MemoryBucket):
    """Like `objects.Bucket`."""

    def __init__(self, folder):
        super().__init__()
        self.contents = FolderContents(folder)
