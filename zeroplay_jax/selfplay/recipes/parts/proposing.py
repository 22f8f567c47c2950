"""Parses a proposer's rollout about a document: question, answer, format score and validity (Dr. Zero)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from zeroplay_jax.objectives import rewards
from zeroplay_jax.rollout import prompts
from zeroplay_jax.selfplay.answers import group_of, retrieved_passages
from zeroplay_jax.selfplay.recipes.parts.construction_path import path_of
from zeroplay_jax.selfplay.recipes.parts.datasets import SeedDocument
from zeroplay_jax.types import Json, Question, Row, RowInfo, Task, Trajectory

if TYPE_CHECKING:
    from zeroplay_jax.selfplay.context import RolloutContext


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A proposer's rollout with its parsed proposal.

    Attributes:
      trajectory: the rollout.
      question, answer: texts in its final turn; None if there is none.
      format: Dr. Zero's format score 'raw' and its parts.
      is_grounded: whether the answer is in the passages of the last search and the question names the source.
      rejected: why the question is not asked (unfinished, no_question, no_answer, leaks_answer, ungrounded); None
        if it is.
    """

    trajectory: Trajectory
    question: str | None
    answer: str | None
    format: dict[str, float]
    is_grounded: bool
    rejected: str | None


async def propose(
    context: RolloutContext,
    role: str,
    task: Task,
    samples: int,
    *,
    show_document: bool,
    separate_format: bool = False,
) -> list[Proposal]:
    """Returns `samples` proposals on the document and hop count of a task.

    Args:
      task: its payload is a `SeedDocument`.
      show_document: whether the prompt contains the document.
      separate_format: whether to score the form as in the paper (`rewards.drzero_separate_format`).

    Raises:
      TaskDropped: the prompt is too long.
    """
    seed: SeedDocument = task.payload
    # Without the document the proposer knows the hop count only (an ablation of Dr. Zero).
    document = ''
    if show_document:
        shown = {'title': seed.title, 'text': seed.text, 'link': seed.link}
        document = prompts.document_text(shown)
    # The last integer keeps proposals apart from the solver rollouts of the same task.
    identity = (*task.identity, 0)
    trajectories = await context.ask(role, identity, samples, hops=seed.hops, document=document)
    proposals = []
    for trajectory in trajectories:
        proposals.append(read_proposal(trajectory, seed, separate_format))
    return proposals


def read_proposal(
    trajectory: Trajectory,
    seed: SeedDocument,
    separate_format: bool = False,
) -> Proposal:
    """Returns the proposal in a rollout about the document `seed`, with the reason if it is rejected."""
    # Only the final turn is read: a question drafted in an earlier turn was not submitted.
    final_text = ''
    if trajectory.finish == 'answer':
        final_text = trajectory.turns[-1].text
    question = rewards.extract_last(final_text, 'question')
    answer = rewards.extract_last(final_text, 'answer')
    format_score = _format_score(trajectory, seed, question, answer, separate_format)
    is_grounded = _is_grounded(trajectory, seed, question, answer)
    # The first reason that applies is logged, so the order of the checks must not change.
    rejected: str | None = None
    if trajectory.finish != 'answer':
        rejected = 'unfinished'
    else:
        # Dr. Zero's code does not measure the difficulty of these proposals either.
        rejected = _format_problem(question, answer)
    return Proposal(trajectory, question, answer, format_score, is_grounded, rejected)


def _format_score(
    trajectory: Trajectory,
    seed: SeedDocument,
    question: str | None,
    answer: str | None,
    separate: bool,
) -> dict[str, float]:
    """Returns Dr. Zero's format score of a rollout and its parts, by its code or, if `separate`, by its paper."""
    texts: list[str] = []
    successful_searches = 0
    responses = 0
    for turn in trajectory.turns:
        texts.append(turn.text)
        call = turn.call
        if call is None:
            continue
        # An error message counts as a response, because the policy can react to it.
        responses += bool(call.documents) or call.error is not None
        is_search = call.tool == 'search' and call.is_valid
        successful_searches += is_search and call.error is None
    counts: dict[str, Any] = dict(calls=successful_searches, responses=responses, hops=seed.hops)
    if separate:
        return rewards.drzero_separate_format(texts, question=question, answer=answer, **counts)
    passages = retrieved_passages(trajectory)
    retrieved = [f'{passage["title"]} {passage["text"]}' for passage in passages]
    return rewards.drzero_format(
        texts,
        question=question,
        answer=answer,
        source=f'{seed.title} {seed.text}',
        retrieved=' '.join(retrieved),
        **counts,
    )


def _format_problem(question: str | None, answer: str | None) -> str | None:
    """Returns why a proposal cannot be asked (no_question, no_answer, leaks_answer); None if it can."""
    if not question:
        return 'no_question'
    if not answer:
        return 'no_answer'
    # An answer with an empty normal form is contained in every question.
    if rewards.normalize_answer(answer) in rewards.normalize_answer(question):
        return 'leaks_answer'
    return None


def _is_grounded(
    trajectory: Trajectory, seed: SeedDocument, question: str | None, answer: str | None
) -> bool:
    """Returns whether the answer is in the passages of the last search and the question names the source document.

    Failed searches do not count. If none succeeded, the source document takes the place of the passages.
    """
    if not question or not answer:
        return False
    last_passages = seed.text
    searches = [call for call in trajectory.calls_of('search') if call.documents]
    if searches:
        # The last search is the last hop; an answer from an earlier passage would need fewer hops than requested.
        texts = []
        for query_passages in searches[-1].documents:
            for passage in query_passages:
                texts.append(passage['text'])
        last_passages = ' '.join(texts)
    # Compared without normalisation, which would accept answers by coincidence.
    return answer in last_passages and seed.title in question


def question_record(task: Task, proposal: Proposal) -> Question:
    """Returns the proposed question with its provenance, as it enters the pool and the log."""
    seed: SeedDocument = task.payload
    answers: tuple[str, ...] = ()
    if proposal.answer is not None:
        answers = (proposal.answer,)
    # Document, task and version of the weights identify the rollouts that may have made a question.
    origin = {
        'document': seed.title,
        'task': list(task.identity),
        'version': proposal.trajectory.version,
        **seed.origin,
    }
    return Question(proposal.question or '', answers, seed.hops, origin=origin)


def proposal_row(role: str, task: Task, proposal: Proposal) -> Row:
    """Returns a row of the prompt's group with reward 0.0.

    The recipe sets the reward, and the parts that count in it: `parts['format']` and `parts['difficulty']`.
    """
    # These are logged only. The part that counts in the reward is called 'format', without a suffix.
    parts = {f'format_{name}': value for name, value in proposal.format.items()}
    # `valid`: format alone. `rejected`: also set for an unfinished or ungrounded proposal.
    info = RowInfo(
        question=question_record(task, proposal),
        valid=proposal.rejected in (None, 'ungrounded'),
        rejected=proposal.rejected,
    )
    return Row(role, proposal.trajectory, 0.0, group_of(task.identity), parts, info=info)


def construction_path(task: Task, proposal: Proposal) -> Json:
    """Returns the record of how a proposal was made (`path_of`), for a distillation teacher."""
    question = proposal.question or ''
    return path_of(proposal.trajectory, task.payload, question, proposal.answer or '')
