"""Reads and writes ATIF documents (Agent Trajectory Interchange Format, Harbor's RFC 0001).

    zeroplay atif jobs/some
    zeroplay atif trajectory.json --out page.html
    zeroplay atif runs/mini --documents rollouts

Shows documents of other agents as a page, that of a run's rollouts. With --documents: writes the logged rollouts of a
run as documents, a JSON file each.

A step of the agent is one turn of the policy: the exact text, markup included, the tool call in it, and as observation
the result, without the chat template's text around it. What a recipe or an environment says between turns is a step of
a user. The format has no field for rewards; ours stand in `extra`. The text of the chat template is that of the
checkpoint which the run began with.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import zeroplay_jax
from zeroplay_jax.configuration.fields import read_stored_config
from zeroplay_jax.configuration.places import fetch_model
from zeroplay_jax.evaluation import report_builder
from zeroplay_jax.retrieval import json_text
from zeroplay_jax.retrieval.command import Parser, exit_status
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.runtime.workdir import local_run
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT, is_server
from zeroplay_jax.types import UserError

# The oldest version that has all fields used here.
VERSION = 'ATIF-v1.7'
# Author of a step → author of its text in the report.
_AUTHORS = {'system': 'prompt', 'user': 'prompt', 'agent': 'policy'}
# Fields of a record that stand elsewhere in its document.
_ELSEWHERE = ('segments', 'turns', 'turn_rewards', 'run', 'role')
_DOCUMENT = ('id', 'title', 'score')
# Also where keys are sorted, this one stands before the steps.
_MARK = re.compile(rb'"schema_version"\s*:\s*"ATIF-')
_MARK_WITHIN = 2**16  # bytes
_QUESTION_LENGTH = 200  # characters of a task that the report shows in its list


class Frames(NamedTuple):
    """What the chat template of a run writes behind a turn.

    Attributes:
      user: text before and behind a message of a user.
      result: text before and behind the result of a call; empty where results are no messages.
      ends: texts of the tokens that may end a turn; one that was sampled stands for the template's own.
    """

    user: tuple[str, str] = ('', '')
    result: tuple[str, str] = ('', '')
    ends: tuple[str, ...] = ()

    def note(self, text: str, said: str, call: dict[str, Any] | None) -> str | None:
        """Returns the message of a user that stands behind a turn; None if the result of its call stands there.

        Args:
          text: of the environment.
          said: text of the turn.
          call: of the turn.
        """
        before, behind = self.user
        for end in self.ends:
            if said.endswith(end):
                before = before.removeprefix(end)
        # Some templates write results as messages of a user.
        is_result = call and self.result[0] and text.startswith(self.result[0])
        if is_result or not before or not text.startswith(before):
            return None
        return text.removeprefix(before).removesuffix(behind)


def frames_of(workdir: pathlib.Path) -> Frames:
    """Returns the frames of a run, from the checkpoint that it began with.

    Raises:
      UserError: the folder is no workdir of a run, or the checkpoint cannot be read.
    """
    # They load transformers, which the page does not need.
    from zeroplay_jax.rollout.call_syntax import syntax_for
    from zeroplay_jax.rollout.tokens import open_codec

    config = read_stored_config(workdir)
    if config is None:
        raise UserError(f'{workdir}: has no {run_record.FILE_NAME}; pass the workdir of a run')
    if is_server(config.policy.path):
        return Frames()
    start = fetch_model('config.policy.path', config.policy.path) or BUILT_IN_CHECKPOINT
    codec = open_codec(pathlib.Path(start))
    template = codec.template

    def frame(role: str) -> tuple[str, str]:
        *_, before, behind = template.layout(('user', 'assistant', role)).between
        return before, behind

    has_results = syntax_for(config).writes_messages and template.tool_role
    return Frames(
        user=frame('user'),
        result=frame(template.tool_role) if has_results else ('', ''),
        ends=tuple(codec.decode([token]) for token in codec.eos_ids),
    )


def to_document(
    record: dict[str, Any], tools: dict[str, Any], number: int, version: str, frames: Frames
) -> dict[str, Any]:
    """Returns the ATIF document of a line of trajectories.jsonl.

    Args:
      record: the line.
      tools: name → recorded description of the tools of its role (run.json).
      number: position of the line in the log.
      version: of this package.
      frames: of the run.
    """
    steps: list[dict[str, Any]] = []
    calls = iter(record.get('turns') or ())
    turn_rewards = iter(record.get('turn_rewards') or ())
    call, call_id, said = None, '', ''
    for segment in record['segments']:
        source, text = segment['source'], segment['text']
        if source == 'policy':
            call, said = next(calls, None), text
            call_id = f'call_{len(steps) + 1}'
            steps.append(_agent_step(text, call, call_id, next(turn_rewards, None)))
            continue
        note: str | None = text
        if source == 'env' and call_id:
            note = frames.note(text, said, call)
        if note is not None:
            steps.append({'source': 'user', 'message': note})
            continue
        results = steps[-1].setdefault('observation', {'results': []})['results']
        before, behind = frames.result
        content = text.removeprefix(before).removesuffix(behind)
        results.append(_result(content, call, call_id))
    agent = {'name': record['role'], 'version': version}
    if tools:
        functions = [
            {'name': name, 'description': tool['description'], 'parameters': tool['parameters']}
            for name, tool in tools.items()
        ]
        agent['tool_definitions'] = [{'type': 'function', 'function': one} for one in functions]
    return {
        'schema_version': VERSION,
        'session_id': record.get('run', ''),
        'trajectory_id': f'{number:06}-step{record["step"]}-{record["role"]}',
        'agent': agent,
        'steps': [{'step_id': position} | step for position, step in enumerate(steps, 1)],
        'final_metrics': {'total_steps': len(steps)},
        'extra': {key: value for key, value in record.items() if key not in _ELSEWHERE},
    }


def _agent_step(
    text: str, call: dict[str, Any] | None, call_id: str, turn_reward: float | None
) -> dict[str, Any]:
    """Returns a turn of the policy as a step, without its observation."""
    step: dict[str, Any] = {'source': 'agent', 'message': text}
    if call is not None:
        # A call that could not be read has no arguments, or others than an object.
        entry = {
            'tool_call_id': call_id,
            'function_name': call['tool'],
            'arguments': _object(call['arguments']),
        }
        if call['error']:
            entry['extra'] = {'error': call['error']}
        step['tool_calls'] = [entry]
    if turn_reward is not None:
        step['extra'] = {'reward': turn_reward}
    return step


def _result(text: str, call: dict[str, Any] | None, call_id: str) -> dict[str, Any]:
    """Returns what the environment inserted after a turn, with ids, titles and scores of the documents in it."""
    result: dict[str, Any] = {'content': text}
    if call is not None:
        result['source_call_id'] = call_id
        documents = []
        for documents_of_query in call.get('documents') or ():
            documents += [{key: one.get(key) for key in _DOCUMENT} for one in documents_of_query]
        if documents:
            result['extra'] = {'documents': documents}
    return result


def write_documents(workdir: pathlib.Path, out: pathlib.Path) -> int:
    """Writes a document for each logged rollout of a run, in the order of the log; returns how many.

    Raises:
      UserError: the folder has no logged rollouts, or `out` exists; or as `frames_of`.
      OSError: `out` cannot be written.
    """
    log = workdir / 'trajectories.jsonl'
    records = report_builder.read_lines(log, [])
    if not records:
        raise UserError(f'{log}: has no rollouts; pass the workdir of a run that logs some')
    if out.exists():
        raise UserError(f'{out}: exists already; choose another folder or remove it')
    frames = frames_of(workdir)
    tools = run_record.recorded(workdir).tools or {}
    out.mkdir(parents=True)
    try:
        for number, record in enumerate(records):
            role_tools = tools.get(record['role'], {})
            document = to_document(record, role_tools, number, zeroplay_jax.__version__, frames)
            text = json.dumps(document, ensure_ascii=False, indent=1)
            write_text(out / f'{document["trajectory_id"]}.json', f'{text}\n')
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    return len(records)


def paths(place: pathlib.Path) -> list[pathlib.Path]:
    """Returns the ATIF files of a place: the file itself, or all below a folder, such as a job of Harbor."""
    files = [place] if place.is_file() else sorted(place.rglob('*.json'))
    return [path for path in files if path.is_file() and _is_document(path)]


def _is_document(path: pathlib.Path) -> bool:
    # The folder may be any, with large files of other kinds.
    with path.open('rb') as file:
        return _MARK.search(file.read(_MARK_WITHIN)) is not None


def read(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields records as in trajectories.jsonl: of a document, then of the documents of subagents in it.

    Raises:
      UserError: the file is damaged, or a step is not as the format has it.
    """
    document = json_text.load_object(path, 'remove it or write it again', json_text.null)
    # Where our documents have the reward, and where a job of Harbor keeps that of its trial.
    reward = _object(document.get('extra')).get('reward')
    verdict = path.parent.parent / 'verifier' / 'reward.txt'
    if path.parent.name == 'agent' and verdict.is_file():
        reward = verdict.read_text(errors='replace')
    yield from _records(document, path, _number(reward))


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _records(
    document: dict[str, Any], path: pathlib.Path, reward: float | None
) -> Iterator[dict[str, Any]]:
    steps = document.get('steps')
    if not isinstance(steps, list):
        raise UserError(f'{path}: "steps" must be a list, as in the ATIF format')
    segments: list[dict[str, str]] = []
    turns: list[dict[str, Any] | None] = []
    task = ''
    for number, step in enumerate(steps, 1):
        if not isinstance(step, dict) or str(step.get('source')) not in _AUTHORS:
            raise UserError(
                f'{path}: step {number} must be an object whose "source" is one of {", ".join(_AUTHORS)}'
            )
        text = _text(step.get('message'))
        if step['source'] == 'user':
            task = task or text
        for segment, call in _segments(step, text):
            segments.append(segment)
            if segment['source'] == 'policy':
                turns.append(call)
    agent = _object(document.get('agent'))
    info: dict[str, Any] = {
        'question': ' '.join(task.split())[:_QUESTION_LENGTH],
        'file': str(path),
        'agent_version': agent.get('version'),
        'agent_model_name': agent.get('model_name'),
    }
    for name in ('session_id', 'trajectory_id', 'notes', 'continued_trajectory_ref'):
        info[name] = document.get(name)
    info |= _object(document.get('final_metrics'))
    # Each is a task of its own.
    yield {
        'group': str(path),
        'step': 0,
        'phase': 'rollouts',
        'reward': reward,
        'advantage': None,
        'drop': None,
        'role': str(agent.get('name', 'agent')),
        'info': {name: value for name, value in info.items() if value is not None},
        'segments': segments,
        'turns': turns,
    }
    for part in _list(document.get('subagent_trajectories')):
        yield from _records(_object(part), path, None)


def _segments(
    step: dict[str, Any], text: str
) -> Iterator[tuple[dict[str, str], dict[str, Any] | None]]:
    """Yields the segments of a step in order, each with the tool call that ended it or None."""
    author = _AUTHORS[step['source']]
    # The format says that such steps are context, not what the agent wrote here.
    if step.get('is_copied_context'):
        author = 'prompt'
    if step.get('reasoning_content'):
        text = f'<think>{step["reasoning_content"]}</think>{text}'
    calls = [_call(call) for call in _list(step.get('tool_calls')) if isinstance(call, dict)]
    # A step may have several calls; one stands behind each piece of the policy's text.
    for call in calls or (None,):
        yield {'source': author, 'text': text}, call
        text = ''
    for result in _list(_object(step.get('observation')).get('results')):
        content = _object(result)
        found = _text(content.get('content'))
        for reference in _list(content.get('subagent_trajectory_ref')):
            found += f' [subagent: {json.dumps(reference, ensure_ascii=False)}]'
        yield {'source': 'env', 'text': found}, None


def _call(call: dict[str, Any]) -> dict[str, Any]:
    error = _object(call.get('extra')).get('error')
    return {
        'tool': str(call.get('function_name')),
        'arguments': call.get('arguments'),
        'error': error,
    }


def _text(message: Any) -> str:
    """Returns a message, which is a text or a list of parts: texts, and images by their path."""
    if not isinstance(message, list):
        return '' if message is None else str(message)
    parts = []
    for part in map(_object, message):
        image = _object(part.get('source')).get('path')
        parts.append(
            f'[image: {image}]' if part.get('type') == 'image' else str(part.get('text', ''))
        )
    return '\n'.join(parts)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def main(argv: list[str] | None = None) -> int:
    """Writes the page and prints its path; returns the exit status (`exit_status`)."""
    return exit_status('zeroplay atif', lambda: _run(argv), 'choose another file')


def _run(argv: list[str] | None) -> None:
    parser = Parser(prog='zeroplay atif', description=__doc__)
    parser.add_argument(
        'place', metavar='PLACE', help='a document, a folder with some, or the workdir of a run'
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        '--out', metavar='FILE.html', help='default: report.html in PLACE, or beside it'
    )
    kinds.add_argument(
        '--documents',
        type=pathlib.Path,
        metavar='FOLDER',
        help='new folder for the logged rollouts of the run whose workdir is PLACE, a path or gs://bucket/path',
    )
    arguments = parser.parse_args(argv)
    if arguments.documents:
        count = write_documents(local_run(arguments.place), arguments.documents)
        print(f'{arguments.documents}: {count} rollouts')
        return
    place = pathlib.Path(arguments.place)
    folder = place.parent if place.is_file() else place
    out = report_builder.output_path(arguments.out, '.html') or folder / 'report.html'
    documents = paths(place)
    if not documents:
        raise UserError(f'{place}: has no ATIF document; name one, or a folder with some')
    logged = [row for path in documents for row in read(path)]
    shown = {'kind': 'ATIF documents', 'hidden': ['outcome', 'curves', 'config']}
    page = report_builder.page_data(place, logged) | shown
    write_text(out, report_builder.render([page]))
    print(out)


if __name__ == '__main__':
    sys.exit(main())
