"""A proposer's rollout about a document, read once: question, answer, format and validity (Dr. Zero)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from zeroplay_jax.objectives import rewards
from zeroplay_jax.rollout import prompts
from zeroplay_jax.selfplay.answers import group_of, retrieved_passages
from zeroplay_jax.selfplay.recipes.parts.construction_path import path_of
from zeroplay_jax.selfplay.recipes.parts.datasets import SeedDocument
from zeroplay_jax.types import Json, Question, Row, RowInfo, Task, Trajectory

if TYPE_CHECKING:
    from zeroplay_jax.selfplay.roles import RolloutContext


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A proposer's rollout with what was read from it.

    Attributes:
      trajectory: the rollout.
      question, answer: from its final turn; None without one.
      format: Dr. Zero's format score and its parts.
      is_grounded: its answer is in the last passages seen, and its question names the source.
      rejected: why it is not asked: unfinished, no_question, no_answer, leaks_answer, ungrounded.
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
    require_grounding: bool,
) -> list[Proposal]:
    """Rollouts of a proposer on a document and a hop count."""
    seed: SeedDocument = task.payload
    document = ''
    if show_document:
        document = prompts.document_text({'title': seed.title, 'text': seed.text})
    identity = (*task.identity, 0)
    trajectories = await context.ask(role, identity, samples, hops=seed.hops, document=document)
    return [read_proposal(trajectory, seed, require_grounding) for trajectory in trajectories]


def read_proposal(
    trajectory: Trajectory, seed: SeedDocument, require_grounding: bool = False
) -> Proposal:
    """Question, answer and format score of a rollout about a document."""
    final_text = trajectory.turns[-1].text if trajectory.finish == 'answer' else ''
    question = rewards.extract_last(final_text, 'question')
    answer = rewards.extract_last(final_text, 'answer')
    calls = [turn.call for turn in trajectory.turns if turn.call is not None]
    searches = trajectory.calls_of('search')
    passages = retrieved_passages(trajectory)
    format_score = rewards.drzero_format(
        [turn.text for turn in trajectory.turns],
        calls=sum(call.error is None for call in searches),
        # An error message is a response, too: the policy could react to it.
        responses=sum(bool(call.documents) or call.error is not None for call in calls),
        hops=seed.hops,
        question=question,
        answer=answer,
        source=f'{seed.title} {seed.text}',
        retrieved=' '.join(f'{passage["title"]} {passage["text"]}' for passage in passages),
    )
    is_grounded = _is_grounded(trajectory, seed, question, answer)
    rejected: str | None = None
    if trajectory.finish != 'answer':
        rejected = 'unfinished'
    elif format_score['raw'] == 0 and not question:
        rejected = 'no_question'
    elif format_score['raw'] == 0 and not answer:
        rejected = 'no_answer'
    elif format_score['raw'] == 0:
        rejected = 'leaks_answer'
    elif require_grounding and not is_grounded:
        rejected = 'ungrounded'
    return Proposal(trajectory, question, answer, format_score, is_grounded, rejected)


def _is_grounded(
    trajectory: Trajectory, seed: SeedDocument, question: str | None, answer: str | None
) -> bool:
    last_passages = seed.text
    searches = [call for call in trajectory.calls_of('search') if call.documents]
    if searches:
        texts = []
        for query_passages in searches[-1].documents:
            texts += [passage['text'] for passage in query_passages]
        last_passages = ' '.join(texts)
    return bool(question and answer and answer in last_passages and seed.title in question)


def question_record(task: Task, proposal: Proposal) -> Question:
    """The proposed question with its provenance, as it enters the pool and the log."""
    seed: SeedDocument = task.payload
    return Question(
        text=proposal.question or '',
        answers=() if proposal.answer is None else (proposal.answer,),
        hops=seed.hops,
        origin=_origin(task, proposal),
    )


def _origin(task: Task, proposal: Proposal) -> Json:
    return {
        'document': task.payload.title,
        'task': list(task.identity),
        'version': proposal.trajectory.version,
        **task.payload.origin,
    }


def proposal_row(role: str, task: Task, proposal: Proposal) -> Row:
    """The proposal as a row of its prompt's group, without a reward yet."""
    parts = {f'format_{name}': value for name, value in proposal.format.items()}
    info = RowInfo(
        question=question_record(task, proposal),
        valid=proposal.format['raw'] > 0,
        rejected=proposal.rejected,
    )
    return Row(role, proposal.trajectory, 0.0, group_of(task.identity), parts, info=info)


def construction_path(task: Task, proposal: Proposal) -> Json:
    """How the question was made, for a teacher."""
    question = proposal.question or ''
    return path_of(proposal.trajectory, task.payload, question, proposal.answer or '')
