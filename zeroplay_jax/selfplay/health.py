"""Metrics of a step that show a run going wrong while its rewards look well; `run.outcome` watches them.

They are computed once per step, on the host, from the rows. A figure that would rest on a few rows is left out.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Container, Mapping, Sequence

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
_EMPTY_SEARCHES = 'empty_search_share'


def health(
    rows: Sequence[Row], roles_with_tools: Container[str], judge_counts: Mapping[str, int]
) -> Stats:
    """Returns (sum, count) per metric; all processes get the same values.

    Args:
      rows: all scored rollouts of a step.
      roles_with_tools: roles that can call a tool.
      judge_counts: counts of the step in all processes, as in `Judge.stats`.

    Returns:
      'call_error_share': calls that could not be parsed, were refused, failed or timed out.
      'no_call_share': rollouts without a call, among those that end with an answer and could call a tool.
      'duplicate_share': proposed questions that another task of the step has, too.
      'judge_agreement': judged answers whose verdict is that of a comparison with the accepted answers: correct if one
        of them occurs in the answer.
      'no_evidence_share': correct answers that no result of their calls contains.
      'empty_search_share': answered queries that found no passage.
      'judge_lost_share': judgements that failed or could not be read.
    """
    stats: Stats = {}
    cases_of = {
        'call_error_share': _failed_calls(rows),
        'no_call_share': _answers_without_call(rows, roles_with_tools),
        'duplicate_share': _duplicate_questions(rows),
        'judge_agreement': _agreeing_verdicts(rows),
        'no_evidence_share': _answers_without_evidence(rows),
        _EMPTY_SEARCHES: _empty_searches(rows),
    }
    counts = {name: (sum(cases), len(cases)) for name, cases in cases_of.items()}
    lost_judgements = judge_counts.get('failed', 0) + judge_counts.get('unread', 0)
    counts['judge_lost_share'] = lost_judgements, judge_counts.get('asked', 0)
    for name, (total, cases) in counts.items():
        # Searches of which all find nothing are an empty index, also in small steps.
        is_empty_index = name == _EMPTY_SEARCHES and total == cases >= _MIN_ALL_EMPTY
        if cases >= MIN_CASES or is_empty_index:
            stats[name] = (float(total), float(cases))
    return stats


def _failed_calls(rows: Sequence[Row]) -> list[bool]:
    """Returns per call whether it failed; [] if few rollouts call."""
    failed = []
    for row in rows:
        failed += [call.error is not None for call in row.trajectory.calls]
    return [] if len(failed) < _MIN_CALLS_PER_ROLLOUT * len(rows) else failed


def _answers_without_call(rows: Sequence[Row], roles_with_tools: Container[str]) -> list[bool]:
    """Returns per answer of a role with tools whether its rollout has no call."""
    without_call = []
    for row in rows:
        is_question = row.info.question is not None and not row.info.is_proposal
        # A rollout that was cut has no answer that could come from memory.
        if is_question and row.trajectory.finish == 'answer' and row.role in roles_with_tools:
            without_call.append(not row.trajectory.calls)
    return without_call


def _duplicate_questions(rows: Sequence[Row]) -> list[bool]:
    """Returns per proposed question, counted once per task, whether another task proposes it, too."""
    # Several proposals of one task are about the same document: equal ones are samples of one prompt.
    proposed = set()
    for row in rows:
        question = row.info.question
        if row.info.is_proposal and question is not None:
            proposed.add((normalize_answer(question.text), *row.trajectory.identity[:2]))
    tasks_of_text = collections.Counter(text for text, *_ in proposed)
    return [tasks_of_text[text] > 1 for text, *_ in proposed if text]


def _agreeing_verdicts(rows: Sequence[Row]) -> list[bool]:
    """Returns per verdict on an answer whether the comparison of texts agrees with it."""
    agreeing = []
    for row in rows:
        question, score = row.info.question, row.info.score
        if _JUDGED_PART in row.parts and question is not None and score is not None:
            is_contained = sub_exact_match(row.info.answer, question.answers)
            agreeing.append((score >= _CORRECT) == is_contained)
    return agreeing


def _answers_without_evidence(rows: Sequence[Row]) -> list[bool]:
    """Returns per correct answer whether no result of its calls contains it."""
    # Rollouts of a group find the same passages.
    normalised = functools.cache(normalize_answer)
    without_evidence = []
    for row in rows:
        if _is_correct(row):
            assert row.info.question is not None
            texts = [normalised(text) for text in _result_texts(row.trajectory)]
            without_evidence.append(not _is_found(row.info.question.answers, texts))
    return without_evidence


def _empty_searches(rows: Sequence[Row]) -> list[bool]:
    """Returns per answered query whether it found no passage."""
    empty: list[bool] = []
    for row in rows:
        for call in row.trajectory.calls:
            # One entry per query; calls of tools that return no passages have none.
            if call.error is None:
                empty += [not passages for passages in call.documents]
    return empty


def _is_correct(row: Row) -> bool:
    """Whether a row is an answer to a question with accepted answers that was scored as correct."""
    info = row.info
    if info.question is None or info.is_proposal or not info.question.answers:
        return False
    return info.score is not None and info.score >= _CORRECT


def _result_texts(trajectory: Trajectory) -> list[str]:
    """Returns the texts that the calls of a rollout returned: of passages, or of results without passages."""
    texts = []
    for call in trajectory.calls:
        if call.error is not None:
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
