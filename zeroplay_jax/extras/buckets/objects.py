"""Objects in a bucket of Google Cloud Storage: gs://bucket/path.

`Bucket` is all that the rest of the project knows of the service; tests have one in memory. The client library is
imported when a bucket is opened (pip install google-cloud-storage). It finds its credentials by itself, and
STORAGE_EMULATOR_HOST points it to an emulator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from zeroplay_jax.retrieval.types import RetrievalError, first_line

# Name of a bucket, then the path.
_ADDRESS = re.compile(r'gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])(?:/(.*))?')
# Seconds that the library spends on a request, further attempts included. Callers that must not fail try again.
_REQUEST_SECONDS = 60.0
# Of the local disk.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Unavailable(RetrievalError):
    """The service did not answer, or not with what was asked for; a later attempt may succeed."""


class Removed(RetrievalError):
    """There is no such object any more."""


class Conflict(RuntimeError):
    """An object was not written or deleted, because another writer changed it before."""


@dataclasses.dataclass(frozen=True)
class StoredObject:
    """An object as a bucket lists it.

    Attributes:
      name: its path in the bucket.
      size: bytes.
      checksum: CRC-32C of its content, as the service writes it.
    """

    name: str
    size: int
    checksum: str


def split(address: str) -> tuple[str, str]:
    """Returns (bucket, path) of an address; the path has no slash at its ends.

    Raises:
      RetrievalError: one line; the address has another form.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise RetrievalError(
            f'{address}: not an address in a bucket, whose name has at least three characters: lower-case letters, '
            'digits, ., _ and -; give gs://bucket/path'
        )
    path = (match[2] or '').strip('/')
    if not path:
        raise RetrievalError(f'{address}: names a bucket; give gs://bucket/path')
    # They would leave the folder that a local copy lies in.
    if any(part in ('', '.', '..') for part in path.split('/')):
        raise RetrievalError(f'{address}: has an empty part; give gs://bucket/path')
    return match[1], path


def open_bucket(name: str) -> Bucket:
    """Returns a bucket; nothing is asked over the network.

    Raises:
      RetrievalError: one line; the library is missing, or there are no credentials.
    """
    try:
        from google.cloud import storage
    except ImportError:
        raise RetrievalError(
            f'gs://{name}: buckets need a library; install it with pip install google-cloud-storage'
        ) from None
    with _translated(f'gs://{name}'):
        # Objects need no project, and credentials of a user may name none.
        return Bucket(storage.Client(project=None), name)


class Bucket:
    """Reads and writes the objects of a bucket, which appear whole or not at all. Safe to call from several threads.

    All methods raise `Unavailable` for errors that may pass, and RetrievalError for those that will not.
    """

    def __init__(self, client: Any, name: str):
        """Takes a client of Google's library."""
        self.name = name
        self._client = client
        self._bucket = client.bucket(name)

    @functools.cached_property
    def _options(self) -> dict[str, Any]:
        from google.cloud.storage.retry import DEFAULT_RETRY

        # All requests of this module may be repeated: writes are whole, or have a precondition.
        return {'timeout': _REQUEST_SECONDS, 'retry': DEFAULT_RETRY.with_timeout(_REQUEST_SECONDS)}

    def list(self, prefix: str, limit: int | None = None) -> list[StoredObject]:
        """Returns the objects whose names begin with a text, in alphabetical order.

        Args:
          prefix: the text.
          limit: number of objects that are enough; None: all.
        """
        with self._translated(prefix):
            blobs = self._client.list_blobs(
                self._bucket, prefix=prefix, max_results=limit, **self._options
            )
            return [StoredObject(blob.name, blob.size or 0, blob.crc32c or '') for blob in blobs]

    def read(self, name: str) -> tuple[bytes, int] | None:
        """Returns content and generation of an object, a number that every write changes; None if there is none."""
        with contextlib.suppress(Removed), self._translated(name):
            # Asked for before the content: if the object is replaced in between, a write with this generation fails.
            blob = self._bucket.get_blob(name, **self._options)
            if blob is not None:
                generation = blob.generation
                return blob.download_as_bytes(checksum='crc32c', **self._options), generation
        return None

    def write(self, name: str, content: bytes, generation: int | None = None) -> int:
        """Writes an object and returns its generation.

        Args:
          name: of the object.
          content: its bytes.
          generation: the object is written only if it has this generation still; 0: only if it does not exist. None: in
            any case.

        Raises:
          Conflict: the object has another generation.
        """
        with self._translated(name):
            blob = self._bucket.blob(name)
            blob.upload_from_string(
                content,
                'application/octet-stream',
                if_generation_match=generation,
                checksum='crc32c',
                **self._options,
            )
            return blob.generation or 0

    def upload(self, name: str, path: pathlib.Path) -> None:
        """Writes an object with the content of a file."""
        with self._translated(name):
            blob = self._bucket.blob(name)
            blob.upload_from_filename(str(path), checksum='crc32c', **self._options)

    def download(self, name: str, path: pathlib.Path) -> None:
        """Writes the content of an object to a file, and compares its checksum.

        Raises:
          Removed: there is no such object.
        """
        with self._translated(name):
            blob = self._bucket.blob(name)
            blob.download_to_filename(str(path), checksum='crc32c', **self._options)

    def delete(self, name: str, generation: int | None = None) -> None:
        """Removes an object, if it exists.

        Args:
          name: of the object.
          generation: as in `write`.

        Raises:
          Conflict: the object has another generation.
        """
        with contextlib.suppress(Removed), self._translated(name):
            blob = self._bucket.blob(name)
            blob.delete(if_generation_match=generation, **self._options)

    def _translated(self, name: str) -> contextlib.AbstractContextManager[None]:
        return _translated(f'gs://{self.name}/{name}')


@contextlib.contextmanager
def _translated(place: str) -> Iterator[None]:
    """Turns the exceptions of the library into those of this module.

    Args:
      place: address, for the message.
    """
    from google.api_core import exceptions
    from google.auth import exceptions as auth

    try:
        yield
    except RetrievalError:
        raise
    except exceptions.PreconditionFailed as error:
        raise Conflict(f'{place}: {first_line(error)}') from None
    except (auth.GoogleAuthError, exceptions.Unauthorized) as error:
        # A failed renewal of a token may pass.
        if getattr(error, 'retryable', False):
            raise Unavailable(f'{place}: {first_line(error)}') from None
        raise RetrievalError(
            f'{place}: no valid credentials ({first_line(error)}); run gcloud auth application-default login, or give '
            'the machine a service account'
        ) from None
    except exceptions.Forbidden as error:
        raise RetrievalError(
            f'{place}: not allowed ({first_line(error)}); grant the account the role Storage Object Admin on the '
            'bucket'
        ) from None
    except (exceptions.NotFound, exceptions.BadRequest) as error:
        is_bucket = 'bucket' in str(error).lower().split()
        if isinstance(error, exceptions.NotFound) and not is_bucket:
            raise Removed(f'{place}: was removed meanwhile; run the command again') from None
        raise RetrievalError(
            f'{place}: {first_line(error)}; create the bucket, or give another address'
        ) from None
    # Connections, time limits, checksums and answers that cannot be read have many types. A full disk is none of them.
    except Exception as error:
        if isinstance(error, OSError) and (
            error.filename is not None or error.errno in _DISK_ERRORS
        ):
            raise
        raise Unavailable(f'{place}: {first_line(error)}') from None
