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
      is_grounded: its answer is in the passages of the last search, and its question names the source.
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
    # Without its document the proposer starts from nothing but the hop count (an ablation of Dr. Zero).
    document = ''
    if show_document:
        document = prompts.document_text({'title': seed.title, 'text': seed.text})
    # The last integer keeps proposals apart from the solver rollouts of the same task.
    identity = (*task.identity, 0)
    trajectories = await context.ask(role, identity, samples, hops=seed.hops, document=document)
    return [read_proposal(trajectory, seed, require_grounding) for trajectory in trajectories]


def read_proposal(
    trajectory: Trajectory, seed: SeedDocument, require_grounding: bool = False
) -> Proposal:
    """Question, answer and format score of a rollout about a document."""
    # Only the final turn counts: a question drafted in an earlier one was not submitted.
    final_text = ''
    if trajectory.finish == 'answer':
        final_text = trajectory.turns[-1].text
    question = rewards.extract_last(final_text, 'question')
    answer = rewards.extract_last(final_text, 'answer')
    format_score = _format_score(trajectory, seed, question, answer)
    is_grounded = _is_grounded(trajectory, seed, question, answer)
    # The first reason that applies; the order is part of the logged statistics.
    rejected: str | None = None
    if trajectory.finish != 'answer':
        rejected = 'unfinished'
    elif format_score['raw'] == 0:
        # Exactly the proposals whose difficulty Dr. Zero's code does not measure either.
        rejected = _format_problem(question, answer)
    elif require_grounding and not is_grounded:
        rejected = 'ungrounded'
    return Proposal(trajectory, question, answer, format_score, is_grounded, rejected)


def _format_score(
    trajectory: Trajectory, seed: SeedDocument, question: str | None, answer: str | None
) -> dict[str, float]:
    """Dr. Zero's format score of a rollout and its parts."""
    texts: list[str] = []
    successful_searches = 0
    responses = 0
    for turn in trajectory.turns:
        texts.append(turn.text)
        call = turn.call
        if call is None:
            continue
        # An error message is a response, too: the policy could react to it.
        responses += bool(call.documents) or call.error is not None
        is_search = call.tool == 'search' and call.is_valid
        successful_searches += is_search and call.error is None
    # The answer may occur in the document itself: a question of one hop needs no search.
    passages = retrieved_passages(trajectory)
    retrieved = [f'{passage["title"]} {passage["text"]}' for passage in passages]
    return rewards.drzero_format(
        texts,
        calls=successful_searches,
        responses=responses,
        hops=seed.hops,
        question=question,
        answer=answer,
        source=f'{seed.title} {seed.text}',
        retrieved=' '.join(retrieved),
    )


def _format_problem(question: str | None, answer: str | None) -> str:
    """Why a format score is 0; with both parts present only a leaked answer explains it."""
    if not question:
        return 'no_question'
    if not answer:
        return 'no_answer'
    return 'leaks_answer'


def _is_grounded(
    trajectory: Trajectory, seed: SeedDocument, question: str | None, answer: str | None
) -> bool:
    """Whether the answer is in the passages of the last search and the question names the source document."""
    if not question or not answer:
        return False
    last_passages = seed.text
    searches = [call for call in trajectory.calls_of('search') if call.documents]
    if searches:
        # The last hop: an answer from an earlier passage would need fewer hops than asked for.
        texts = []
        for query_passages in searches[-1].documents:
            for passage in query_passages:
                texts.append(passage['text'])
        last_passages = ' '.join(texts)
    # Exact comparison, without normalisation: a loose one would accept answers by coincidence.
    return answer in last_passages and seed.title in question


def question_record(task: Task, proposal: Proposal) -> Question:
    """The proposed question with its provenance, as it enters the pool and the log."""
    seed: SeedDocument = task.payload
    answers: tuple[str, ...] = ()
    if proposal.answer is not None:
        answers = (proposal.answer,)
    # Document, task and weights: enough to trace a question back to the rollout that made it.
    origin = {
        'document': seed.title,
        'task': list(task.identity),
        'version': proposal.trajectory.version,
        **seed.origin,
    }
    return Question(proposal.question or '', answers, seed.hops, origin=origin)


def proposal_row(role: str, task: Task, proposal: Proposal) -> Row:
    """The proposal as a row of its prompt's group, without a reward yet."""
    # Prefixed: these parts are logged, and only 'format' is added to the reward.
    parts = {f'format_{name}': value for name, value in proposal.format.items()}
    # `valid` is about the form alone; `rejected` also covers grounding.
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
