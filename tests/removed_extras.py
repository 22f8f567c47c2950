"""Extras that somebody has removed: a test that needs one is skipped, and tables and pages keep their rows about it."""

import re
import tomllib

from python_process import ROOT

from zeroplay_jax.extras import EXTRAS

HOUSE = ROOT / 'tests' / 'house.toml'
REMOVED = {*tomllib.loads(HOUSE.read_text(encoding='utf-8'))['extras']} - EXTRAS.keys()
# What `load_extra`, Python and retrieval/corpus.py say.
_SAID = re.compile(
    r"(?:installation is without |No module named '?|are cut by )zeroplay_jax[./]extras[./](\w+)"
)


def says_so(text):
    """Whether a text says that a removed extra is missing."""
    return not REMOVED.isdisjoint(_SAID.findall(text))


def has_left(path):
    """Whether the file of this path, of an extra or of its tests, was removed with it."""
    return not REMOVED.isdisjoint(re.findall(r'\bextras/(\w+)', path))


def skip(report, path):
    """A report of pytest, which becomes that of a skip where a removed extra is missing."""
    if report.failed and says_so(f'{report.longrepr}{report.capstderr}'):
        report.outcome = 'skipped'
        report.longrepr = (str(path), 0, f'Skipped: {", ".join(REMOVED)} was removed')
    return report


def with_rows_of(expected, written):
    """A written table, with the expected row in place of one that says that a removed extra is missing."""
    if not REMOVED:
        return written
    pairs = zip(written.split('\n\n'), expected.split('\n\n'), strict=True)
    return '\n\n'.join(right if says_so(row) else row for row, right in pairs)
