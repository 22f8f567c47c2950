"""Writes docs/configuration.md: every config field with its type, default, and meaning.

python -m zeroplay_jax.configuration.reference > docs/configuration.md
"""

from __future__ import annotations

import sys
from typing import Any

from zeroplay_jax.selfplay.recipe import BUILT_IN, recipe_class
from zeroplay_jax.settings.kinds import Section
from zeroplay_jax.settings.schema import Run, TrainedRole

_INTRODUCTION = """# Configuration

A run is a Python file with `get_config()`, which starts from the defaults below and changes a few of them
(`configs/*.py`), and flags that override any field:

```
.venv/bin/python -m zeroplay_jax.main --config=configs/drzero.py:mini --workdir=runs/seed1 --config.seed=1
```

A field that does not exist, a value of another type or out of bounds, and combinations that cannot work are refused in
one line before anything is loaded. This page is generated from the schema
(`python -m zeroplay_jax.configuration.reference`).
"""


def reference() -> str:
    """Returns docs/configuration.md as Markdown."""
    sections = [_INTRODUCTION]
    top_fields = []
    # The class is read and not an instance, because only the class has the descriptions.
    for name, field in Run.model_fields.items():
        default = field.default
        if isinstance(default, Section):
            sections.append(_section(name, type(default)))
        else:
            top_fields.append(_row(name, default, field.description))
    # The fields at the top level are known after the loop, but come first in the file.
    sections.insert(1, _table('Top level', '', top_fields))
    # One section for all trained roles: they have the same fields.
    sections.append(_section('<role>', TrainedRole))
    for recipe in BUILT_IN:
        # `vars`, because π-Play inherits the section of Dr. Zero, which must not appear twice.
        attributes = vars(recipe_class(recipe))
        for name, settings in attributes.get('settings', {}).items():
            sections.append(_section(name, settings))
    return '\n'.join(sections)


def _section(name: str, section: type[Section]) -> str:
    """Returns the heading and the table of a section, and those of the sections in it."""
    rows = []
    nested = []
    for field_name, field in section.model_fields.items():
        path = f'{name}.{field_name}'
        default = field.default
        if isinstance(default, Section) and not field.description:
            nested.append(_section(path, type(default)))
            continue
        if isinstance(default, Section):
            # Such a section takes one row: its fields have the same meaning in all of its kind.
            default = default.model_dump()
        rows.append(_row(path, default, field.description))
    return '\n'.join([_table(f'`{name}`', section.__doc__ or '', rows), *nested])


def _table(title: str, text: str, rows: list[str]) -> str:
    """Returns a heading, the first paragraph of `text` and a table of `rows`."""
    lines = [f'## {title}', '']
    # Only the first paragraph of a docstring is used.
    summary = ' '.join(text.strip().split('\n\n')[0].split())
    if summary:
        lines += [summary, '']
    lines += ['| field | default | meaning |', '|---|---|---|', *rows, '']
    return '\n'.join(lines)


def _row(name: str, default: Any, description: str | None) -> str:
    """Returns the row of one field."""
    # A field's text may be wrapped in the source; a row of a table is one line, and '|' ends a cell.
    words = (description or '').split()
    meaning = ' '.join(words).replace('|', '\\|')
    return f'| `{name}` | `{default!r}` | {meaning} |'


if __name__ == '__main__':
    sys.stdout.write(reference())
