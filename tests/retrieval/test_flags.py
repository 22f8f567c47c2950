"""Flags of the commands: one without effect is refused, and so is a number that nothing could work with."""

import json

import pytest

from zeroplay_jax.retrieval import build, query, server

PASSAGE = {'id': 'a', 'contents': '"Lomi"\nLomi is a city.'}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'c.jsonl').write_text(json.dumps(PASSAGE))
    (tmp_path / 'texts').mkdir()
    (tmp_path / 'texts' / 'a.txt').write_text('Lomi\nLomi is a city.')
    return tmp_path


REFUSED = [
    (build, '--kind bm25 --encoder lexical', '--encoder lexical: bm25 has no vectors; '),
    (build, '--kind bm25 --query-prefix x', '--query-prefix x: bm25 has no vectors; '),
    (build, '--kind bm25 --max-tokens 7', '--max-tokens 7: bm25 has no vectors; '),
    (build, '--kind bm25 --dtype float16', '--dtype float16: bm25 has no vectors; '),
    (build, '--kind bm25 --leaves 3', '--leaves 3: is for ScaNN alone; '),
    (build, '--kind exact --encoder lexical --leaves 3', '--leaves 3: is for ScaNN alone; '),
    (build, '--encoder lexical --query-prefix=', "--query-prefix '': the encoder lexical "),
    (build, '--encoder lexical --max-tokens 7', '--max-tokens 7: the encoder lexical '),
    (build, '--kind bm25 --corpus FOLDER/texts --fields text=x', 'texts have no fields; '),
    (server, '--port 99999', "'99999' is not possible; give a number of 0 to 65535; "),
    (server, '--port=-1', "'-1' is not possible; give a number of 0 to 65535; "),
    (server, '--max-connections 0', "--max-connections: '0' is not possible; "),
    (query, '--k 0 Lomi', "--k: '0' is not possible; "),
]


@pytest.mark.parametrize(
    ('module', 'flags', 'part'),
    [
        pytest.param(
            *case,
            marks=pytest.mark.fault('kin-faces', f'{case[0].__name__.split(".")[-1]} {case[1]}'),
        )
        for case in REFUSED
    ],
)
def test_a_flag_without_effect_is_refused(folder, capsys, user_reads, module, flags, part):
    paths = ['--index', str(folder / 'index')]
    if module is build:
        paths = ['--corpus', str(folder / 'c.jsonl'), '--out', str(folder / 'index')]
    with pytest.raises(SystemExit) as end:
        module.main([*paths, *flags.replace('FOLDER', str(folder)).split()])
    (line,) = capsys.readouterr().err.splitlines()
    user_reads(line)
    assert end.value.code == 2 and part in line
    assert not (folder / 'index').exists()


@pytest.mark.fault('kin-faces', 'query without --k of an index with one passage')
def test_an_index_with_one_passage_is_searched_without_a_number(folder, capsys, user_reads):
    out = str(folder / 'index')
    build.main(['--corpus', str(folder / 'c.jsonl'), '--kind', 'bm25', '--out', out])
    capsys.readouterr()
    query.main(['--index', out, 'Lomi'])
    _, passage = capsys.readouterr().out.splitlines()
    assert 'Lomi is a city.' in passage
    user_reads('right: the one passage')
