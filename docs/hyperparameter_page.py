"""Writes docs/hyperparameters.md from docs/hyperparameters.toml.

python docs/hyperparameter_page.py > docs/hyperparameters.md
"""

import itertools
import pathlib
import tomllib

DATA = pathlib.Path(__file__).with_name('hyperparameters.toml')
KINDS = {
    'paper': "the paper's value",
    'choice': 'the paper leaves several values open; ours is one',
    'form': 'the same in another form',
    'deviates': "not the paper's value",
    'code': 'the paper is silent; that of the released code or its framework',
    'inferred': 'neither says it',
}
TITLES = {
    'all': 'All systems',
    'drzero': 'Dr. Zero',
    'piplay': 'π-Play',
    'ssp': 'SSP',
    'dspo': 'DSPO',
    'scope': 'SCOPE',
}
INTRODUCTION = """# Hyperparameters of the papers

All values of the five papers, and of our configs where no paper gives one; a test compares them with the configs.
`both`: proposer and solver; names in brackets are no fields. Where a paper does not say the same, a value has a kind:
"""


def load() -> dict[str, dict[str, dict]]:
    """Returns system → field → entry of the data file."""
    return tomllib.loads(DATA.read_text(encoding='utf-8'))


def page() -> str:
    """Returns the page as Markdown."""
    lines = [INTRODUCTION]
    lines += [f'- {kind}: {meaning}' for kind, meaning in KINDS.items() if kind != 'paper']
    systems = load()
    for system, entries in systems.items():
        # π-Play has most of Dr. Zero's tables 5 and 6, and ours follows it where they leave a choice.
        known = systems['drzero'] if system == 'piplay' else {}
        same = [field for field in entries if _is_same(entries[field], known.get(field))]
        shared, others, silent = [], [], []
        for field, entry in entries.items():
            if field in same:
                continue
            why = entry.get('why')
            ours = _text(entry['ours'])
            if entry['kind'] == 'paper':
                shared.append((_joined(entry['source'], why, '; '), field, ours))
                continue
            if 'paper' in entry:
                kind = _joined(entry['kind'], why, ': ')
                values = entry['paper']
                # A list has the values among which the paper leaves the choice.
                paper = ' or '.join(map(str, values)) if isinstance(values, list) else str(values)
                paper = _joined(paper, entry['source'], '; ')
                others.append((field, paper, ours, kind))
            else:
                silent.append((_joined(entry['kind'], why, ', '), field, ours))
        lines += ['', f'## {TITLES[system]}']
        if same:
            values = [_assignment(field, _text(entries[field]['ours'])) for field in same]
            lines += ['', f'As for Dr. Zero, from the same places: {", ".join(values)}.']
        lines += _list('The values of the paper', shared)
        lines += _table('field | paper | ours | kind', _by_last_cells(others))
        lines += _list('Where the paper is silent', silent)
    return '\n'.join(lines) + '\n'


def _is_same(entry: dict, other: dict | None) -> bool:
    """Returns whether two papers say the same in the same place, and our value is the same."""
    names = ('paper', 'source', 'ours')
    return bool(other) and 'paper' in entry and all(entry[n] == other.get(n) for n in names)


def _table(head: str, rows: list[str]) -> list[str]:
    """Returns the lines of a table with an empty one before it; [] without rows."""
    rule = '|---' * (head.count('|') + 1) + '|'
    return ['', f'| {head} |', rule, *rows] if rows else []


def _list(title: str, rows: list[tuple[str, str, str]]) -> list[str]:
    """Returns the lines of a list of (heading, field, value): an item for each heading, with all its values."""
    values: dict[str, list[str]] = {}
    for heading, field, value in rows:
        values.setdefault(heading, []).append(_assignment(field, value))
    items = [f'- {heading}: {", ".join(texts)}' for heading, texts in values.items()]
    return ['', f'{title}:', '', *items] if rows else []


def _assignment(field: str, value: str) -> str:
    """Returns a field with its value; a name in brackets is no field."""
    return f'{field} {value}' if field.startswith('(') else f'`{field}={value}`'


def _by_last_cells(rows: list[tuple[str, ...]]) -> list[str]:
    """Returns the lines of a table; neighbours that differ only in the field are one line."""
    lines = []
    for cells, group in itertools.groupby(rows, key=lambda row: row[1:]):
        names = ', '.join(f'`{field}`' for field, *_ in group)
        lines.append(f'| {names} | {" | ".join(cells)} |')
    return lines


def _joined(text: str, remark: str | None, separator: str) -> str:
    """Returns a text with a remark behind it, if there is one."""
    return f'{text}{separator}{remark}' if remark else text


def _text(value) -> str:
    """Returns a value as it is written in the tables."""
    return ','.join(map(_text, value)) if isinstance(value, list) else str(value)


if __name__ == '__main__':
    print(page(), end='')
