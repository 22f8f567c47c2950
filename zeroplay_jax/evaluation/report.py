"""One self-contained page, `report.html`, on which to read a run: outcome, curves, trajectories.

Reads what the engine wrote into the workdir (`metrics.jsonl`, `trajectories.jsonl`, `summary.json`) and
nothing else, so it also works on a run that is still going or was killed. The page loads nothing from the
network, and its content security policy lets only its own script run, whatever a passage or a model wrote.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent / 'report_page'
STYLES = ('style.css', 'reader.css')
SCRIPTS = ('outcome.js', 'curves.js', 'reader.js')
REQUIRED = {
    'metrics.jsonl': {'step': int, 'phase': str},
    'trajectories.jsonl': {'step': int, 'phase': str, 'role': str, 'segments': list},
}


def write_report(workdir: str | os.PathLike[str]) -> Path:
    """Writes `report.html` into the workdir, replacing an earlier one in one move.

    Args:
      workdir: a run's folder.

    Returns:
      The path of the page.

    Raises:
      FileNotFoundError: the folder holds no file of a run.
    """
    workdir = Path(workdir)
    page = render([read_run(workdir)])
    target, draft = workdir / 'report.html', workdir / f'.report.{os.getpid()}.html'
    try:
        draft.write_text(page, encoding='utf-8')
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    return target


def read_run(workdir: Path) -> dict[str, Any]:
    """What a workdir says about its run, JSON-able.

    Args:
      workdir: a run's folder.

    Returns:
      {'name': str, 'summary': the object of `summary.json` or {}, 'metrics': list of objects,
      'trajectories': list of objects whose segments are [source, index into 'texts'], 'texts': list of
      distinct strings (prompts and passages recur), 'notes': sentences about what is missing or damaged}.

    Raises:
      FileNotFoundError: none of the three files exists.
    """
    names = ('summary.json', *REQUIRED)
    if not any((workdir / name).is_file() for name in names):
        raise FileNotFoundError(f'{workdir}: none of {", ".join(names)} is there; give the workdir of a run')
    notes: list[str] = []
    texts: dict[str, int] = {}
    summary = _summary(workdir / 'summary.json', notes)
    metrics, trajectories = (_lines(workdir / name, fields, notes) for name, fields in REQUIRED.items())
    for row in trajectories:
        row['segments'] = [_interned(segment, texts) for segment in row['segments']]
    return {
        'name': workdir.resolve().name,
        'summary': summary,
        'metrics': metrics,
        'trajectories': trajectories,
        'texts': list(texts),
        'notes': notes,
    }


def render(runs: list[dict[str, Any]]) -> str:
    """The page for runs of `read_run`, as HTML text; style, script and data are inside it."""
    style, script = ('\n'.join(_asset(name) for name in names) for names in (STYLES, SCRIPTS))
    # '<' can only stand inside a JSON string, where the escape means the same: no text can end the element.
    data = json.dumps({'runs': runs}, allow_nan=False, separators=(',', ':')).replace('<', '\\u003c')
    sources = f'style-src {_hash(style)}; script-src {_hash(script)}'
    policy = f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"
    parts = {'POLICY': policy, 'STYLE': style, 'SCRIPT': script, 'DATA': data}
    pieces = _asset('page.html').split('%%')
    # odd pieces are names of parts; joining once never looks for a marker inside the data
    return ''.join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding='utf-8')


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _interned(segment: dict[str, Any], texts: dict[str, int]) -> list[Any]:
    text = str(segment.get('text', ''))
    return [str(segment.get('source', '')), texts.setdefault(text, len(texts))]


def _parse(text: str) -> dict[str, Any] | None:
    """The JSON object in text with NaN and infinities as null (browsers refuse them), or None."""
    try:
        value = json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _finite(text: str) -> float | None:
    return value if math.isfinite(value := float(text)) else None


def _summary(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        notes.append('There is no summary.json yet: the run has not ended, or was killed before it did.')
        return {}
    value = _parse(path.read_text(encoding='utf-8', errors='replace'))
    if value is None:
        notes.append('summary.json is damaged and was left out; the run writes it again when it ends.')
    return value or {}


def _lines(path: Path, fields: dict[str, type], notes: list[str]) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file that have the fields; says in notes which lines were left out."""
    if not path.is_file():
        notes.append(f'There is no {path.name}: the run has not written any yet.')
        return []
    rows, bad, last = [], [], 0
    with path.open(encoding='utf-8', errors='replace') as file:
        for last, line in enumerate(file, 1):
            row = _parse(line) if line.strip() else {}
            if row is not None and all(isinstance(row.get(name), kind) for name, kind in fields.items()):
                rows.append(row)
            elif row != {}:
                bad.append(last)
    if bad == [last]:
        notes.append(f'The last line of {path.name} (line {last}) is torn and was left out: the run was cut off there.')
    elif bad:
        shown = ', '.join(map(str, bad[:5])) + (', …' if len(bad) > 5 else '')
        notes.append(f'{len(bad)} damaged lines of {path.name} were left out (line {shown}).')
    return rows
