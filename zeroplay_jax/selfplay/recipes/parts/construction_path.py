"""Question construction paths (π-Play): what a distillation teacher sees and the student does not.

A path is recorded when a question is made, as data: {'title', 'hops', 'question', 'answer',
'document', 'steps': [{'think', 'query', 'found'}]}. Here it becomes the teacher's prompt, in the
form that `config.privileged.kind` names.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from zeroplay_jax.objectives import rewards
from zeroplay_jax.rollout import prompts
from zeroplay_jax.types import Json, Question, Trajectory, identity_rng

if TYPE_CHECKING:
    from zeroplay_jax.selfplay.recipes.parts.datasets import SeedDocument
    from zeroplay_jax.selfplay.roles import RolloutContext

PROMPTS: prompts.Prompts = {
    'solver_with_path': {
        'mini': prompts.BUILT_IN_FORMS['solver_with_path'],
        'paper': prompts.SOLVER
        + """

For reference, this is how the question was made, from its first document to its answer. Use it to solve the question \
again in the form asked for above, with your own searches and thoughts.

{path}""",
    }
}
# A passage of at most this many characters is kept: it is little more than its title.
_SHORT_PASSAGE = 80


def path_of(trajectory: Trajectory, seed: SeedDocument, question: str, answer: str) -> Json:
    """The path that a proposer's rollout took from its document to its question."""
    steps: list[Json] = []
    for turn in trajectory.turns:
        call = turn.call
        # Malformed calls taught the proposer nothing, so they are no part of the path.
        if call is None or call.tool != 'search' or call.arguments is None:
            continue
        queries = call.queries
        thought = rewards.extract_last(turn.text, 'think') or ''
        # A failed search has queries and no passages; its queries stay in the path.
        for query, passages in itertools.zip_longest(queries, call.documents, fillvalue=()):
            texts = [prompts.document_text(passage) for passage in passages]
            steps.append({'think': thought, 'query': query, 'found': texts})
    document = ''
    if seed.text:
        document = prompts.document_text({'title': seed.title, 'text': seed.text})
    return {
        'title': seed.title,
        'hops': seed.hops,
        'question': question,
        'answer': answer,
        'document': document,
        'steps': steps,
    }


def path_text(kind: str, path: Json, style: str, rng: np.random.Generator) -> str:
    """A path as the teacher reads it.

    Args:
      kind: 'answer', 'answer_hop', 'qcp' or 'qcp_partial' (a random half of the steps, rounded down).
      style: the prompt set; 'mini' is the chain of names that the built-in checkpoint was trained on.
    """
    # The kinds are π-Play's ablation of privileged information, from least to most.
    if kind == 'answer':
        return path['answer']
    if kind == 'answer_hop':
        return f'{path["answer"]} ({path["hops"]})'
    steps = path['steps']
    if kind == 'qcp_partial':
        # Sorted: the remaining steps keep the order in which the proposer took them.
        half = sorted(rng.permutation(len(steps))[: len(steps) // 2])
        steps = [steps[index] for index in half]
    if style == 'mini':
        return _chain_of_names(path, steps)
    lines: list[str] = []
    if path['document']:
        lines.append(f'Document: {path["document"]}')
    for step in steps:
        if step['think']:
            lines.append(f'Thought: {step["think"]}')
        lines.append(f'Search: {step["query"]}')
        for passage in step['found']:
            lines.append(f'Found: {passage}')
    # The answer comes last, as in the proposer's own rollout.
    lines.append(f'Question: {path["question"]}')
    lines.append(f'Answer: {path["answer"]}')
    return '\n'.join(lines)


def _chain_of_names(path: Json, steps: list[Json]) -> str:
    """Names from the document to the answer, in the form of the built-in checkpoint's training data."""
    names = [path['title']]
    for step in steps:
        names.append(step['query'])
    names.append(path['answer'])
    # Each name once: a query for the answer itself would end the chain with it twice.
    distinct_names = dict.fromkeys(filter(None, names))
    return ' > '.join(distinct_names)


def teacher_prompt(
    context: RolloutContext, config, identity: tuple[int, ...], question: Question, role: str
) -> tuple[np.ndarray | None, float]:
    """The teacher's prompt, int32 [P], and 1.0 if passages were left out of it, else 0.0.

    A path longer than `privileged.prompt_tokens` loses passages, longest first; queries and titles
    stay, because they cannot be retrieved again. None if the prompt is too long even without them.
    """
    kind = config.privileged.kind
    if kind == 'none':
        # The teacher is then only an average of earlier students, the baseline of the ablation.
        return context.prompt_ids(role, question=question.text), 0.0
    assert question.path is not None
    # A copy: the question stays in the pool and is trained on again in later epochs.
    path = copy.deepcopy(dict(question.path))
    was_cut = 0.0
    # The length in tokens is known only after rendering, so passages are cut one at a time.
    while True:
        # The same random half of the steps in every round.
        rng = identity_rng(config.seed, *identity, 1)
        reference = path_text(kind, path, config.prompts, rng)
        ids = context.prompt_ids(role, 'solver_with_path', path=reference, question=question.text)
        if len(ids) <= config.privileged.prompt_tokens:
            return ids, was_cut
        if not _shorten_longest_passage(path):
            return None, 1.0
        was_cut = 1.0


def _shorten_longest_passage(path: dict[str, Any]) -> bool:
    """Cuts the longest passage down to its title; False if all are short already."""
    # (length, step, position): equal lengths are decided by the position, the same in every run.
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
    # '(Title: …) text' ends its title at the first bracket. Without one, a single character is left.
    title_end = max(passage.find(')') + 1, 1)
    # A title longer than that would be a candidate again, and the loop above would not end.
    passages[number] = passage[:title_end][:_SHORT_PASSAGE]
    return True
