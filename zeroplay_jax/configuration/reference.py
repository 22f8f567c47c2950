"""Writes docs/configuration.md: every config field with its type, default, and meaning.

python -m zeroplay_jax.configuration.reference > docs/configuration.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from zeroplay_jax.selfplay.recipe import BUILT_IN, recipe_class
from zeroplay_jax.settings.kinds import Section
from zeroplay_jax.settings.schema import Run, TrainedRole

_INTRODUCTION = """# Configuration

A run is a Python file with `get_config()`, which starts from the defaults below and changes a few of them
(`configs/*.py`), and flags that override any field:

```
zeroplay train --config=configs/drzero.py:mini --workdir=runs/seed1 --config.seed=1
```

A field that does not exist, a value of another type or out of bounds, and combinations that cannot work are refused in
one line before anything is loaded. This page is generated from the schema
(`python -m zeroplay_jax.configuration.reference`).
"""


def reference() -> str:
    """Returns docs/configuration.md as Markdown."""
    sections: dict[str, type[Section]] = {'<role>': TrainedRole}
    for recipe in BUILT_IN:
        sections |= recipe_class(recipe).settings
    parts = [_INTRODUCTION, _table('Top level', '', Run, '')]
    parts += _tables(Run, '')
    for name, section in sections.items():
        parts.append(_table(f'`{name}`', section.__doc__ or '', section, f'{name}.'))
    return '\n'.join(parts)


def _tables(section: type[Section], prefix: str) -> Iterator[str]:
    """Yields the tables of the sections in a section."""
    # The class is read and not an instance, because only the class has the descriptions.
    for name, field in section.model_fields.items():
        if isinstance(field.default, Section):
            inner, path = type(field.default), f'{prefix}{name}'
            yield _table(f'`{path}`', inner.__doc__ or '', inner, f'{path}.')
            yield from _tables(inner, f'{path}.')


def _table(title: str, text: str, section: type[Section], prefix: str) -> str:
    """Returns a heading, the first paragraph of `text`, and a row for each field that is no section."""
    summary = ' '.join(text.split('\n\n')[0].split())
    lines = [f'## {title}', '', *([summary, ''] if summary else [])]
    lines += ['| field | default | meaning |', '|---|---|---|']
    for name, field in section.model_fields.items():
        if not isinstance(field.default, Section):
            # A field's text may be wrapped in the source; a row is one line, and '|' ends a cell.
            meaning = ' '.join((field.description or '').split()).replace('|', '\\|')
            lines.append(f'| `{prefix}{name}` | `{field.default!r}` | {meaning} |')
    return '\n'.join([*lines, ''])


if __name__ == '__main__':
    sys.stdout.write(reference())
