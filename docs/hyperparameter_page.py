"""Writes docs/hyperparameters.md from docs/hyperparameters.toml.

python docs/hyperparameter_page.py > docs/hyperparameters.md
"""

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

Every value of the five papers beside that of our config, with its source, and every value of a config that no paper
gives. `both` stands for proposer and solver; a name in brackets is no config field. None of these configs has been run
at this size. The page is generated from `docs/hyperparameters.toml`; a test compares that file with the configs, and
every field that a config sets for its method has to be in it.
"""


def load() -> dict[str, dict[str, dict]]:
    """Returns system → field → entry of the data file."""
    return tomllib.loads(DATA.read_text(encoding='utf-8'))


def page() -> str:
    """Returns the page as Markdown."""
    lines = [INTRODUCTION, '| kind | meaning |', '|---|---|']
    for kind, meaning in KINDS.items():
        lines.append(f'| {kind} | {meaning} |')
    for system, entries in load().items():
        lines += ['', f'## {TITLES[system]}', '', f'`configs/{system}.py`', '']
        lines += ['| field | paper | source | ours | kind | remark |', '|---|---|---|---|---|---|']
        for field, entry in entries.items():
            name = field if field.startswith('(') else f'`{field}`'
            paper = _text(entry['paper']) if 'paper' in entry else '–'
            cells = [name, paper, entry.get('source', '–'), _text(entry['ours'])]
            cells += [entry['kind'], entry.get('why', '')]
            lines.append(f'| {" | ".join(cells)} |'.replace('|  |', '| |'))
    return '\n'.join(lines) + '\n'


def _text(value) -> str:
    """Returns a value as it is written in the table."""
    if isinstance(value, list):
        return ', '.join(map(_text, value))
    if isinstance(value, bool):
        return 'yes' if value else 'no'
    return str(value)


if __name__ == '__main__':
    print(page(), end='')
