"""Reads, scores and grades final answers, for recipes and evaluations."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from zeroplay_jax.objectives import rewards
from zeroplay_jax.objectives.answers import extract_last
from zeroplay_jax.rollout.prompts import Prompt
from zeroplay_jax.types import Json, Question, Trajectory, UserError

if TYPE_CHECKING:
    from zeroplay_jax.selfplay.context import RolloutContext

# Group keys must differ between steps, because surplus groups are carried over to the next one. A step has far fewer
# tasks than this.
_ITEMS_PER_STEP = 1 << 20


def group_of(identity: tuple[int, ...]) -> int:
    """Returns the group key of a task from its identity (step number, index within the step, …).

    No other task of the run has the same key. Further integers are ignored: they name requests within the task.
    """
    step, index = identity[:2]
    return step * _ITEMS_PER_STEP + index


def final_answer(trajectory: Trajectory, tag: str = 'answer') -> str | None:
    """Returns the text in these tags with which a rollout ended; None if it ended otherwise (`Trajectory.finish`)."""
    if trajectory.finish != 'answer':
        return None
    return extract_last(trajectory.turns[-1].text, tag)


def prompt_fields(context: RolloutContext, role: str, question: Question) -> dict[str, Any]:
    """Returns {'prompt': name, field: text}: arguments of `RolloutContext.ask` for a question or an open task."""
    prompt_of_role = context.roles[role].prompt
    prompt, field = prompt_and_field(context.prompts, prompt_of_role, question.is_open_task)
    return {'prompt': prompt, field: question.text}


def prompt_and_field(
    templates: Mapping[str, Prompt], prompt_of_role: str, is_open_task: bool
) -> tuple[str, str]:
    """Returns the name of the prompt, and its field, with which a question or an open task is put to a role.

    The prompt is the role's own if that has the field, else the shared one: SCOPE's solver is trained on open
    tasks and evaluated on questions as well.

    Args:
      templates: prompts by name.
      prompt_of_role: name of the role's prompt.
    """
    field, shared_prompt = ('question', 'solver')
    if is_open_task:
        field, shared_prompt = ('task', 'solver.task')
    if field in templates[prompt_of_role].fields:
        return prompt_of_role, field
    return shared_prompt, field


async def score(
    context: RolloutContext,
    metric: str,
    identity: tuple[int, ...],
    question: Question,
    answer: str | None,
) -> float | None:
    """Returns the score of an answer in [0, 1]; None if the judge gave no verdict, or graded too few rubrics.

    Args:
      context: has a judge, for the metrics 'judge' and 'rubrics'.
      metric: 'rubrics' (share of an open task's rubrics that are met), 'judge', or a metric of
        `objectives.rewards.resolve_answer_metric`.
      identity: names the judgement within the run; the judge's randomness derives from it.
      answer: None if the rollout gave none, which scores 0 with the built-in metrics.

    Raises:
      TaskDropped('judge_failed'): the judge failed (`judge.Judge`).
    """
    if metric == 'rubrics':
        return await grade(context, identity, question, answer)
    if metric != 'judge':
        answer_metric = rewards.resolve_answer_metric(metric)
        return metric_score(metric, answer_metric, answer, question.answers)
    # A missing answer is wrong without doubt, so no judgement is spent on it.
    if not answer:
        return 0.0
    assert context.judge is not None
    verdict = await context.judge.correct(identity, question.text, question.answers, answer)
    if verdict is None:
        return None
    return float(verdict)


def metric_score(
    name: str, metric: rewards.AnswerMetric, answer: str | None, accepted: Sequence[str]
) -> float:
    """Returns what a metric says about an answer.

    Args:
      name: of the metric, for the error.
      metric: built in or the user's.
      answer: None if the rollout gave none.
      accepted: the accepted answers.

    Raises:
      UserError: one line; the metric raises an error, or returns no number in [0, 1].
    """
    try:
        value = metric(answer, accepted)
    except Exception as error:
        raise UserError(
            f'{name}: raised {error!r} for the answer {answer!r} and the answers {accepted}; correct it and run the '
            'command again'
        ) from error
    if not rewards.is_score(value):
        raise UserError(
            f'{name}: returned {value!r} for an answer; it must return a number from 0 to 1'
        )
    return float(value)


async def grade(
    context: RolloutContext, identity: tuple[int, ...], task: Question, answer: str | None
) -> float | None:
    """Returns the share of the rubrics that an answer meets (SCOPE eq. 1); 0 without an answer.

    None if the judge graded less than half of the rubrics (`objectives.rewards.rubric_score`).

    Args:
      identity: names the answer within the run; the number of the rubric is appended for each judgement.

    Raises:
      TaskDropped('judge_failed'): the judge failed at one of them (`judge.Judge`).
    """
    if not answer:
        return 0.0
    assert context.judge is not None
    # Each rubric gets a judgement of its own (SCOPE): a list of verdicts in one reply is harder to parse,
    # and one verdict would influence the next.
    pending = []
    for number, rubric in enumerate(task.rubrics):
        judgement = (*identity, number)
        pending.append(context.judge.grade(judgement, task.text, answer, rubric['text']))
    # All are awaited before one that failed drops the answer.
    verdicts: list[Any] = await asyncio.gather(*pending, return_exceptions=True)
    for verdict in verdicts:
        if isinstance(verdict, BaseException):
            raise verdict
    return rewards.rubric_score(verdicts, [weight(rubric) for rubric in task.rubrics])


def weight(rubric: Json) -> float:
    """Returns w of an item of a list of rubrics (SCOPE eq. 1)."""
    return rubric.get('weight', 1.0)


def retrieved_passages(trajectory: Trajectory) -> list[Json]:
    """Returns the passages that searches of a rollout found, each once, in order of their first appearance.

    The best passage of the last query that found any comes last.
    """
    searches = trajectory.calls_of('search')
    # Distinguished by id, because several passages of one article share its title.
    passages: dict[object, Json] = {}
    best_of_last_query: Json | None = None
    for call in searches:
        for query_passages in call.documents:
            for passage in query_passages:
                passages[passage['id']] = passage
            if query_passages:
                best_of_last_query = query_passages[0]
    if best_of_last_query is not None:
        # Removing and inserting a key moves it to the end of a dict. The rule judge takes its rubrics from the
        # last document.
        last_id = best_of_last_query['id']
        passages[last_id] = passages.pop(last_id)
    return list(passages.values())


def mean(values: Sequence[float]) -> float:
    """Returns the mean; 0 without values."""
    if not values:
        return 0.0
    return float(np.mean(values))
