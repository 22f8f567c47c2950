"""The command of the fault campaign tells apart inputs that pass, are taken silently, crash and are not tried."""

from benchmarks import faults

TESTS = """
import pytest

@pytest.mark.fault('A10', 'a value that is read')
def test_read():
    pass

@pytest.mark.fault('A2', 'a value that is refused')
def test_refused():
    with pytest.raises(ValueError):
        int('one')

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


def test_table_of_faults(tmp_path, capsys, monkeypatch):
    (tmp_path / 'test_sent.py').write_text(TESTS)
    monkeypatch.setattr(faults, 'ROOT', tmp_path)
    out = tmp_path / 'table.tsv'
    assert faults.main(['--out', str(out), 'test_sent.py']) == 1
    rows = [line.split('\t') for line in out.read_text().splitlines()[1:]]
    assert [(row[0], row[2]) for row in rows] == [
        ('A2', 'passes'),
        ('A10', 'passes'),
        ('B', 'silent'),
        ('B', 'traceback'),
        ('C', 'not tried'),
    ]
    assert rows[-1][3] == 'Skipped: no package'
    assert '1 not tried, 2 passes, 1 silent, 1 traceback' in capsys.readouterr().out
