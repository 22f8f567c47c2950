"""One self-contained page on which to read a run, or to compare several: outcome, curves, trajectories, configs.

Reads what the engine wrote into the workdirs (`metrics.jsonl`, `trajectories.jsonl`, `summary.json`, `config.json`)
and nothing else, so it also works on a run that is still going or was killed. The page loads nothing from the
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

import numpy as np

from zeroplay_jax.evaluation import statistics
from zeroplay_jax.runtime.atomic import write_text
from zeroplay_jax.types import UserError

ASSETS = Path(__file__).parent / 'report_page'
STYLES = ('style.css', 'reader.css')
SCRIPTS = (
    'core.js',
    'metrics.js',
    'outcome.js',
    'charts.js',
    'questions.js',
    'curves.js',
    'trajectory.js',
    'reader.js',
    'config.js',
)
REQUIRED = {
    'metrics.jsonl': {'step': int, 'phase': str},
    'trajectories.jsonl': {'step': int, 'phase': str, 'role': str, 'segments': list},
}
UNWRITTEN = {
    'summary.json': 'the run has not ended, or was killed before it did',
    'config.json': 'the fields of the run are not known',
}


def write_report(
    workdir: str | os.PathLike[str],
    *others: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
) -> Path:
    """Writes the page of a run, or of several side by side, replacing an earlier one in one move.

    Args:
      workdir: a run's folder; of several the one that the others are compared with.
      others: more of them.
      out: the file to write; `report.html` in `workdir` unless told.

    Returns:
      The path of the page.

    Raises:
      UserError: a folder is not there, holds no run or is named twice, or `out` cannot be a file.
    """
    folders = [Path(folder) for folder in (workdir, *others)]
    names = _names(folders)
    target = folders[0] / 'report.html' if out is None else Path(out)
    if target.is_dir():
        raise UserError(
            f'{target} is a folder; name the file to write, for example {target / "report.html"}'
        )
    if out is not None and not target.parent.is_dir():
        raise UserError(f'{target}: there is no folder {target.parent}; make it first')
    runs = [read_run(folder) | {'name': name} for folder, name in zip(folders, names, strict=True)]
    page = render(runs)
    write_text(target, page)
    return target


def read_run(workdir: Path) -> dict[str, Any]:
    """What a workdir says about its run, JSON-able.

    Args:
      workdir: a run's folder.

    Returns:
      {'name': str, 'summary', 'config': the objects of `summary.json` and `config.json` or {}, 'metrics': list of
      objects, 'trajectories': list of objects whose segments are [source, index into 'texts'], 'texts': list of
      distinct strings (prompts and passages recur), 'notes': sentences about what is missing or damaged}.

    Raises:
      UserError: the folder is not there or holds no file of a run.
    """
    names = ('summary.json', *REQUIRED)
    if not workdir.is_dir():
        raise UserError(
            f'{workdir}: there is no such folder; give the workdir of a run, for example runs/quickstart'
        )
    if not any((workdir / name).is_file() for name in names):
        raise UserError(
            f'{workdir}: none of {", ".join(names)} is there; give the workdir of a run'
        )
    notes: list[str] = []
    texts: dict[str, int] = {}
    summary, config = (_object(workdir / name, why, notes) for name, why in UNWRITTEN.items())
    metrics, trajectories = (
        _lines(workdir / name, fields, notes) for name, fields in REQUIRED.items()
    )
    for row in trajectories:
        row['segments'] = [_interned(segment, texts) for segment in row['segments']]
    return {
        'name': workdir.resolve().name,
        'summary': summary,
        'config': config,
        'metrics': metrics,
        'trajectories': trajectories,
        'texts': list(texts),
        'notes': notes,
    }


def render(runs: list[dict[str, Any]]) -> str:
    """The page for runs of `read_run`, as HTML text; style, script and data are inside it."""
    style, script = ('\n'.join(_asset(name) for name in names) for names in (STYLES, SCRIPTS))
    against = [None, *(_against(runs[0], run) for run in runs[1:])]
    # '<' can only stand inside a JSON string, where the escape means the same: no text can end the element.
    data = json.dumps({'runs': runs, 'against': against}, allow_nan=False, separators=(',', ':'))
    data = data.replace('<', '\\u003c')
    sources = f'style-src {_hash(style)}; script-src {_hash(script)}'
    policy = f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"
    parts = {'POLICY': policy, 'STYLE': style, 'SCRIPT': script, 'DATA': data}
    pieces = _asset('page.html').split('%%')
    # odd pieces are names of parts; joining once never looks for a marker inside the data
    return ''.join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _against(first: dict[str, Any], run: dict[str, Any]) -> dict[str, list[float]]:
    """How a run's last evaluation differs from the first run's: hop count, or 'mean', → [difference, low, high].

    Paired by question, so both summaries must hold the results of the same questions; without them the plain
    differences stand without an interval, and the run's notes say why.
    """
    sides = [one['summary'].get('results') or {} for one in (first, run)]
    try:
        flags = [
            {int(hop): np.asarray(values) for hop, values in side.get('after', {}).items()}
            for side in sides
        ]
    except (AttributeError, ValueError):  # what a run does not write there
        flags = [{}]
    why = ''
    if not all(flags):
        why = 'summary.json does not hold the result of every question'
    elif sides[0].get('questions') != sides[1].get('questions'):
        why = 'the held-out questions are others'
    if why:
        run['notes'].append(
            f'No interval for the difference to {first["name"]}: {why} there or here.'
        )
        return _plain_differences(first['summary'], run['summary'])
    by_hop = {
        str(hop): statistics.paired_difference(flags[0][hop], flags[1][hop]) for hop in flags[0]
    }
    mean = statistics.paired_difference(*(statistics.headline(side) for side in flags))
    return {hop: list(values) for hop, values in {**by_hop, 'mean': mean}.items()}


def _plain_differences(first: dict[str, Any], run: dict[str, Any]) -> dict[str, list[float]]:
    sides = [
        {**summary.get('em_by_hop', {}).get('after', {}), 'mean': summary.get('em_after')}
        for summary in (first, run)
    ]
    both = [hop for hop in sides[0] if sides[0][hop] is not None and sides[1].get(hop) is not None]
    return {hop: [sides[1][hop] - sides[0][hop]] for hop in both}


def _names(folders: list[Path]) -> list[str]:
    """The last part of every path, or as many as tell them apart."""
    paths = [folder.resolve() for folder in folders]
    for i, path in enumerate(paths):
        if path in paths[:i]:
            raise UserError(f'{folders[i]} is named twice; name every run once')
    width = 1
    while len({path.parts[-width:] for path in paths}) < len(paths):
        width += 1
    return ['/'.join(path.parts[-width:]) for path in paths]


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


def _object(path: Path, why: str, notes: list[str]) -> dict[str, Any]:
    """The object in a JSON file, {} without one; says in notes what is wrong with it."""
    if not path.is_file():
        notes.append(f'There is no {path.name}: {why}.')
        return {}
    value = _parse(path.read_text(encoding='utf-8', errors='replace'))
    if value is None:
        notes.append(f'{path.name} is damaged and was left out.')
    return value or {}


def _has(row: dict[str, Any], fields: dict[str, type]) -> bool:
    whole = all(isinstance(row.get(name), kind) for name, kind in fields.items())
    return whole and (
        'segments' not in fields or all(isinstance(part, dict) for part in row['segments'])
    )


def _lines(path: Path, fields: dict[str, type], notes: list[str]) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file that have the fields; says in notes which lines were left out."""
    if not path.is_file():
        notes.append(f'There is no {path.name}: the run has not written any yet.')
        return []
    rows, bad, last = [], [], 0
    with path.open(encoding='utf-8', errors='replace') as file:
        for last, line in enumerate(file, 1):
            row = _parse(line) if line.strip() else {}
            if row is not None and _has(row, fields):
                rows.append(row)
            elif row != {}:
                bad.append(last)
    if bad == [last]:
        notes.append(
            f'The last line of {path.name} (line {last}) is torn and was left out: the run was cut off there.'
        )
    elif bad:
        shown = ', '.join(map(str, bad[:5])) + (', …' if len(bad) > 5 else '')
        notes.append(f'{len(bad)} damaged lines of {path.name} were left out (line {shown}).')
    return rows
