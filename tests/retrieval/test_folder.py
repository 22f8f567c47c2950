"""Index folders: built whole or not at all, resumed to the same bytes, damage and mismatches named."""

import contextlib
import importlib.metadata
import io
import json
import logging
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from zeroplay_jax.mini import world
from zeroplay_jax.retrieval import build, folder, query, server, shards
from zeroplay_jax.retrieval.corpus import contents
from zeroplay_jax.retrieval.lexical import LexicalEncoder
from zeroplay_jax.retrieval.types import RetrievalError

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    """A corpus file of more than 1,500 passages of the miniature worlds."""
    found = [passage for seed in range(12) for passage in world.World(seed).passages]
    path = tmp_path_factory.mktemp('corpus') / 'c.jsonl'
    path.write_text(
        ''.join(
            json.dumps({'id': f'p{i}', 'contents': contents(p.title, p.text)}) + '\n'
            for i, p in enumerate(found)
        )
    )
    assert len(found) > 1_500
    return path


@pytest.fixture(scope='module')
def built(corpus, tmp_path_factory):
    """Folders by kind."""
    home = tmp_path_factory.mktemp('indexes')
    for kind in folder.KINDS:
        encoder = None if kind == 'bm25' else LexicalEncoder()
        folder.build(corpus, home / kind, kind, encoder, shard_rows=500)
    return home


@pytest.fixture
def copy(built, tmp_path):
    """A copy of the ScaNN folder to do harm to."""
    return shutil.copytree(built / 'scann', tmp_path / 'scann')


@pytest.mark.parametrize('kind', folder.KINDS)
def test_built_opened_and_asked(built, kind):
    index = folder.open_index(built / kind)
    titles = [index.corpus.passage(row)['title'] for row in range(0, len(index), 40)]
    ids, _ = index.search(titles, 3)
    assert (ids[:, 0] == np.arange(0, len(index), 40)).mean() > 0.9
    assert index.parameters['kind'] == kind and index.corpus.record(7).id == 'p7'
    manifest = folder.verify(built / kind)
    assert manifest['corpus']['passages'] == len(index) and manifest['versions']['scann']
    assert not list(built.glob('*.partial')) and not (built / kind / 'shards').exists()


def test_scann_and_exact_agree_and_folders_are_told_apart(built):
    scann, exact = (folder.open_index(built / kind) for kind in ('scann', 'exact'))
    titles = [scann.corpus.passage(row)['title'] for row in range(200)]
    (ids, scores), (truth, true_scores) = scann.search(titles, 3), exact.search(titles, 3)
    assert (ids == truth).mean() > 0.99
    np.testing.assert_array_equal(scores[ids == truth], true_scores[ids == truth])
    assert len({folder.fingerprint(built / kind) for kind in folder.KINDS}) == 3


def files(path):
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob('*') if p.is_file()}


def test_a_killed_build_goes_on_and_gives_the_same_bytes(corpus, built, tmp_path):
    class Killed(Exception):
        pass

    class Dying(LexicalEncoder):
        calls = 0

        def encode(self, texts):
            Dying.calls += 1
            if Dying.calls == 3:
                raise Killed
            return super().encode(texts)

    out = tmp_path / 'scann'
    with pytest.raises(Killed):
        folder.build(corpus, out, 'scann', Dying(), shard_rows=500)
    assert not out.exists()
    before = {
        p.name: p.stat().st_mtime_ns
        for p in (tmp_path / 'scann.partial' / 'shards').glob('vectors-*')
    }
    assert len(before) == 2
    with pytest.raises(RetrievalError, match='corpus_sha256|encoder|another build'):
        folder.build(corpus, out, 'scann', LexicalEncoder(dimension=128), shard_rows=500)
    # Four hosts take what is left, in any order; the first two shards are not touched.
    for host in (3, 1, 0, 2):
        folder.build(
            corpus,
            out,
            'scann',
            LexicalEncoder(),
            stages=('encode',),
            shard_rows=500,
            host=host,
            hosts=4,
        )
    after = {
        p.name: p.stat().st_mtime_ns
        for p in (tmp_path / 'scann.partial' / 'shards').glob('vectors-*')
    }
    assert before.items() <= after.items() and len(after) == -(
        -len(folder.open_index(built / 'scann')) // 500
    )
    folder.build(corpus, out, 'scann', LexicalEncoder(), stages=('index',))
    found, expected = files(out), files(built / 'scann')
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


def test_stages_need_their_predecessors(corpus, tmp_path):
    with pytest.raises(RetrievalError, match='run the stage corpus first'):
        folder.build(corpus, tmp_path / 'a', 'exact', LexicalEncoder(), stages=('encode',))
    folder.build(corpus, tmp_path / 'b', 'exact', LexicalEncoder(), stages=('corpus',))
    with pytest.raises(RetrievalError, match='run the stage encode first'):
        folder.build(corpus, tmp_path / 'b', 'exact', LexicalEncoder(), stages=('index',))
    options = dict(stages=('encode',), shard_rows=500)
    folder.build(corpus, tmp_path / 'b', 'exact', LexicalEncoder(), host=1, hosts=2, **options)
    with pytest.raises(RetrievalError, match=r'shards \[0, 1\] of 4 are missing'):
        folder.build(corpus, tmp_path / 'b', 'exact', LexicalEncoder(), stages=('index',))
    with pytest.raises(RetrievalError, match='host 2 of 2'):
        folder.build(corpus, tmp_path / 'b', 'exact', LexicalEncoder(), host=2, hosts=2, **options)


def test_a_corpus_may_be_mended_or_changed(tmp_path):
    path, out = tmp_path / 'c.jsonl', tmp_path / 'out'
    path.write_text('{"id": "0", "contents": "word"}\n{')
    with pytest.raises(RetrievalError, match='c.jsonl:2'):
        folder.build(path, out, 'exact', LexicalEncoder())
    path.write_text('{"id": "0", "contents": "word"}\n')
    folder.build(path, out, 'exact', LexicalEncoder(), stages=('corpus', 'encode'))
    path.write_text('{"id": "0", "contents": "another"}\n')  # but not under what was made from it
    with pytest.raises(RetrievalError, match='another build lies there: bytes was'):
        folder.build(path, out, 'exact', LexicalEncoder())


def test_a_vector_that_is_none_stops_the_build(tmp_path):
    class Broken(LexicalEncoder):
        def encode(self, texts):
            vectors = super().encode(texts)
            vectors[1] = np.nan
            return vectors

    path = tmp_path / 'c.jsonl'
    path.write_text(''.join(f'{{"id": "{i}", "contents": "word {i}"}}\n' for i in range(4)))
    with pytest.raises(RetrievalError, match='passage 1 has no unit vector'):
        folder.build(path, tmp_path / 'out', 'exact', Broken())
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('name', ['vectors.npy', 'corpus/passages.bin', 'scann/dataset.npy'])
def test_a_flipped_byte_is_found(copy, name):
    path = copy / name
    data = bytearray(path.read_bytes())
    data[-100] ^= 1  # in the last block, which is always sampled
    path.write_bytes(data)
    with pytest.raises(RetrievalError, match=f'{name}: its bytes are not those'):
        folder.open_index(copy)


@pytest.mark.fault('new-index', 'a bit flipped between the sampled blocks of an exact index')
def test_a_flipped_byte_between_the_samples_is_found(copy, monkeypatch, user_reads):
    path = copy / 'vectors.npy'
    data = bytearray(path.read_bytes())
    size, last = len(data), len(data) - folder.BLOCK_BYTES
    sampled = [
        range(
            last * n // (folder.BLOCKS - 1),
            last * n // (folder.BLOCKS - 1) + folder.BLOCK_BYTES,
        )
        for n in range(16)
    ]
    at = next(i for i in range(size // 2, size) if not any(i in block for block in sampled))
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(RetrievalError, match=r'vectors.npy: its bytes are not those') as refusal:
        folder.open_index(copy)
    user_reads(refusal.value)
    # A large one is not read whole when it is opened.
    monkeypatch.setattr(folder, 'WHOLE_BYTES', 0)
    folder.open_index(copy)
    with pytest.raises(RetrievalError, match=r'vectors.npy: its bytes are not those'):
        folder.verify(copy)


def test_damage_is_named(copy):
    path = copy / 'scann' / 'hashed_dataset.npy'
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(
        RetrievalError, match=f'{len(whole)} bytes expected, found {len(whole) - 1}'
    ):
        folder.open_index(copy)
    path.unlink()
    with pytest.raises(RetrievalError, match='found None'):
        folder.open_index(copy)
    (copy / 'manifest.json').write_text('{"format": 1')
    with pytest.raises(RetrievalError, match='manifest.json: cannot be read'):
        folder.open_index(copy)


def change(copy, **values):
    manifest = json.loads((copy / 'manifest.json').read_text())
    for key, value in values.items():
        manifest[key] = value if not isinstance(value, dict) else manifest[key] | value
    (copy / 'manifest.json').write_text(json.dumps(manifest))
    # As an earlier version wrote it.
    (copy / 'manifest.sha256').unlink(missing_ok=True)


def test_every_flipped_bit_of_the_manifest_is_found(copy):
    content = (copy / 'manifest.json').read_bytes()
    rng = np.random.default_rng(0)
    for place, bit in zip(rng.integers(0, len(content), 150), rng.integers(0, 8, 150)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << bit
        (copy / 'manifest.json').write_bytes(damaged)
        with pytest.raises(RetrievalError, match='manifest.json: cannot be read') as raised:
            folder.open_index(copy)
        assert '\n' not in str(raised.value)
    (copy / 'manifest.json').write_bytes(content)
    folder.open_index(copy)
    (copy / 'manifest.sha256').write_text('')
    with pytest.raises(RetrievalError, match='do not fit manifest.sha256, copy the folder again'):
        folder.read_manifest(copy)


def test_the_checksum_is_that_of_sha256sum(copy):
    command = ['sha256sum', '--check', '--status', 'manifest.sha256']
    assert subprocess.run(command, cwd=copy, check=False).returncode == 0


def test_mismatches_say_what_differs(copy):
    with pytest.raises(
        RetrievalError, match=f'dimension: {LexicalEncoder().dimension} built, 256 given'
    ):
        folder.open_index(copy, LexicalEncoder(dimension=256))
    change(copy, versions={'scann': '1.0'})
    with pytest.raises(RetrievalError, match='built with scann 1.0, installed is'):
        folder.open_index(copy)
    change(copy, format=0)
    with pytest.raises(RetrievalError, match='not of format 1'):
        folder.open_index(copy)


@pytest.mark.parametrize(('kind', 'library'), [('scann', 'scann'), ('bm25', 'bm25s')])
def test_an_index_whose_library_is_not_installed_is_refused(built, monkeypatch, kind, library):
    version = importlib.metadata.version

    def without_library(name):
        if name == library:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, 'version', without_library)
    with pytest.raises(RetrievalError) as caught:
        folder.open_index(built / kind)
    message = str(caught.value)
    assert f'built with {library} {version(library)}, which is not installed' in message
    assert '\n' not in message


def test_an_index_too_small_for_scann_opens_with_any_version_of_it(tmp_path):
    source = tmp_path / 'few.jsonl'
    source.write_text(json.dumps({'id': 'a', 'contents': contents('Lomi', 'A city.')}))
    folder.build(source, tmp_path / 'few', 'scann', LexicalEncoder())
    change(tmp_path / 'few', versions={'scann': '1.0'})
    assert len(folder.open_index(tmp_path / 'few')) == 1


def run(*args, prefix=()):
    """A command of its own process: (status, its error lines)."""
    result = subprocess.run(
        [*prefix, sys.executable, '-m', *args], cwd=ROOT, capture_output=True, text=True
    )
    return result.returncode, result.stderr.strip().splitlines(), result.stdout


def test_a_full_disk_is_one_line_and_leaves_nothing_that_looks_whole(corpus, tmp_path):
    out = tmp_path / 'out'
    args = ('retrieval.build', '--corpus', str(corpus), '--kind', 'bm25', '--out', str(out))
    # Writing beyond 100 kB fails as on a full disk; Python ignores the signal that goes with it.
    status, errors, _ = run(*args, prefix=('bash', '-c', 'ulimit -f 100; exec "$@"', 'bash'))
    assert status == 2 and not out.exists()
    assert (
        errors[-1].startswith('retrieval: ')
        and 'File too large' in errors[-1]
        and 'Traceback' not in str(errors)
    )
    status, _, stdout = run(*args)  # the same command goes on
    assert status == 0 and json.loads(stdout)['kind'] == 'bm25' and out.exists()


def test_the_stages_of_several_hosts_are_commands(corpus, built, tmp_path):
    out = tmp_path / 'exact'
    args = ['--corpus', str(corpus), '--kind', 'exact', '--encoder', 'lexical', '--out', str(out)]
    build.main([*args, '--stage', 'corpus'])
    for host in ('1', '0'):
        more = ['--host', host, '--hosts', '2', '--shard-rows', '500']
        build.main([*args, '--stage', 'encode', *more])
    build.main([*args, '--stage', 'index'])
    assert files(out).keys() == files(built / 'exact').keys()


def command(main, *args):
    """The line with which a command ends."""
    said = io.StringIO()
    with pytest.raises(SystemExit) as stopped, contextlib.redirect_stderr(said):
        main([str(arg) for arg in args])
    assert stopped.value.code == 2 and said.getvalue().count('\n') == 1
    return said.getvalue()


def test_the_commands_refuse_in_one_line(corpus, built, tmp_path, monkeypatch):
    out = tmp_path / 'out'
    assert 'no such file' in command(
        build.main, '--corpus', tmp_path / 'no.jsonl', '--out', out, '--encoder', 'lexical'
    )
    assert '--encoder is missing' in command(build.main, '--corpus', corpus, '--out', out)
    assert 'config.json' in command(
        build.main, '--corpus', corpus, '--out', out, '--encoder', tmp_path
    )
    assert 'exists already' in command(
        build.main, '--corpus', corpus, '--out', built / 'bm25', '--kind', 'bm25'
    )
    (tmp_path / 'empty.jsonl').touch()
    line = command(build.main, '--corpus', tmp_path / 'empty.jsonl', '--out', out, '--kind', 'bm25')
    assert 'no passage in it' in line and not out.exists()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=1_000))
    assert 'GB are needed' in command(
        build.main, '--corpus', corpus, '--out', tmp_path / 'big', '--kind', 'bm25'
    )
    assert 'manifest.json' in command(query.main, '--index', tmp_path, 'a')
    assert "'0' is not possible" in command(query.main, '--index', built / 'bm25', '--k', 0, 'a')
    assert 'no query is given; write one' in command(query.main, '--index', built / 'bm25')
    for main in (build.main, query.main, server.main):
        assert 'arguments are required: --' in command(main)


def test_query_prints_passages_and_verifies(built, capsys):
    index = folder.open_index(built / 'exact')
    title = index.corpus.passage(3)['title']
    query.main(['--index', str(built / 'exact'), '--verify', title])
    out = capsys.readouterr().out
    assert 'files are as they were built' in out and f'[3] {title}: ' in out


def test_query_prints_no_escape_code_of_a_page(tmp_path, capsys):
    title = 'Lomi\x1b]0;owned\x07\x1b[2J'
    text = 'A city.\u202e\x9b31m\r\n\x00' + 'x' * 100_000
    line = json.dumps({'id': 'a', 'contents': contents(title, text)})
    (tmp_path / 'c.jsonl').write_text(line)
    folder.build(tmp_path / 'c.jsonl', tmp_path / 'index', 'bm25', None)
    query.main(['--index', str(tmp_path / 'index'), '--k', '1', 'Lomi'])
    out = capsys.readouterr().out
    assert out.count('\n') == 2 and all(line.isprintable() for line in out.splitlines())
    assert '[0] Lomi\ufffd]0;owned\ufffd' in out and 'A city.' in out
    assert len(out) < 300


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / 'f'
    path.write_bytes(b'old')

    def torn(file):
        file.write(b'ne')
        raise OSError(28, 'No space left on device')

    with pytest.raises(OSError):
        shards.write_atomically(path, torn)
    assert path.read_bytes() == b'old' and [p.name for p in tmp_path.iterdir()] == ['f']


SPACELESS = {
    'Chinese': '这座城市位于河边，由僧侣建立。',
    'Japanese': 'この町は川のそばにあり、修道士によって建てられた。',
    'Thai': 'เมืองนี้ตั้งอยู่ริมแม่น้ำและก่อตั้งโดยพระสงฆ์',
}


@pytest.mark.parametrize('kind', ['bm25', 'exact'])
@pytest.mark.parametrize(
    'language',
    [
        pytest.param(name, marks=pytest.mark.fault('third-23', f'BM25 over {name}'))
        for name in SPACELESS
    ],
)
def test_an_index_of_words_over_a_language_without_spaces_warns(
    tmp_path, caplog, language, kind, user_reads
):
    texts = [SPACELESS[language] * 3, *['A town by the river.'] * 9]
    lines = [json.dumps({'id': number, 'text': text}) for number, text in enumerate(texts)]
    source = tmp_path / 'c.jsonl'
    source.write_text('\n'.join(lines))
    encoder = None if kind == 'bm25' else LexicalEncoder()
    with caplog.at_level(logging.WARNING):
        folder.build(source, tmp_path / 'index', kind, encoder)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    user_reads(record.message)
    assert '10 % of the passages' in record.message and '--encoder' in record.message
    caplog.clear()
    source.write_text(
        '\n'.join(lines[1:] + [json.dumps({'id': 'x', 'text': 'Gumu (古木) in Ломи.'})])
    )
    folder.build(source, tmp_path / 'second', kind, encoder)
    assert 'without spaces' not in caplog.text


@pytest.mark.fault('user-4', 'retrieval.build --encoder lexcal')
def test_a_misspelt_encoder_gets_the_name_that_was_meant(corpus, tmp_path, capsys, user_reads):
    with pytest.raises(SystemExit) as end:
        build.main(['--corpus', str(corpus), '--encoder', 'lexcal', '--out', str(tmp_path / 'out')])
    (line,) = capsys.readouterr().err.splitlines()
    user_reads(line)
    assert end.value.code == 2 and 'lexcal: no such folder' in line
    assert "hf://owner/model, or 'lexical'; " in line and line.endswith("did you mean 'lexical'?")
