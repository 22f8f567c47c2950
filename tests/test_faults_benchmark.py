"""The command of the fault campaign tells apart what was read, refused, taken silently and crashed."""

import pathlib

from benchmarks import faults

TESTS = """
import pytest

@pytest.mark.fault('A2', 'a value that is right')
def test_right(user_reads):
    user_reads('right: as the file says')

@pytest.mark.fault('A10', 'a value that is refused')
def test_refused(user_reads):
    user_reads('x.json: no | here')

@pytest.mark.fault('B', 'a value that is taken')
def test_taken():
    with pytest.raises(ValueError):
        pass

@pytest.mark.fault('B', 'a value that breaks')
def test_broken():
    {}['key']

@pytest.mark.fault('C', 'without the package')
def test_left_out():
    pytest.skip('no package')

def test_of_nobody():
    assert False
"""
CONFTEST = pathlib.Path(__file__).parent / 'conftest.py'


def test_table_of_faults(tmp_path, capsys, monkeypatch):
    (tmp_path / 'test_sent.py').write_text(TESTS)
    (tmp_path / 'conftest.py').write_text(CONFTEST.read_text())
    monkeypatch.setattr(faults, 'ROOT', tmp_path)
    out = tmp_path / 'table.tsv'
    assert faults.main(['--out', str(out), 'test_sent.py']) == 1
    rows = [line.split('\t') for line in out.read_text().splitlines()[1:]]
    assert [(row[0], row[2]) for row in rows] == [
        ('A2', 'right'),
        ('A10', 'refused'),
        ('B', 'silent'),
        ('B', 'traceback'),
        ('C', 'not tried'),
    ]
    assert 'no | here' in out.read_text()
    assert '1 not tried, 1 refused, 1 right, 1 silent, 1 traceback' in capsys.readouterr().out
