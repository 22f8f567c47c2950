"""Policies, indexes and files in a bucket: what is copied, and what is refused in one line."""

import errno
import pathlib

import pytest
from host_processes import free_port
from refused_calls import refused
from run_records import write_record

from zeroplay_jax.configs import quickstart
from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.configuration.fields import read_stored_config
from zeroplay_jax.configuration.places import fetch
from zeroplay_jax.extras.buckets import objects
from zeroplay_jax.retrieval import downloads
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.settings.kinds import ConfigError

pytestmark = pytest.mark.usefixtures('cache')


def test_a_folder_is_copied_once_and_again_where_it_changed(bucket, cache):
    for name, content in (('p/a.json', b'1'), ('p/b/c.bin', b'22'), ('p/', b''), ('pq/d', b'3')):
        bucket.write(name, content)
    copied = []
    download = bucket.download
    bucket.download = lambda name, path: (copied.append(name), download(name, path))
    folder = pathlib.Path(downloads.fetch('gs://bucket/p/'))
    assert folder == cache / 'gs' / 'bucket' / 'p' and (folder / 'a.json').read_bytes() == b'1'
    assert sorted(copied) == ['p/a.json', 'p/b/c.bin']
    copied.clear()
    bucket.write('p/a.json', b'4')
    bucket.delete('p/b/c.bin')
    downloads.fetch('gs://bucket/p')
    assert copied == ['p/a.json']
    assert [path.name for path in folder.rglob('*') if path.is_file()] == ['a.json']
    # A copy that somebody shortened is replaced.
    (folder / 'a.json').write_bytes(b'')
    assert pathlib.Path(downloads.fetch('gs://bucket/p/a.json')).read_bytes() == b'4'


NOT_FETCHED = {
    'gs://bucket/none': 'no such file or folder in the bucket',
    'gs://bucket': 'names a bucket',
    'gs://B/x': 'not an address in a bucket',
    'gs://b/r': 'whose name has at least three characters',
    'gs://bucket/../x': 'has an empty part',
}


@pytest.mark.parametrize('address', NOT_FETCHED)
def test_what_cannot_be_fetched_is_one_line(bucket, address):
    assert NOT_FETCHED[address] in refused(downloads.fetch, address, error=RetrievalError)


def test_fields_of_a_config_are_fetched_before_the_rules_about_files(bucket):
    config = quickstart.get_config()
    config.retrieval.update(kind='http', path='gs://bucket/index')
    config.eval.file = 'gs://bucket/q.jsonl'
    with pytest.raises(ConfigError, match='config.*gs://bucket/.*: no such file or folder'):
        rules.check(config)
    bucket.write('index/manifest.json', b'{}')
    bucket.write('q.jsonl', b'{"question": "who?", "reply": "x"}\n')
    with pytest.raises(ConfigError, match='config.eval.file: .*q.jsonl, line 1'):
        rules.check(config)
    assert pathlib.Path(config.retrieval.path, 'manifest.json').is_file()


def test_the_same_command_resumes_where_the_cache_lies_elsewhere(bucket, tmp_path, monkeypatch):
    bucket.write('index/manifest.json', b'{}')

    def config_of(cache):
        monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / cache))
        config = quickstart.get_config()
        config.retrieval.update(kind='folder', path='gs://bucket/index')
        config.eval.hops = (2, 3)
        fetch(config)
        assert config.retrieval.path.startswith(str(tmp_path / cache))
        return config

    write_record(tmp_path / 'run', config_of('one'))
    fields.check(tmp_path / 'run', config_of('two'))
    # Commands that read the run fetch the index for themselves.
    stored = read_stored_config(tmp_path / 'run')
    assert stored.retrieval.path == 'gs://bucket/index' and stored.eval.hops == (2, 3)
    stored.policy.path = 'gs://bucket/none'
    fetch(stored, section_name='retrieval')
    assert stored.retrieval.path == f'{tmp_path}/two/zeroplay_jax/gs/bucket/index'


def test_a_full_disk_is_no_error_of_the_network():
    pytest.importorskip('google.api_core')
    with pytest.raises(OSError) as error, objects._translated('gs://b/x'):
        with open('/dev/full', 'wb', buffering=0) as file:
            file.write(b'x')
    assert error.value.errno == errno.ENOSPC


def test_the_library_does_what_the_interface_says(emulator, tmp_path, monkeypatch):
    assert emulator.read('a/x') is None
    generation = emulator.write('a/x', b'one')
    assert emulator.read('a/x') == (b'one', generation)
    (tmp_path / 'file').write_bytes(b'two' * 100_000)
    emulator.upload('a/y', tmp_path / 'file')
    assert [(o.name, o.size) for o in emulator.list('a/')] == [('a/x', 3), ('a/y', 300_000)]
    assert all(o.checksum for o in emulator.list('a/'))
    emulator.download('a/y', tmp_path / 'back')
    assert (tmp_path / 'back').read_bytes() == (tmp_path / 'file').read_bytes()
    emulator.delete('a/x')
    emulator.delete('a/x')
    with pytest.raises(objects.Removed):
        emulator.download('a/x', tmp_path / 'back')
    assert 'gs://no-such-bucket' in refused(
        downloads.fetch, 'gs://no-such-bucket/a', error=RetrievalError
    )
    monkeypatch.setattr(objects, '_REQUEST_SECONDS', 0.2)
    monkeypatch.setenv('STORAGE_EMULATOR_HOST', f'http://localhost:{free_port()}')
    with pytest.raises(objects.Unavailable, match='gs://bucket/a/x'):
        objects.open_bucket('bucket').read('a/x')
