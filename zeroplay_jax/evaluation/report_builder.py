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
from zeroplay_jax.extras import EXTRAS, load_extra
from zeroplay_jax.mini.world import World
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
    'live.js',
)
REQUIRED_FIELDS = {
    'metrics.jsonl': {'step': int, 'phase': str},
    'trajectories.jsonl': {'step': int, 'phase': str, 'role': str, 'segments': list},
    'tasks.jsonl': {'step': int, 'iteration': int, 'phase': str},
    'alarms.jsonl': {'step': int, 'name': str, 'level': str, 'text': str},
}
SUMMARY_OBJECTS = ('results', 'em_by_hop')  # fields of summary.json that are objects
MISSING_SUMMARY = 'the run has not finished, or was killed'
MISSING_CONFIG = 'the config of the run is unknown'
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
    folder = workdirs[0].parent if workdirs[0].is_file() else workdirs[0]
    target = folder / 'report.html'
    if out is not None:
        target = Path(out)
        if not target.parent.is_dir():
            raise UserError(f'{target}: folder {target.parent} does not exist; create it first')
    if target.is_dir():
        raise UserError(
            f'{target} is a folder; pass the path of a file, for example {target / "report.html"}'
        )
    write_text(target, render(read_runs(workdirs)))
    return target


def read_runs(workdirs: Sequence[Path], has_trajectories: bool = True) -> list[dict[str, Any]]:
    """Returns `read_run` of each workdir, with distinct names; errors are those of `write_report`."""
    # `read_run` knows only the last part of the path, which may not be unique.
    named = zip(workdirs, _unique_names(workdirs), strict=True)
    return [read_run(path, has_trajectories) | {'name': name} for path, name in named]


def output_path(name: str | None, suffix: str) -> Path | None:
    """Returns the path of a file to write, None for the default one; raises UserError if it cannot be written."""
    if name is None:
        return None
    out = Path(name)
    if not name.lower().endswith(suffix) and not out.is_dir():
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
      'documents': number of ATIF documents, if the place has those instead of a run;
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
        documents = load_extra('atif').paths(workdir) if 'atif' in EXTRAS else []
        if documents:
            return _read_documents(workdir, documents)
        fix = 'pass the workdir of a run, or ATIF documents'
        # The workdir of `make quickstart CORPUS=…` contains that of its run.
        if (workdir / 'run').is_dir():
            fix += f', for example {workdir / "run"}'
        raise UserError(f'{workdir}: contains none of {", ".join(RUN_FILES)}; {fix}')
    # A run in progress has no summary yet, and a killed run never gets one: missing files become notes, not errors.
    notes: list[str] = []
    summary = _read_object(workdir / 'summary.json', MISSING_SUMMARY, notes)
    for name in SUMMARY_OBJECTS:
        if not isinstance(summary.get(name, {}), dict):
            del summary[name]
            notes.append(f'"{name}" of summary.json is damaged and was ignored.')
    recorded = _read_object(workdir / FILE_NAME, MISSING_CONFIG, notes)
    metrics = read_lines(workdir / 'metrics.jsonl', notes)
    trajectories = read_lines(workdir / 'trajectories.jsonl', notes) if has_trajectories else []
    _add_true_hops(recorded.get('config', {}), trajectories)
    # A run without alarms has no such file.
    alarms = workdir / 'alarms.jsonl'
    alarm_records = read_lines(alarms, notes) if alarms.is_file() else []
    _check_identity(workdir, recorded.get('run', ''), summary, metrics, trajectories)
    texts = _intern_texts(trajectories)
    return {
        'name': workdir.resolve().name,
        'summary': summary,
        'config': recorded.get('config', {}),
        'metrics': metrics,
        'trajectories': trajectories,
        'texts': texts,
        'alarms': alarm_notes(alarm_records),
        'notes': notes,
        'written': _day_written(workdir),
    }


def _day_written(workdir: Path) -> str:
    """Returns the day of the last metrics, such as 2026-03-31; '' without, and for a copy, whose files are younger."""
    path = workdir / 'metrics.jsonl'
    if not path.is_file() or downloads.address_of(str(workdir)) != str(workdir):
        return ''
    return datetime.date.fromtimestamp(path.stat().st_mtime).isoformat()


def _read_documents(place: Path, documents: Sequence[Path]) -> dict[str, Any]:
    """Returns ATIF documents in the form of `read_run`: trajectories alone."""
    trajectories = []
    for path in documents:
        trajectories += load_extra('atif').read(path)
    return {
        'name': place.resolve().name,
        'summary': {},
        'config': {},
        'metrics': [],
        'trajectories': trajectories,
        'texts': _intern_texts(trajectories),
        'alarms': [],
        'documents': len(documents),
        'notes': [],
    }


def _intern_texts(trajectories: list[dict[str, Any]]) -> list[str]:
    """Replaces texts of segments by indices in the returned list, and the turns by what the page shows of their calls.

    The HTML file stores each text once: rollouts of a group share the prompt, and some documents are retrieved often.
    """
    text_ids: dict[str, int] = {}
    for row in trajectories:
        row['segments'] = [_intern_segment(segment, text_ids) for segment in row['segments']]
        row['turns'] = _tool_calls(row.get('turns'))
    return list(text_ids)


def _check_identity(
    workdir: Path,
    here: str,
    summary: dict[str, Any],
    metrics: list[Any],
    trajectories: list[Any],
) -> None:
    """Raises UserError (one line) unless all files that name their run name that of the record; takes the names off."""
    files = {
        'summary.json': [summary],
        'metrics.jsonl': metrics,
        'trajectories.jsonl': trajectories,
    }
    for name, records in files.items():
        for record in records:
            there = record.pop(HASH_FIELD, '')
            # Without the record of the folder, its files are compared with each other.
            here = here or there
            check_hash(workdir / name, there, here)


def render(runs: list[dict[str, Any]], version: str = '') -> str:
    """Returns the HTML text of the report.

    Args:
      runs: results of `read_run`. The first one is the reference of the others; notes about differences that there are
        not are added to theirs.
      version: of the files, for a served page, which loads itself again when the server names another one.
    """
    style = '\n'.join(_asset(name) for name in STYLES)
    script = '\n'.join(_asset(name) for name in SCRIPTS)
    # The first run is the reference and has no difference from itself.
    differences = [None, *(_differences(runs[0], run) for run in runs[1:])]
    data = json.dumps(
        {'runs': runs, 'differences': differences, 'live': version},
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
    if version:
        policy += "; connect-src 'self'"
    page = jinja2.Template(_asset('page.html'), keep_trailing_newline=True)
    return page.render(policy=policy, style=style, script=script, data=data)


def _differences(reference: dict[str, Any], run: dict[str, Any]) -> dict[str, list[float]]:
    """Returns {hop count or 'mean': [difference, low, high]} of a run's last evaluation minus the reference's.

    'mean' averages the hop counts of statistics.HEADLINE. The interval is of paired questions. If a summary lacks
    results per question, or the questions differ, there are none, and the reason is appended to run['notes'].
    """
    before, after = _results(reference), _results(run)
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
    pairs: dict[str, Any] = {
        str(hops): (correct, after_flags[hops]) for hops, correct in before_flags.items()
    }
    pairs['mean'] = (statistics.headline(before_flags), statistics.headline(after_flags))
    return {name: list(statistics.paired_difference(*pair)) for name, pair in pairs.items()}


def _results(run: dict[str, Any]) -> dict[str, Any]:
    """Returns the results per question of a run; {} if its summary has none."""
    return run['summary'].get('results') or {}


def _unique_names(workdirs: Sequence[Path]) -> list[str]:
    """Returns the last part of each path, or as many parts as make the names distinct.

    Raises:
      UserError: two paths are the same folder.
    """
    # Resolved paths: 'runs/a' and 'runs/../runs/a' are the same run.
    paths = [path.resolve() for path in workdirs]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise UserError(f'{workdirs[index]} is listed twice; pass each run once')
    # Terminates: whole paths are distinct.
    length = 1
    while len({path.parts[-length:] for path in paths}) < len(paths):
        length += 1
    return ['/'.join(path.parts[-length:]) for path in paths]


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding='utf-8')


def _csp_hash(text: str) -> str:
    """Returns the source expression with which a content security policy allows an inline element."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _intern_segment(segment: dict[str, Any], text_ids: dict[str, int]) -> list[Any]:
    """Returns [source, id of the text]; new texts are added to `text_ids`."""
    text = str(segment.get('text', ''))
    text_id = text_ids.setdefault(text, len(text_ids))
    return [str(segment.get('source', '')), text_id]


def _tool_calls(turns: Any) -> list[dict[str, Any] | None]:
    """Returns the tool call of each turn, or None for a turn without one; [] for a log without `turns`.

    Texts of results and documents are left out: the segments contain them already.
    """
    if not isinstance(turns, list):
        return []
    # The position in the list is the number of the turn: invalid entries become None instead of being dropped.
    calls: list[dict[str, Any] | None] = []
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get('tool'), str):
            calls.append(None)
            continue
        call = {name: turn.get(name) for name in ('tool', 'arguments', 'error')}
        calls.append(call | {'documents': _document_titles(turn.get('documents'))})
    return calls


def _add_true_hops(config: dict[str, Any], trajectories: list[Any]) -> None:
    """Adds info['true_hops'] to proposals about the miniature world: 0 for a wrong answer, or no question."""
    try:
        if config['retrieval']['kind'] != 'world':
            return
        first_seed, count = config['world']['train']
        near_misses = config['world']['near_misses']
        seeds = range(first_seed, first_seed + count)
        worlds = [World(seed, 'train', near_misses) for seed in seeds]
    # Without the record of the run its config is not known.
    except (KeyError, TypeError, ValueError, UserError):
        return
    for row in trajectories:
        info = row.get('info')
        if not row.get('is_proposal') or not isinstance(info, dict):
            continue
        info['true_hops'] = 0
        for world in worlds:
            answer, hops = world.resolve(str(info.get('question')))
            if answer is not None and [answer] == info.get('answers'):
                info['true_hops'] = hops


def _document_titles(results: Any) -> list[list[Any]]:
    """Returns [title or id, score] of the passages that a call returned, in order; `results` is a list per query."""
    titles: list[list[Any]] = []
    if not isinstance(results, list):
        return titles
    for documents in results:
        # One result list per query of the call.
        if not isinstance(documents, list):
            continue
        for document in documents:
            if isinstance(document, dict):
                # Not all corpora have titles.
                title = document.get('title') or document.get('id')
                titles.append([str(title), document.get('score')])
    return titles


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


def _is_valid(row: dict[str, Any], required: dict[str, type]) -> bool:
    """Returns whether a row has the required fields with their types."""
    if not all(isinstance(row.get(field), kind) for field, kind in required.items()):
        return False
    segments = row['segments'] if 'segments' in required else []
    return all(isinstance(segment, dict) for segment in segments)


def read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Returns the valid objects of a JSON-lines file of `REQUIRED_FIELDS`.

    Appends a sentence to `notes` if the file is missing, or one that counts the invalid lines and names the first ones.
    """
    if not path.is_file():
        notes.append(f'There is no {path.name}: the run has not written it yet.')
        return []
    required = REQUIRED_FIELDS[path.name]
    rows = []
    damaged_lines = []
    line_count = 0
    with path.open('rb') as file:
        for line_count, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                # Numbers that are not finite become null, because the JSON parser of browsers rejects them.
                row = json_text.parse_object(line, json_text.null)
            except json_text.Unusable:
                row = {}
            if _is_valid(row, required):
                rows.append(row)
            else:
                damaged_lines.append(line_count)
    if damaged_lines == [line_count]:
        # A killed run leaves half a line at the end of the file; the other lines are not suspect.
        notes.append(
            f'The last line of {path.name} (line {line_count}) is incomplete and was ignored: '
            'the run was interrupted there.'
        )
    elif damaged_lines:
        numbers = ', '.join(map(str, damaged_lines[:LINES_IN_NOTE]))
        if len(damaged_lines) > LINES_IN_NOTE:
            numbers += ', …'
        notes.append(
            f'{len(damaged_lines)} damaged lines of {path.name} were ignored (line {numbers}).'
        )
    return rows


# ---- alarms in the report --------------------------------------------------------------------------


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
