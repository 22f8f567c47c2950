"""Metrics of a step that show a run going wrong while its rewards look well; `training.alarms` watches them.

They are computed once per step, on the host, from the rows. A figure that would rest on a few rows is left out.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Container, Iterable, Mapping, Sequence

from zeroplay_jax.objectives.answers import normalize_answer, sub_exact_match
from zeroplay_jax.objectives.types import Stats
from zeroplay_jax.types import Row, Trajectory

# A share of fewer cases is no evidence: two malformed calls of two are no broken tool.
MIN_CASES = 8
# The same for searches if all of them find nothing.
_MIN_ALL_EMPTY = 2
# Calls are judged only if at least this share of the rollouts makes one: a proposer that needs no search and
# sometimes writes half a call has no broken tool either.
_MIN_CALLS_PER_ROLLOUT = 0.25
# Smallest score of an answer that counts as correct; graded metrics (F1) lie between 0 and 1.
_CORRECT = 0.5
# Name of the reward part that a judge's verdict sets.
_JUDGED_PART = 'judged_correct'


def row_health(rows: Sequence[Row], roles_with_tools: Container[str]) -> Stats:
    """Returns (sum, count) per metric; all processes get the same values.

    Args:
      rows: all scored rollouts of a step.
      roles_with_tools: roles that can call a tool.

    Returns:
      'call_error_share': calls that could not be parsed, were refused, failed or timed out.
      'no_call_share': rollouts without a call, among those that answer a question and could call a tool.
      'duplicate_share': proposed questions that another task of the step has, too.
      'judge_agreement': judged answers whose verdict is that of a comparison with the accepted answers: correct if one
        of them occurs in the answer.
    """
    counts = {
        'call_error_share': _failed_calls(rows),
        'no_call_share': _answers_without_call(rows, roles_with_tools),
        'duplicate_share': _duplicate_questions(rows),
        'judge_agreement': _agreeing_verdicts(rows),
    }
    return _measured(counts)


def _measured(counts: Mapping[str, tuple[int, int]]) -> Stats:
    """Returns the entries that rest on enough cases."""
    stats: Stats = {}
    for name, (total, cases) in counts.items():
        if cases >= MIN_CASES:
            stats[name] = (float(total), float(cases))
    return stats


def _failed_calls(rows: Sequence[Row]) -> tuple[int, int]:
    """Returns the numbers of failed calls and of calls; (0, 0) if few rollouts call."""
    failed = 0
    calls = 0
    for row in rows:
        counts = row.trajectory.counts
        failed += counts.failed_calls
        calls += counts.calls
    if calls < _MIN_CALLS_PER_ROLLOUT * len(rows):
        return 0, 0
    return failed, calls


def _answers_without_call(rows: Sequence[Row], roles_with_tools: Container[str]) -> tuple[int, int]:
    """Returns the numbers of answering rollouts without a call, and of all answering rollouts with tools."""
    without_call = 0
    answering = 0
    for row in rows:
        is_answer = row.info.question is not None and not row.info.is_proposal
        if is_answer and row.role in roles_with_tools:
            answering += 1
            without_call += not row.trajectory.counts.calls
    return without_call, answering


def _duplicate_questions(rows: Sequence[Row]) -> tuple[int, int]:
    """Returns the numbers of questions that several tasks propose, and of all questions, each once per task."""
    # Several proposals of one task are about the same document: equal ones are samples of one prompt.
    tasks_of_text: dict[str, set[tuple[int, ...]]] = collections.defaultdict(set)
    for row in rows:
        question = row.info.question
        if not row.info.is_proposal or question is None:
            continue
        text = normalize_answer(question.text)
        if text:
            tasks_of_text[text].add(tuple(row.trajectory.identity[:2]))
    duplicates = 0
    questions = 0
    for tasks in tasks_of_text.values():
        questions += len(tasks)
        if len(tasks) > 1:
            duplicates += len(tasks)
    return duplicates, questions


def _agreeing_verdicts(rows: Sequence[Row]) -> tuple[int, int]:
    """Returns the numbers of verdicts that agree with the comparison of texts, and of all verdicts on answers."""
    agreeing = 0
    verdicts = 0
    for row in rows:
        question = row.info.question
        score = row.info.score
        if _JUDGED_PART not in row.parts or question is None or score is None:
            continue
        verdicts += 1
        is_contained = sub_exact_match(row.info.answer, question.answers)
        agreeing += (score >= _CORRECT) == is_contained
    return agreeing, verdicts


# ---- answers without evidence ------------------------------------------------------------------------


def evidence_counts(rows: Iterable[Row], process: int) -> dict[str, int]:
    """Returns {'correct': correct answers, 'no_evidence': those of them that no result of a call contains}.

    Only rollouts of this process are counted: the others' results are not here. Sum the counts over processes.

    Args:
      rows: all scored rollouts of a step.
      process: index of this process.
    """
    counts = {'correct': 0, 'no_evidence': 0}
    # Rollouts of a group find the same passages.
    normalised: dict[str, str] = {}
    for row in rows:
        # Rows without a process are in all of them, and count in the first.
        is_local = (row.process or 0) == process
        if not is_local or not isinstance(row.trajectory, Trajectory) or not _is_correct(row):
            continue
        assert row.info.question is not None
        counts['correct'] += 1
        texts = []
        for text in _result_texts(row.trajectory):
            if text not in normalised:
                normalised[text] = normalize_answer(text)
            texts.append(normalised[text])
        counts['no_evidence'] += not _is_found(row.info.question.answers, texts)
    return counts


def search_counts(rows: Iterable[Row], process: int) -> dict[str, int]:
    """Returns {'searches': queries that were answered, 'empty_searches': those of them that found no passage}.

    Only rollouts of this process are counted, as in `evidence_counts`.
    """
    counts = {'searches': 0, 'empty_searches': 0}
    for row in rows:
        is_local = (row.process or 0) == process
        if not is_local or not isinstance(row.trajectory, Trajectory):
            continue
        for turn in row.trajectory.turns:
            if turn.call is None or turn.call.error is not None:
                continue
            # One entry per query; calls of tools that return no passages have none.
            for passages in turn.call.documents:
                counts['searches'] += 1
                counts['empty_searches'] += not passages
    return counts


def empty_search_share(counts: Mapping[str, int]) -> Stats:
    """Returns 'empty_search_share' as (sum, count); `counts`: `search_counts`, summed over processes."""
    searches, empty = counts['searches'], counts['empty_searches']
    # Searches of which all find nothing are an empty index, also in small steps.
    minimum = _MIN_ALL_EMPTY if empty == searches else MIN_CASES
    if searches < minimum:
        return {}
    return {'empty_search_share': (float(empty), float(searches))}


def evidence_share(counts: Mapping[str, int]) -> Stats:
    """Returns 'no_evidence_share' as (sum, count): correct answers that no result of their calls contains.

    Args:
      counts: `evidence_counts`, summed over processes.
    """
    return _measured({'no_evidence_share': (counts['no_evidence'], counts['correct'])})


def _is_correct(row: Row) -> bool:
    """Whether a row is an answer to a question with accepted answers that was scored as correct."""
    info = row.info
    if info.question is None or info.is_proposal or not info.question.answers:
        return False
    return info.score is not None and info.score >= _CORRECT


def _result_texts(trajectory: Trajectory) -> list[str]:
    """Returns the texts that the calls of a rollout returned: of passages, or of results without passages."""
    texts = []
    for turn in trajectory.turns:
        call = turn.call
        if call is None or call.error is not None:
            continue
        for passages in call.documents:
            for passage in passages:
                texts.append(f'{passage["title"]} {passage["text"]}')
        if not call.documents:
            texts.append(call.text)
    return texts


def _is_found(answers: Sequence[str], texts: Sequence[str]) -> bool:
    """Returns whether an accepted answer occurs, as whole words, in one of the normalised texts."""
    for answer in answers:
        words = normalize_answer(answer)
        # An answer of articles and punctuation alone has no word that could be looked for.
        if not words:
            return True
        # Scripts without blanks have no word boundaries, so only Latin letters and digits bound a word.
        pattern = re.compile(rf'(?<![a-z0-9]){re.escape(words)}(?![a-z0-9])')
        if any(pattern.search(text) for text in texts):
            return True
    return False


def judge_health(judge_counts: Mapping[str, int]) -> Stats:
    """Returns 'judge_lost_share' as (sum, count): judgements that failed or could not be read.

    Args:
      judge_counts: counts of a step, as in `Judge.stats`.
    """
    lost = judge_counts.get('failed', 0) + judge_counts.get('unread', 0)
    return _measured({'judge_lost_share': (lost, judge_counts.get('asked', 0))})
