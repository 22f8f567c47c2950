"""Tables as papers print them: sets as columns, a row per system or run; as text, Markdown, CSV or LaTeX."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Sequence

FORMATS = ('text', 'markdown', 'csv', 'latex')
# Heading of the mean over sets.
AVERAGE = 'average'


@dataclasses.dataclass(frozen=True)
class Figure:
    """A score, or with `sign` '+' a difference of scores.

    Attributes:
      mean: the score.
      ends: low and high end of its 95 % interval; () for none.
      deviation: standard deviation over samples or runs; None for none.
      sign: '+': positive numbers have their sign.
      digits: decimals.
    """

    mean: float
    ends: tuple[float, ...] = ()
    deviation: float | None = None
    sign: str = ''
    digits: int = 3

    @classmethod
    def of(
        cls, interval: Sequence[float], deviation: float | None = None, sign: str = ''
    ) -> Figure:
        """Returns the figure of (mean, low, high)."""
        return cls(interval[0], tuple(interval[1:]), deviation, sign)

    def times(self, factor: float, digits: int = 3) -> Figure:
        """Returns the figure times a factor, such as 100 for percent."""
        ends = tuple(factor * end for end in self.ends)
        deviation = None if self.deviation is None else factor * self.deviation
        return Figure(factor * self.mean, ends, deviation, self.sign, digits)

    def __str__(self) -> str:
        """Returns 'mean ± deviation [low, high]', without what it does not have."""
        text = self._number(self.mean)
        if self.deviation is not None:
            text += f' ± {self.deviation:.{self.digits}f}'
        if self.ends:
            text += f' [{", ".join(map(self._number, self.ends))}]'
        return text

    def _number(self, value: float) -> str:
        return f'{value:{self.sign}.{self.digits}f}'


# Characters that LaTeX would read as commands.
_FOR_LATEX = str.maketrans(
    {character: f'\\{character}' for character in '&%$#_{}'}
    | {'\\': r'\textbackslash{}', '~': r'\textasciitilde{}', '^': r'\textasciicircum{}'}
)
# Text, or numbers that CSV writes into columns of their own.
Cell = str | Figure
Rows = Sequence[Sequence[Cell]]


def write(rows: Rows, form: str = 'text') -> str:
    """Returns a table, without a newline at its end.

    Args:
      rows: the headings, and the rows below them, all of one length.
      form: one of FORMATS. CSV has the numbers of figures in columns of their own.
    """
    if form == 'csv':
        return _csv(rows)
    texts = [[str(cell) for cell in row] for row in rows]
    if form == 'latex':
        return _latex(texts)
    if form == 'markdown':
        texts = [[cell.replace('|', r'\|') for cell in row] for row in texts]
        rule = ['---'] * len(texts[0])
        return '\n'.join(f'| {" | ".join(row)} |' for row in [texts[0], rule, *texts[1:]])
    return '\n'.join(aligned(texts))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a line per row, with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ['  '.join(map(str.ljust, cells, widths)).rstrip() for cells in rows]


def _csv(rows: Rows) -> str:
    output = io.StringIO()
    writer = csv.writer(output, lineterminator='\n')
    has_figures = [
        any(isinstance(cell, Figure) for cell in column) for column in zip(*rows, strict=True)
    ]
    for row in rows:
        cells: list[object] = []
        for cell, is_split in zip(row, has_figures, strict=True):
            if isinstance(cell, Figure):
                cells += [cell.mean, *(cell.ends or ('', '')), cell.deviation]
            elif not is_split:
                cells.append(cell)
            elif row is rows[0]:
                cells += [cell, f'{cell} low', f'{cell} high', f'{cell} deviation']
            else:
                cells += [cell, '', '', '']
        writer.writerow(cells)
    return output.getvalue().rstrip('\n')


def _latex(rows: Sequence[Sequence[str]]) -> str:
    lines = []
    for row in rows:
        line = ' & '.join(cell.translate(_FOR_LATEX) for cell in row).replace('±', r'$\pm$')
        # A hyphen is no minus.
        lines.append(re.sub(r'(?<!\w)-(?=\d)', '$-$', line) + r' \\')
    columns = 'l' + 'r' * (len(rows[0]) - 1)
    body = [lines[0], r'\hline', *lines[1:]]
    return '\n'.join([rf'\begin{{tabular}}{{{columns}}}', *body, r'\end{tabular}'])
