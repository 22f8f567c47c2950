"""Sends the inputs that others reported as faults, and prints which tests pass: python -m benchmarks.faults

The inputs are the tests with the marker `fault(key, sent)`. A test passes if its input is read as the field's reference
implementation reads it, or refused in one line. A test that fails is `silent` (wrong and not a word), or a `traceback`.
The status is 1 if there is one of these.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
import string
import sys
from collections.abc import Sequence

import pytest

from benchmarks.command import parser

ROOT = pathlib.Path(__file__).parents[1]
# Characters of a reason in the table.
_MAX_REASON = 300
# The folder that pytest made for a test.
_TEST_FOLDER = re.compile(r'/\S*?/pytest-of-[^/]+/pytest-\d+/([^/\s]+/)?')


@dataclasses.dataclass(frozen=True)
class Row:
    """One input.

    Attributes:
      key: its place in the tables of faults, such as 'third-1' or 'F5'.
      sent: what the input is.
      verdict: 'passes', 'not tried', 'silent' or 'traceback'.
      reason: why the test was not tried, or what it failed with.
    """

    key: str
    sent: str
    verdict: str
    reason: str


class Collector:
    """Plug-in of pytest that makes a `Row` of every test with the marker `fault`."""

    def __init__(self):
        self.rows: list[Row] = []
        self._markers: dict[str, tuple[str, str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            marker = item.get_closest_marker('fault')
            if marker is not None:
                self._markers[item.nodeid] = marker.args

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_result = report.when == 'call' or not report.passed
        if not is_result or report.nodeid not in self._markers:
            return
        key, sent = self._markers[report.nodeid]
        verdict, reason = 'passes', ''
        if report.skipped:
            verdict, reason = 'not tried', _skip_reason(report)
        elif report.failed:
            verdict, reason = _failure(report)
        self.rows.append(Row(key, sent, verdict, reason))


def _skip_reason(report: pytest.TestReport) -> str:
    # pytest keeps (file, line, reason) of a skipped test.
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    return ''


def _failure(report: pytest.TestReport) -> tuple[str, str]:
    """Returns verdict and message of a test that failed."""
    crash = getattr(report.longrepr, 'reprcrash', None)
    message = crash.message if crash is not None else str(report.longrepr)
    # An assertion that fails, or an error that was expected and not raised: the input was taken without a word.
    is_silent = (
        'AssertionError' in message or 'DID NOT RAISE' in message or message.startswith('assert')
    )
    return 'silent' if is_silent else 'traceback', message


def _place(row: Row) -> tuple[str, int, str]:
    """Returns what rows are sorted by: the table, and the number in it."""
    table = row.key.rstrip(string.digits)
    number = row.key[len(table) :]
    return table, int(number or 0), row.key


def table_of(rows: Sequence[Row]) -> str:
    """Returns the table, its columns divided by tabs."""
    lines = ['key\twhat is sent\tverdict\twhy']
    for row in sorted(rows, key=_place):
        one_line = _TEST_FOLDER.sub('', ' '.join(row.reason.split())).replace(f'{ROOT}/', '')
        # Quotes at the beginning of a cell would be those of the format.
        cells = [row.key, ' '.join(row.sent.split()), row.verdict, one_line[:_MAX_REASON]]
        lines.append('\t'.join(cells).replace('"', "'"))
    return '\n'.join(lines) + '\n'


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tests with the marker; returns 1 if an input was taken silently or ended in a traceback."""
    flags = parser('faults', __doc__)
    flags.add_argument('--out', type=pathlib.Path, help='file of the table (.tsv)')
    flags.add_argument('tests', nargs='*', default=['tests'], help='files or folders of tests')
    options = flags.parse_args(arguments)
    collector = Collector()
    tests = [str(ROOT / test) for test in options.tests]
    pytest_flags = ['-q', '-m', 'fault', '--no-header', '-p', 'no:cacheprovider']
    status = pytest.main([*pytest_flags, *tests], plugins=[collector])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(status)
    table = table_of(collector.rows)
    print(table)
    if options.out:
        options.out.write_text(table, encoding='utf-8')
    counts = collections.Counter(row.verdict for row in collector.rows)
    print(', '.join(f'{count} {verdict}' for verdict, count in sorted(counts.items())))
    return int(counts['silent'] + counts['traceback'] > 0)


if __name__ == '__main__':
    sys.exit(main())
