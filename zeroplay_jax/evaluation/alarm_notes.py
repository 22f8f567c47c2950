"""Sums up the alarms of a run for its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zeroplay_jax.retrieval import json_text


def alarm_notes(path: Path) -> list[str]:
    """Returns a sentence per alarm and level: how often, first and last step, and its last line.

    Args:
      path: alarms.jsonl of a run; a missing file, as of a run of an earlier version, has no alarms. Damaged lines are
        left out.
    """
    if not path.is_file():
        return []
    records_of_kind: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in path.read_bytes().split(b'\n'):
        try:
            record = json_text.parse_object(line)
            kind = (str(record['name']), str(record['level']))
            complete = record | {'step': int(record['step']), 'text': str(record['text'])}
        except (ValueError, KeyError, TypeError):
            continue
        records_of_kind.setdefault(kind, []).append(complete)
    notes = []
    for (name, level), records in records_of_kind.items():
        steps = [record['step'] for record in records]
        place = f'step {steps[0]}'
        if len(steps) > 1:
            place = f'{len(steps)} times, steps {min(steps)} to {max(steps)}'
        word = 'stopped the run' if level == 'stop' else 'warning'
        notes.append(f'Alarm {name} ({word}, {place}): {records[-1]["text"]}.')
    return notes
