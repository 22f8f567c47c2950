"""An emulator of Google Cloud Storage, for tests of commands that use a bucket."""

import contextlib
import importlib.util

import pytest
from host_processes import free_port

from zeroplay_jax.extras.buckets import objects


def _is_missing(name):
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:
        return True


_MISSING = list(filter(_is_missing, ('google.cloud.storage', 'gcp_storage_emulator')))
needs_emulator = pytest.mark.skipif(
    bool(_MISSING), reason=f'not installed: {", ".join(_MISSING)} (requirements-test.txt)'
)


@contextlib.contextmanager
def run_emulator(monkeypatch):
    """Runs the emulator while the context is open, also for commands that are started; yields its empty bucket."""
    from gcp_storage_emulator.server import create_server

    port = free_port()
    server = create_server('localhost', port, in_memory=True, default_bucket='bucket')
    server.start()
    # Its thread is no daemon: pytest would wait for it at the end.
    try:
        monkeypatch.setenv('STORAGE_EMULATOR_HOST', f'http://localhost:{port}')
        yield objects.open_bucket('bucket')
    finally:
        server.stop()
