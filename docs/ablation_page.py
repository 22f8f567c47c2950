"""Writes docs/ablations.md from docs/papers.toml and configs/ablations.py.

PYTHONPATH=. .venv/bin/python docs/ablation_page.py > docs/ablations.md
"""

import importlib
import pathlib
import tomllib

from zeroplay_jax.configs import ablations
from zeroplay_jax.configuration import fields

DATA = pathlib.Path(__file__).with_name('papers.toml')
INTRODUCTION = """# Tables, figures and ablations

What makes every table and figure of the papers, or why nothing does. RUN is the workdir of a
run, BASE.json is a file that `zeroplay evaluate --out` wrote. A row of a table is a config:

```
zeroplay train --config=configs/ablations.py:drzero/grpo:mini --workdir=runs/grpo
```

`:mini` shrinks it to minutes on a laptop, with steps, batches, policy and call syntax of the small run. Behind a row is
what differs from its system's config; reasons are in [configs/ablations.py](../configs/ablations.py), comparisons in
[claims](claims.md).
"""


def page() -> str:
    """Returns the page as Markdown."""
    papers: dict[str, dict[str, dict]] = {}
    for name, entry in tomllib.loads(DATA.read_text(encoding='utf-8')).items():
        paper, _, place = name.partition(', ')
        papers.setdefault(paper, {})[place] = entry
    lines = [INTRODUCTION]
    seen: set[str] = set()
    for paper, places in papers.items():
        lines += [f'## {paper}', '', *_commands(places), *_rows(places, seen), '']
    return '\n'.join(lines).rstrip() + '\n'


def _commands(places: dict[str, dict]) -> list[str]:
    """Returns an item per command, with the places that it makes; the last one has those that nothing makes."""
    made: dict[str, list[str]] = {}
    for place, entry in places.items():
        if 'report' in entry:
            made.setdefault('zeroplay figures NAME RUN', []).append(f'{place} `{entry["report"]}`')
        if 'command' in entry:
            made.setdefault(entry['command'], []).append(place)
    items = [f'- `{command}`: {"; ".join(of_command)}' for command, of_command in made.items()]
    reasons = [f'{place}: {entry["not"]}' for place, entry in places.items() if 'not' in entry]
    return [*items, f'- not here: {"; ".join(reasons)}'] if reasons else items


def _rows(places: dict[str, dict], seen: set[str]) -> list[str]:
    """Returns an item per row, under the places that have it; adds the rows to `seen`."""
    places_of_row: dict[str, list[str]] = {}
    for place, entry in places.items():
        for row in entry.get('rows', ()):
            places_of_row.setdefault(row, []).append(place)
    lines: list[str] = []
    before: list[str] = []
    for row, of_row in places_of_row.items():
        if of_row != before:
            lines += ['', f'{"; ".join(of_row)}:', '']
        before = of_row
        lines.append(f'- `{row}`: {"as above" if row in seen else _differences(row)}')
        seen.add(row)
    return lines


def _differences(row: str) -> str:
    """Returns the fields in which the config of a row differs from that of its system, with their values in it."""
    system = importlib.import_module(f'zeroplay_jax.configs.{row.partition("/")[0]}')
    defaults = fields.leaves(system.get_config())
    texts = []
    # Most rows of SCOPE have the model of another row.
    base = f'{row.partition("/")[0]}/qwen3_8b'
    known = ablations.ROWS.get(base, {}).items()
    if row != base and known and known <= ablations.ROWS[row].items():
        texts.append(f'`{base}`')
        defaults |= known
    for name, value in fields.leaves(ablations.get_config(row)).items():
        if value != defaults[name]:
            value = '(without search)' if name == 'prompts' else _text(value)
            texts.append(f'`{name}={value}`')
    return ', '.join(texts) or 'the config itself'


def _text(value) -> str:
    """Returns a value as a flag has it."""
    if isinstance(value, (list, tuple)):
        values = ','.join(map(_text, value))
        return f'({values},)' if len(value) == 1 else f'({values})'
    return str(value)


if __name__ == '__main__':
    print(page(), end='')
