"""Writes docs/ablations.md from configs/ablations.py.

PYTHONPATH=. .venv/bin/python docs/ablation_page.py > docs/ablations.md
"""

import importlib

from zeroplay_jax.configs import ablations
from zeroplay_jax.configuration import fields

TITLES = {
    'ssp': 'SSP',
    'drzero': 'Dr. Zero',
    'piplay': 'π-Play',
    'dspo': 'DSPO',
    'scope': 'SCOPE',
}
INTRODUCTION = """# Ablations and baselines

The rows of the papers' tables, and baselines that are only settings. A row is a config:

```
.venv/bin/python -m zeroplay_jax.main --config=configs/ablations.py:drzero/grpo:mini --workdir=runs/grpo
```

`:mini` shrinks it to minutes on a laptop, with steps, batches, policy and call syntax of the small run. The tables give
what differs from the system's config; reasons are in [configs/ablations.py](../configs/ablations.py), comparisons in
[claims](claims.md), the command for every table and figure in [papers.toml](../tests/golden/papers.toml).
"""


def page() -> str:
    """Returns the page as Markdown."""
    lines = [INTRODUCTION]
    for system, title in TITLES.items():
        lines += [f'## {title}', '', '| row | what differs |', '|---|---|']
        base = importlib.import_module(f'zeroplay_jax.configs.{system}').get_config()
        for row in ablations.ROWS:
            if row.startswith(f'{system}/'):
                lines.append(f'| `{row}` | {_differences(base, ablations.get_config(row))} |')
        lines.append('')
    return '\n'.join(lines).rstrip() + '\n'


def _differences(base, config) -> str:
    """Returns the fields in which a config differs from that of its system, with their values in it."""
    defaults = dict(fields.leaves(base))
    texts = []
    for name, value in fields.leaves(config):
        if value != defaults[name]:
            value = '(without search)' if name == 'prompts' else _text(value)
            texts.append(f'`{name}={value}`')
    return ', '.join(texts) or "nothing: this is the config's value"


def _text(value) -> str:
    """Returns a value as a flag has it."""
    if isinstance(value, (list, tuple)):
        values = ','.join(map(_text, value))
        return f'({values},)' if len(value) == 1 else f'({values})'
    return str(value)


if __name__ == '__main__':
    print(page(), end='')
