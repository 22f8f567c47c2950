"""A proposer's rollout, read once: question, answer, form, and whether anybody may be asked it."""

from __future__ import annotations

import dataclasses

from zeroplay_jax.objectives import rewards
from zeroplay_jax.rollout import prompts
from zeroplay_jax.selfplay import files, privileged, solving
from zeroplay_jax.selfplay.roles import Table
from zeroplay_jax.types import Json, Row, Task, Trajectory


@dataclasses.dataclass(frozen=True)
class Proposal:
    """What a proposer's rollout says.

    Attributes:
      format: Dr. Zero's format score and its parts.
      grounded: whether its answer stands in the last passages seen and its question names the source.
      rejected: why it is not asked: unfinished, no_question, no_answer, leaks_answer, ungrounded; or None.
    """

    trajectory: Trajectory
    question: str | None
    answer: str | None
    format: dict[str, float]
    grounded: bool
    rejected: str | None


async def propose(table: Table, config, task: Task, samples: int) -> list[Proposal]:
    """Rollouts of the proposer on a document and a hop count."""
    item = task.payload
    document = prompts.document_text(item) if config.schedule.initial_document else ''
    out = await table.ask(
        'proposer', (*task.identity, 0), samples, hops=item['hops'], document=document
    )
    return [read(t, item, config.reward.grounding) for t in out]


def read(trajectory: Trajectory, item: Json, grounding: bool = False) -> Proposal:
    """Question, answer and format score of a rollout about the document `item`; `grounding` makes that a condition."""
    final = trajectory.turns[-1].text if trajectory.finish == 'answer' else ''
    question, answer = (
        rewards.extract_last(final, 'question'),
        rewards.extract_last(final, 'answer'),
    )
    score = rewards.drzero_format(
        [turn.text for turn in trajectory.turns],
        calls=sum(bool(t.queries) and t.error is None for t in trajectory.turns),
        responses=sum(bool(t.documents) or t.error is not None for t in trajectory.turns),
        hops=item['hops'],
        question=question,
        answer=answer,
        source=f'{item["title"]} {item["text"]}',
        retrieved=' '.join(f'{d["title"]} {d["text"]}' for d in solving.shown(trajectory)),
    )
    last = next((t.documents for t in reversed(trajectory.turns) if t.documents), None)
    seen = ' '.join(d['text'] for found in last for d in found) if last else item['text']
    grounded = bool(question and answer and answer in seen and item['title'] in question)
    rejected: str | None
    if trajectory.finish != 'answer':
        rejected = 'unfinished'
    elif score['raw'] == 0:
        rejected = 'no_question' if not question else 'no_answer' if not answer else 'leaks_answer'
    else:
        rejected = 'ungrounded' if grounding and not grounded else None
    return Proposal(trajectory, question, answer, score, grounded, rejected)


def row(task: Task, proposal: Proposal) -> Row:
    """The proposal as a row of its prompt's group, without a reward yet."""
    parts = {f'format_{name}': value for name, value in proposal.format.items()}
    info = record(task, proposal) | {'valid': proposal.format['raw'] > 0}
    return Row(
        'proposer', proposal.trajectory, 0.0, solving.group_of(task.identity), parts, info=info
    )


def record(task: Task, proposal: Proposal) -> dict:
    """The question with where it came from, as it enters the pool and the log."""
    item = task.payload
    return {
        'question': proposal.question,
        'answers': [] if proposal.answer is None else [proposal.answer],
        'hops': item['hops'],
        'document': item['title'],
        'task': list(task.identity),
        'version': proposal.trajectory.version,
        **files.provenance(item),
        **({'rejected': proposal.rejected} if proposal.rejected else {}),
    }


def path(task: Task, proposal: Proposal) -> Json:
    """How the question was made, for a teacher."""
    return privileged.path_of(
        proposal.trajectory, task.payload, str(proposal.question or ''), str(proposal.answer or '')
    )
