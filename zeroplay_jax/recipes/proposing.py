"""What a proposer does: its rollout is read as a proposal, and the path of its construction is kept for a teacher."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from zeroplay_jax.objectives import format_scores
from zeroplay_jax.objectives.answers import extract_last, normalize_answer
from zeroplay_jax.recipes.datasets import SeedDocument
from zeroplay_jax.rollout import prompts
from zeroplay_jax.selfplay.answers import final_answer, group_of, retrieved_passages
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import Json, Question, Row, RowInfo, Task, Trajectory, identity_rng

if TYPE_CHECKING:
    from zeroplay_jax.selfplay.context import RolloutContext

# A passage of at most this many characters is not shortened: it is little more than its title.
_SHORT_PASSAGE = 80


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A proposer's rollout with its parsed proposal.

    Attributes:
      trajectory: the rollout.
      question, answer: texts in its final turn; None if there is none.
      format: Dr. Zero's format score 'raw' and its parts.
      rejected: why the question is not asked (unfinished, no_question, no_answer, leaks_answer where the form is not
        scored in parts, or a recipe's own);
        None if it is.
      earns_form: whether its form is rewarded. A gate of a recipe may say False; its proposals still count as valid.
    """

    trajectory: Trajectory
    question: str | None
    answer: str | None
    format: dict[str, float]
    rejected: str | None
    earns_form: bool = True


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
      context: of the episode.
      role: role that proposes.
      task: its payload is a `SeedDocument`. The request is (*task.identity, 0).
      samples: number of proposals.
      show_document: whether the prompt contains the document.
      separate_format: whether to score the form as in the paper (`format_scores.drzero_separate_format`), and ask
        questions that contain their answer.

    Raises:
      TaskDropped: the prompt is too long.
    """
    seed: SeedDocument = task.payload
    fields: dict[str, Any] = {'hops': seed.hops, 'document': ''}
    if show_document:
        fields['document'] = prompts.document_text(seed.passage | {'link': seed.link})
    else:
        # The proposer knows the hop count only (an ablation of Dr. Zero).
        form = f'{context.roles[role].prompt}.without_document'
        if form in context.prompts:
            fields = {'hops': seed.hops, 'prompt': form}
    # The last integer keeps proposals apart from the solver rollouts of the same task.
    identity = (*task.identity, 0)
    trajectories = await context.ask(role, identity, samples, **fields)
    return [read_proposal(trajectory, seed, separate_format) for trajectory in trajectories]


def read_proposal(
    trajectory: Trajectory,
    seed: SeedDocument,
    separate_format: bool = False,
) -> Proposal:
    """Returns the proposal in a rollout about the document `seed`, with the reason if it is rejected."""
    # Only the final turn is read: a question drafted in an earlier turn was not submitted. Its part of the form counts
    # without an answer, too (Dr. Zero, appendix A).
    final_text = trajectory.turns[-1].text if trajectory.turns else ''
    question = extract_last(final_text, 'question')
    answer = final_answer(trajectory)
    format_score = _format_score(trajectory, seed, question, answer, separate_format)
    normal_form = normalize_answer(answer or '')
    # The first reason that applies is logged, so the order of the checks must not change.
    rejected: str | None = None
    if trajectory.finish != 'answer':
        rejected = 'unfinished'
    # Dr. Zero's code does not measure the difficulty of the following ones either.
    elif not question:
        rejected = 'no_question'
    elif not answer:
        rejected = 'no_answer'
    # An answer with an empty normal form is contained in every question. The paper has no rule for others (eq. 4).
    elif not (separate_format and normal_form) and normal_form in normalize_answer(question):
        rejected = 'leaks_answer'
    return Proposal(trajectory, question, answer, format_score, rejected)


def _format_score(
    trajectory: Trajectory,
    seed: SeedDocument,
    question: str | None,
    answer: str | None,
    separate: bool,
) -> dict[str, float]:
    """Returns Dr. Zero's format score of a rollout and its parts, by its code or, if `separate`, by its paper."""
    texts = [turn.text for turn in trajectory.turns]
    successful_searches = 0
    responses = 0
    for call in trajectory.calls:
        # An error message counts as a response, because the policy can react to it.
        responses += bool(call.documents) or call.error is not None
        is_search = call.tool == 'search' and call.is_valid
        successful_searches += is_search and call.error is None
    counts = dict(calls=successful_searches, responses=responses, hops=seed.hops)
    if separate:
        return format_scores.drzero_separate_format(
            texts, question=question, answer=answer, **counts
        )
    passages = retrieved_passages(trajectory)
    retrieved = [f'{passage["title"]} {passage["text"]}' for passage in passages]
    return format_scores.drzero_format(
        texts,
        question=question,
        answer=answer,
        source=f'{seed.title} {seed.text}',
        retrieved=' '.join(retrieved),
        **counts,
    )


def question_record(task: Task, proposal: Proposal) -> Question:
    """Returns the proposed question with its provenance, as it enters the pool and the log."""
    seed: SeedDocument = task.payload
    answers = () if proposal.answer is None else (proposal.answer,)
    origin = origin_of(task, proposal.trajectory)
    return Question(proposal.question or '', answers, seed.hops, origin=origin)


def origin_of(task: Task, trajectory: Trajectory) -> dict[str, Any]:
    """Returns the provenance of what a rollout proposes about the document of a task."""
    seed: SeedDocument = task.payload
    # Document, task and version of the weights identify the rollouts that may have made a question.
    identity = list(task.identity)
    return {'document': seed.title, 'task': identity, 'version': trajectory.version, **seed.origin}


def proposal_row(role: str, task: Task, proposal: Proposal) -> Row:
    """Returns a row of the prompt's group with reward 0.0.

    The recipe sets the reward, and the parts that count in it: `parts['format']` and `parts['difficulty']`.
    """
    # These are logged only. The part that counts in the reward is called 'format', without a suffix.
    parts = {f'format_{name}': value for name, value in proposal.format.items()}
    # `valid`: format alone.
    info = RowInfo(
        question=question_record(task, proposal),
        valid=proposal.rejected is None or not proposal.earns_form,
        rejected=proposal.rejected,
    )
    return Row(role, proposal.trajectory, 0.0, group_of(task.identity), parts, info=info)


def path_of(trajectory: Trajectory, seed: SeedDocument, question: str, answer: str) -> Json:
    """Returns the path that a proposer's rollout took from its document to its question, for a teacher (π-Play).

    It is {'title', 'hops', 'question', 'answer', 'document', 'steps': [{'think', 'query', 'found'}]}, with one step per
    query, in order; 'found' lists the passages as texts.
    """
    steps: list[Json] = []
    for turn in trajectory.turns:
        call = turn.call
        # Calls that were not run returned nothing, so they are left out.
        if call is None or call.tool != 'search' or not call.is_valid:
            continue
        thought = extract_last(turn.text, 'think') or ''
        # A failed search has queries and no passages; its queries stay in the path, with nothing found.
        for query, passages in itertools.zip_longest(call.queries, call.documents, fillvalue=()):
            texts = [prompts.document_text(passage) for passage in passages]
            steps.append({'think': thought, 'query': query, 'found': texts})
    return {
        'title': seed.title,
        'hops': seed.hops,
        'question': question,
        'answer': answer,
        'document': prompts.document_text(seed.passage) if seed.text else '',
        'steps': steps,
    }


def path_text(kind: str, path: Json, style: str, rng: np.random.Generator) -> str:
    """Returns a path as the teacher reads it.

    Args:
      kind: 'answer', 'answer_hop', 'qcp' or 'qcp_partial' (without one half of the lines before the question, in one
        piece at a random place; of the names in such sets).
      style: `config.prompts`; in 'mini' and sets over it a path is the chain of names that built-in policies know.
      rng: draws the place of 'qcp_partial'; other kinds do not use it.
    """
    # The kinds are those of π-Play's ablation of privileged information.
    if kind == 'answer':
        return path['answer']
    if kind == 'answer_hop':
        return f'{path["answer"]} ({path["hops"]})'
    lines, separator, kept_at_end = _lines(path), '\n', 2
    if 'mini' in prompts.sets_under(style):
        # The form of the built-in checkpoint's training data.
        lines, separator, kept_at_end = _names(path), ' > ', 1
    if kind == 'qcp_partial':
        half = (len(lines) - kept_at_end) // 2
        start = int(rng.integers(len(lines) - kept_at_end - half + 1))
        del lines[start : start + half]
    return separator.join(lines)


def _lines(path: Json) -> list[str]:
    """Returns the lines of a path: the document, per step thought, query and passages, the question, the answer."""
    lines = []
    if path['document']:
        lines.append(f'Document: {path["document"]}')
    for step in path['steps']:
        if step['think']:
            lines.append(f'Thought: {step["think"]}')
        lines.append(f'Search: {step["query"]}')
        lines += [f'Found: {passage}' for passage in step['found']]
    # The answer comes last, as in the proposer's own rollout.
    lines.append(f'Question: {path["question"]}')
    lines.append(f'Answer: {path["answer"]}')
    return lines


def _names(path: Json) -> list[str]:
    """Returns the names from the document to the answer."""
    names = [path['title'], *(step['query'] for step in path['steps']), path['answer']]
    # Each name occurs once, because the last query may be the answer itself.
    return list(dict.fromkeys(filter(None, names)))


def teacher_prompt(
    context: RolloutContext,
    config: Config,
    identity: tuple[int, ...],
    question: Question,
    role: str,
) -> tuple[np.ndarray | None, float]:
    """Returns the teacher's prompt, int32 [tokens], and 1.0 if it was too long before any cut, else 0.0.

    A prompt longer than `privileged.prompt_tokens` is shortened: passages that searches found are replaced by their
    titles, longest first; the first document is never cut. If it is too long even then, the prompt is None. With kind
    'none' there is no limit.

    Args:
      identity: names the request within the run; the place of 'qcp_partial' derives from it.
      question: has a `path` unless `privileged.kind` is 'none'.
      role: the student. With kind 'none' the teacher reads its prompt; otherwise the prompt 'solver.teacher', with
        this role's tools.
    """
    kind = config.privileged.kind
    if kind == 'none':
        # The teacher reads the student's prompt. It is then only an average of earlier students, which is the
        # baseline of the ablation.
        return context.prompt_ids(role, question=question.text), 0.0
    assert question.path is not None
    # Copied, because the question stays in the pool and is trained on again in later epochs.
    path = copy.deepcopy(dict(question.path))
    was_cut = 0.0
    # The length in tokens is known only after rendering, so passages are cut one at a time.
    while True:
        # Created anew in every pass of this loop, so that 'qcp_partial' leaves out the same lines. The 1
        # separates this stream from others of the same identity.
        rng = identity_rng(config.seed, *identity, 1)
        reference = path_text(kind, path, config.prompts, rng)
        ids = context.prompt_ids(role, 'solver.teacher', path=reference, question=question.text)
        if len(ids) <= config.privileged.prompt_tokens:
            return ids, was_cut
        if not _shorten_longest_passage(path):
            return None, 1.0
        was_cut = 1.0


def _shorten_longest_passage(path: dict[str, Any]) -> bool:
    """Cuts the longest passage of `path` down to its title, in place; returns False if all are short already."""
    # (length, step, position): among passages of equal length the last one is cut.
    candidates: list[tuple[int, int, int]] = []
    for step_number, step in enumerate(path['steps']):
        for number, passage in enumerate(step['found']):
            if len(passage) > _SHORT_PASSAGE:
                candidates.append((len(passage), step_number, number))
    if not candidates:
        return False
    _, step_number, number = max(candidates)
    passages = path['steps'][step_number]['found']
    passage = passages[number]
    # In '(Title: …) text' the title ends at the first closing bracket. Without a bracket one character is kept.
    title_end = max(passage.find(')') + 1, 1)
    # The title is cut as well: a longer one would be a candidate again, and `teacher_prompt` would not end.
    passages[number] = passage[:title_end][:_SHORT_PASSAGE]
    return True
