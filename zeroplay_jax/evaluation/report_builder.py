"""Builds a self-contained HTML report of one run, or of several runs side by side.

The report shows the evaluation before and after training, the metric curves, the logged trajectories and the
configs. Its only sources are the files of the workdirs (`metrics.jsonl`, `trajectories.jsonl`, `summary.json`,
`run.json`), so it also works for a run that is still in progress or was killed.

The HTML file loads nothing from the network. Its content security policy allows only the scripts and styles that
are part of it, whatever text a document or a model contains.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from zeroplay_jax.evaluation import statistics
from zeroplay_jax.retrieval import downloads, json_text
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.runtime.record import FILE_NAME, HASH_FIELD, check_hash
from zeroplay_jax.types import UserError

ASSETS = Path(__file__).parent / 'report_page'
STYLES = ('vendor/uPlot.min.css', 'style.css', 'reader.css')
# core.js comes first because its 'use strict' has to be the first statement of the joined script.
SCRIPTS = (
    'core.js',
    'vendor/uPlot.iife.min.js',
    'metrics.js',
    'outcome.js',
    'charts.js',
    'questions.js',
    'curves.js',
    'trajectory.js',
    'reader.js',
    'pairs.js',
    'config.js',
)
REQUIRED_FIELDS = {
    'metrics.jsonl': {'step': int, 'phase': str},
    'trajectories.jsonl': {'step': int, 'phase': str, 'role': str, 'segments': list},
    'tasks.jsonl': {'step': int, 'iteration': int, 'phase': str},
    'alarms.jsonl': {'step': int, 'name': str, 'level': str, 'text': str},
}
SUMMARY_OBJECTS = ('results', 'em_by_hop')  # fields of summary.json that are objects
RUN_FILES = ('summary.json', 'metrics.jsonl', 'trajectories.jsonl')
LINES_IN_NOTE = 5  # line numbers of damaged lines that a note lists


def write_report(
    workdir: str | os.PathLike[str],
    *others: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
) -> Path:
    """Writes the report of a run, or of several runs side by side; replaces an earlier file atomically.

    Args:
      workdir: workdir of a run; of several runs, the one that the others are compared with.
      others: workdirs of more runs.
      out: path of the HTML file (default: `report.html` in `workdir`).

    Returns:
      The path of the HTML file.

    Raises:
      UserError: a workdir does not exist, contains no run or is listed twice, or `out` cannot be written.
    """
    workdirs = list(map(Path, (workdir, *others)))
    target = output_path(out, '.html') or workdirs[0] / 'report.html'
    write_text(target, render(read_runs(workdirs)))
    return target


def read_runs(workdirs: Sequence[Path], has_trajectories: bool = True) -> list[dict[str, Any]]:
    """Returns `read_run` of each workdir, with distinct names; errors are those of `write_report`."""
    # `read_run` knows only the last part of the path, which may not be unique.
    named = zip(workdirs, _unique_names(workdirs), strict=True)
    return [read_run(path, has_trajectories) | {'name': name} for path, name in named]


def output_path(name: str | os.PathLike[str] | None, suffix: str) -> Path | None:
    """Returns the path of a file to write, None for the default one; raises UserError if it cannot be written."""
    if name is None:
        return None
    out = Path(name)
    if out.is_dir():
        raise UserError(f'{out} is a folder; pass the path of a file, such as {out}/report{suffix}')
    if out.suffix.lower() != suffix:
        raise UserError(f'{out}: end its name with {suffix}, which is what is written')
    if not out.parent.is_dir():
        raise UserError(f'{out}: folder {out.parent} does not exist; create it first')
    return out


def read_run(workdir: Path, has_trajectories: bool = True) -> dict[str, Any]:
    """Reads the files of a workdir into JSON-serialisable data.

    Args:
      workdir: workdir of a run.
      has_trajectories: whether to read the trajectories, which may be large.

    Returns:
      A dict with the keys
      'name': str;
      'summary', 'config': the object of `summary.json` and the config in `run.json`, or {};
      'metrics': list of objects;
      'trajectories': list of objects, whose segments are [source, index into 'texts'];
      'texts': list of distinct strings, because prompts and documents recur;
      'alarms': sentences about alarms of the run;
      'notes': sentences about missing or damaged files;
      'written': day of the last metrics, or ''.

    Raises:
      UserError: the folder does not exist or contains no file of a run, or files of several runs.
    """
    if not workdir.exists():
        raise UserError(
            f'{workdir}: no such folder; pass the workdir of a run, for example runs/quickstart'
        )
    if not any((workdir / name).is_file() for name in RUN_FILES):
        fix = 'pass the workdir of a run'
        # The workdir of `make quickstart CORPUS=…` contains that of its run.
        runs = [str(path) for path in sorted(workdir.glob('run*')) if path.is_dir()]
        if runs:
            fix += f', for example {" or ".join(runs)}'
        raise UserError(f'{workdir}: contains none of {", ".join(RUN_FILES)}; {fix}')
    # A run in progress has no summary yet, and a killed run never gets one: missing files become notes, not errors.
    notes: list[str] = []
    summary = _read_object(
        workdir / 'summary.json', 'the run has not finished, or was killed', notes
    )
    for name in SUMMARY_OBJECTS:
        if not isinstance(summary.get(name, {}), dict):
            del summary[name]
            notes.append(f'"{name}" of summary.json is damaged and was ignored.')
    record = _read_object(workdir / FILE_NAME, 'the config of the run is unknown', notes)
    config = record.get('config', {})
    metrics = read_lines(workdir / 'metrics.jsonl', notes)
    logged = read_lines(workdir / 'trajectories.jsonl', notes) if has_trajectories else []
    # A run without alarms has no such file.
    alarms = workdir / 'alarms.jsonl'
    alarm_records = read_lines(alarms, notes) if alarms.is_file() else []
    # All files that name their run name that of the record; without one they are compared with each other.
    run = record.get('run', '')
    for name, rows in zip(RUN_FILES, ([summary], metrics, logged), strict=True):
        for row in rows:
            there = row.pop(HASH_FIELD, '')
            run = run or there
            check_hash(workdir / name, there, run)
    # Copies from a bucket are younger than the run.
    is_copy = downloads.address_of(str(workdir)) != str(workdir)
    written = ''
    if metrics and not is_copy:
        time = (workdir / 'metrics.jsonl').stat().st_mtime
        written = datetime.date.fromtimestamp(time).isoformat()
    data = page_data(workdir, logged)
    return data | {
        'summary': summary,
        'config': config,
        'metrics': metrics,
        'alarms': alarm_notes(alarm_records),
        'notes': [*notes, *data['notes']],
        'written': written,
    }


def page_data(place: Path, logged: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the form of `read_run` with trajectories alone, whose texts are stored once.

    Rollouts of a group share the prompt, and some documents are retrieved often. What is no rollout of this version is
    left out.
    """
    text_ids: dict[str, int] = {}
    trajectories, damaged = [], 0
    for row in logged:
        try:
            segments = []
            for segment in row['segments']:
                # Raises for another type.
                text = '' + segment['text']
                segments.append([segment['source'], text_ids.setdefault(text, len(text_ids))])
            # The position in the list is the number of the turn, of which not every one has a call.
            turns = [None if turn is None else _call(turn) for turn in row.get('turns', ())]
            trajectories.append(row | {'segments': segments, 'turns': turns})
        except (AttributeError, KeyError, TypeError):
            damaged += 1
    lines = [f'{damaged} damaged rollouts were ignored.'] if damaged else []
    empty: dict[str, Any] = {'summary': {}, 'config': {}, 'metrics': [], 'alarms': []}
    shown = {'trajectories': trajectories, 'texts': list(text_ids), 'notes': lines}
    return {'name': place.resolve().name} | empty | shown


def _call(turn: dict[str, Any]) -> dict[str, Any]:
    """Returns what the page shows of a tool call: of its passages title or id and score, because texts are segments."""
    documents = []
    for passages in turn.get('documents') or ():
        documents += [
            [str(one.get('title') or one.get('id')), one.get('score')] for one in passages
        ]
    shown = {name: turn[name] for name in ('tool', 'arguments', 'error')}
    return shown | {'documents': documents}


def render(runs: list[dict[str, Any]]) -> str:
    """Returns the HTML text of the report.

    Args:
      runs: results of `read_run`. The first one is the reference of the others; notes about differences that there are
        not are added to theirs.
    """
    style = '\n'.join(_asset(name) for name in STYLES)
    script = '\n'.join(_asset(name) for name in SCRIPTS)
    # The first run is the reference and has no difference from itself.
    differences = [None, *(_differences(runs[0], run) for run in runs[1:])]
    data = json.dumps(
        {'runs': runs, 'differences': differences},
        allow_nan=False,
        separators=(',', ':'),
    )
    # In JSON, '<' occurs only inside strings, where the escape is equivalent. No text can close the script element.
    data = data.replace('<', '\\u003c')
    # A hash allows one exact text, so a script that is inserted later does not run.
    policy = (
        f"default-src 'none'; style-src {_csp_hash(style)}; script-src {_csp_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    page = jinja2.Template(_asset('page.html'), keep_trailing_newline=True)
    return page.render(policy=policy, style=style, script=script, data=data)


def _differences(reference: dict[str, Any], run: dict[str, Any]) -> dict[str, list[float]]:
    """Returns {hop count or 'mean': [difference, low, high]} of a run's last evaluation minus the reference's.

    'mean' averages the hop counts of statistics.HEADLINE. The interval is of paired questions. If a summary lacks
    results per question, or the questions differ, there are none, and the reason is appended to run['notes'].
    """
    before, after = (one['summary'].get('results') or {} for one in (reference, run))
    before_flags = statistics.flags_of(before.get('after'))
    after_flags = statistics.flags_of(after.get('after'))
    # A difference between different questions would not measure the policies.
    reason = ''
    if not before_flags or not after_flags:
        reason = 'one summary.json has no results per question'
    elif before.get('questions') != after.get('questions'):
        reason = 'the held-out questions differ'
    elif before_flags.keys() != after_flags.keys():
        reason = 'the hop counts differ'
    if reason:
        run['notes'].append(f'No difference from {reference["name"]}: {reason}.')
        return {}
    documents = {int(hops): names for hops, names in (before.get('documents') or {}).items()}
    pairs: dict[str, Any] = {
        str(hops): (correct, after_flags[hops], documents.get(hops))
        for hops, correct in before_flags.items()
    }
    headlines = map(statistics.headline, (before_flags, after_flags))
    pairs['mean'] = (*headlines, documents)
    return {name: list(statistics.paired_difference(*pair)) for name, pair in pairs.items()}


def _unique_names(workdirs: Sequence[Path]) -> list[str]:
    """Returns the last part of each path; the paths as they are given, where two would be equal.

    Raises:
      UserError: two paths are the same folder.
    """
    # Resolved paths: 'runs/a' and 'runs/../runs/a' are the same run.
    paths = [path.resolve() for path in workdirs]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise UserError(f'{workdirs[index]} is listed twice; pass each run once')
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else list(map(str, workdirs))


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding='utf-8')


def _csp_hash(text: str) -> str:
    """Returns the source expression with which a content security policy allows an inline element."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _read_object(path: Path, missing: str, notes: list[str]) -> dict[str, Any]:
    """Returns the object of a JSON file, or {} with a note: `missing` if the file does not exist."""
    if not path.is_file():
        notes.append(f'There is no {path.name}: {missing}.')
        return {}
    try:
        return json_text.read_object(path, json_text.null)
    except json_text.Unusable as error:
        notes.append(f'{path.name} is damaged and was ignored ({error}).')
        return {}


def read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Returns the valid objects of a JSON-lines file of `REQUIRED_FIELDS`.

    Appends a sentence to `notes` if the file is missing, or one that counts the invalid lines and names the first ones.
    """
    if not path.is_file():
        notes.append(f'There is no {path.name}: the run has not written it yet.')
        return []
    rows = []
    damaged = []
    with path.open('rb') as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                # Numbers that are not finite become null, because the JSON parser of browsers rejects them.
                row = json_text.parse_object(line, json_text.null)
            except json_text.Unusable:
                row = {}
            required = REQUIRED_FIELDS[path.name].items()
            if all(isinstance(row.get(name), kind) for name, kind in required):
                rows.append(row)
            else:
                damaged.append(number)
    if damaged:
        # A killed run leaves half a line at the end of the file.
        numbers = ', '.join(map(str, damaged[:LINES_IN_NOTE]))
        more = ', …' if len(damaged) > LINES_IN_NOTE else ''
        notes.append(
            f'{len(damaged)} damaged lines of {path.name} were ignored (line {numbers}{more}).'
        )
    return rows


def alarm_notes(alarms: Iterable[dict[str, Any]]) -> list[str]:
    """Returns a sentence per alarm and level: how often, first and last step, and its last line.

    Args:
      alarms: the objects in alarms.jsonl of a run.
    """
    records_of_kind: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in alarms:
        records_of_kind.setdefault((record['name'], record['level']), []).append(record)
    notes = []
    for (name, level), records in records_of_kind.items():
        steps = [record['step'] for record in records]
        place = f'step {steps[0]}'
        if len(steps) > 1:
            place = f'{len(steps)} times, steps {min(steps)} to {max(steps)}'
        word = 'stopped the run' if level == 'stop' else 'warning'
        notes.append(f'Alarm {name} ({word}, {place}): {records[-1]["text"]}.')
    return notes
