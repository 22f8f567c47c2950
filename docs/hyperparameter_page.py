"""Writes docs/hyperparameters.md from docs/hyperparameters.toml.

python docs/hyperparameter_page.py > docs/hyperparameters.md
"""

import itertools
import pathlib
import tomllib

DATA = pathlib.Path(__file__).with_name('hyperparameters.toml')
KINDS = {
    'paper': "the paper's value",
    'choice': 'the paper gives several values without saying where; ours is one of them',
    'form': 'the same in another form',
    'deviates': "not the paper's value",
    'code': 'the paper is silent; the value of the released code, or of the framework that it uses',
    'inferred': 'neither says it',
}
TITLES = {
    'drzero': 'Dr. Zero',
    'piplay': 'π-Play',
    'ssp': 'SSP',
    'dspo': 'DSPO',
    'scope': 'SCOPE',
}
INTRODUCTION = """# Hyperparameters of the papers

Every value of the five papers beside that of our config, and every value of a config that no paper gives. `both` stands
for proposer and solver; a name in brackets is no config field. None of these configs has been run at this size. The
page is generated from `docs/hyperparameters.toml`, and a test compares that file with the configs.

Each system has a table of the paper's values and one of the others, which says why a value is ours:
"""


def load() -> dict[str, dict[str, dict]]:
    """Returns system → field → entry of the data file."""
    return tomllib.loads(DATA.read_text(encoding='utf-8'))


def page() -> str:
    """Returns the page as Markdown."""
    lines = [INTRODUCTION, '| kind | meaning |', '|---|---|']
    for kind, meaning in KINDS.items():
        if kind != 'paper':
            lines.append(f'| {kind} | {meaning} |')
    for system, entries in load().items():
        of_paper = []
        others = []
        for field, entry in entries.items():
            why = entry.get('why')
            ours = _text(entry['ours'])
            if entry['kind'] == 'paper':
                of_paper.append((field, ours, _joined(entry['source'], why, '; ')))
            else:
                paper = ''
                if 'paper' in entry:
                    paper = _joined(_text(entry['paper']), entry['source'], '; ')
                others.append((field, paper, ours, _joined(entry['kind'], why, ': ')))
        lines += ['', f'## {TITLES[system]}', '', f'`configs/{system}.py`', '']
        lines += ["| field | the paper's value, and ours | source |", '|---|---|---|']
        lines += _table_rows(of_paper)
        lines += ['', '| field | paper | ours | kind |', '|---|---|---|---|']
        lines += _table_rows(others)
    return '\n'.join(lines) + '\n'


def _table_rows(rows: list[tuple[str, ...]]) -> list[str]:
    """Returns the lines of a table; neighbours that differ only in the field are one line."""
    lines = []
    for cells, group in itertools.groupby(rows, key=lambda row: row[1:]):
        names = []
        for field, *_ in group:
            names.append(field if field.startswith('(') else f'`{field}`')
        lines.append(f'| {" | ".join((", ".join(names), *cells))} |'.replace('|  |', '| |'))
    return lines


def _joined(text: str, remark: str | None, separator: str) -> str:
    """Returns a text with a remark behind it, if there is one."""
    return f'{text}{separator}{remark}' if remark else text


def _text(value) -> str:
    """Returns a value as it is written in the table."""
    if isinstance(value, list):
        return ', '.join(map(_text, value))
    if isinstance(value, bool):
        return 'yes' if value else 'no'
    return str(value)


if __name__ == '__main__':
    print(page(), end='')
