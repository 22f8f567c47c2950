"""What a teacher sees and a student does not: how the question was made (π-Play's question construction path).

A path is recorded when a question is made, as data: {'document', 'title', 'steps': [{'think', 'query', 'found'}],
'question', 'answer', 'hops'}. Here it becomes the teacher's prompt, of the kind that `config.privileged.kind` names.
"""

from __future__ import annotations

import itertools

import numpy as np

from zeroplay_jax.objectives import rewards
from zeroplay_jax.rollout import prompts
from zeroplay_jax.selfplay.roles import Table
from zeroplay_jax.types import Json, Trajectory, identity_rng

KINDS = ('none', 'answer', 'answer_hop', 'qcp_partial', 'qcp')


def path_of(trajectory: Trajectory, item: Json, question: str, answer: str) -> Json:
    """The path that a proposer's rollout took from its document to its question."""
    steps = []
    for turn in trajectory.turns:
        for query, found in itertools.zip_longest(turn.queries, turn.documents, fillvalue=()):
            shown = [prompts.document_text(d) for d in found]
            steps.append(
                {
                    'think': rewards.extract_last(turn.text, 'think') or '',
                    'query': query,
                    'found': shown,
                }
            )
    document = prompts.document_text(item) if item.get('text') else ''
    known = dict(title=item.get('title', ''), hops=item['hops'], question=question, answer=answer)
    return dict(known, document=document, steps=steps)


def text(kind: str, path: Json, style: str, rng: np.random.Generator) -> str:
    """A path as the teacher reads it; `qcp_partial` keeps a random half of its steps (rounded down)."""
    if kind == 'answer':
        return path['answer']
    if kind == 'answer_hop':
        return f'{path["answer"]} ({path["hops"]})'
    steps = path['steps']
    if kind == 'qcp_partial':
        kept = sorted(rng.permutation(len(steps))[: len(steps) // 2])
        steps = [steps[i] for i in kept]
    if style == 'mini':  # the form that the built-in checkpoint knows: the chain of names
        names = [path['title'], *(s['query'] for s in steps), path['answer']]
        return ' > '.join(dict.fromkeys(n for n in names if n))
    parts = [f'Document: {path["document"]}'] if path['document'] else []
    for step in steps:
        parts += [f'Thought: {step["think"]}'] if step['think'] else []
        parts += [f'Search: {step["query"]}', *(f'Found: {found}' for found in step['found'])]
    return '\n'.join([*parts, f'Question: {path["question"]}', f'Answer: {path["answer"]}'])


def prompt(
    table: Table, config, identity, item: Json, path: Json
) -> tuple[np.ndarray | None, float]:
    """The teacher's prompt, int32 [P], and 1.0 if passages had to be left out of it.

    Passages go first, longest first, while calls and titles stay: a path that is too long for
    `config.privileged.prompt_tokens` loses what can be found again. None where nothing is shown to the teacher.
    """
    kind = config.privileged.kind
    if kind == 'none':
        return table.prompt('solver', question=item['question']), 0.0

    def ids(known):
        rng = identity_rng(config.seed, *identity, 1)
        shown = text(kind, known, config.prompts, rng)
        return table.prompt('solver', 'solver_with_path', path=shown, question=item['question'])

    cut, known = (
        0.0,
        dict(path, steps=[dict(step, found=list(step['found'])) for step in path['steps']]),
    )
    while len(prompted := ids(known)) > config.privileged.prompt_tokens:
        places = [
            (len(f), i, j)
            for i, s in enumerate(known['steps'])
            for j, f in enumerate(s['found'])
            if len(f) > 80
        ]
        if not places:
            return None, 1.0
        _, i, j = max(places)
        found = known['steps'][i]['found'][j]
        known['steps'][i]['found'][j] = found[: max(found.find(')') + 1, 1)][:80]  # its title
        cut = 1.0
    return prompted, cut
