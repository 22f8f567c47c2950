"""Question sets and what a policy makes of them: one result per question, so that two policies can be compared.

A set is a file of JSON lines with "question" and answers, or one of the public names below, fetched when online from
the collection that Search-R1 and its successors evaluate on (FlashRAG; Jin et al. 2024, arXiv:2405.13576). An
open-ended set has "task" and "rubrics", a list of texts, on every line; a judge says which of them an answer meets.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zeroplay_jax.objectives.rewards import normalize_answer
from zeroplay_jax.retrieval import progress
from zeroplay_jax.rollout.scheduler import Request
from zeroplay_jax.selfplay import files, solving
from zeroplay_jax.selfplay.roles import Table, TaskDropped
from zeroplay_jax.types import POLICY, Json, Trajectory, UserError

COLLECTION = 'RUC-NLPIR/FlashRAG_datasets'
# What has to be the same in two results before their difference means anything.
SETTINGS = (
    'retrieval',
    'top_k',
    'prompts',
    'metric',
    'samples',
    'limit',
    'judge',
    'tools',
    'tokens',
)


@dataclasses.dataclass(frozen=True)
class Answered:
    """One question's outcome: best score of its samples, searches and repetition of the first, what was answered."""

    score: float
    searches: int
    redundancy: float
    given: str | None


def load(name: str, limit: int = 0, seed: int = 0, rubrics: bool = False) -> list[Json]:
    """Questions {'question', 'answers', 'hops'} of a file or a public set; `limit` draws so many of them.

    With `rubrics`, the open tasks of a file, {'question', 'rubrics', …}.

    Raises:
      UserError: neither a file nor a public name; a line that cannot be used; no connection.
    """
    found = files.open_tasks(name) if rubrics else files.questions(path_of(name))
    return files.drawn(found, limit or len(found), seed)


def path_of(name: str) -> str:
    """Where the lines of a set are: the file that it names, or that of a public set, fetched.

    Raises:
      UserError: neither a file nor a public name; no connection.
    """
    if pathlib.Path(name).is_file():
        return name
    files.check_set(name)
    import huggingface_hub

    logging.getLogger('huggingface_hub').setLevel(
        logging.ERROR
    )  # what it tries again is told once, at the end
    huggingface_hub.utils.disable_progress_bars()
    try:
        with progress.clock(f'fetch {name}'):
            return huggingface_hub.hf_hub_download(
                COLLECTION, f'{name}/{files.PUBLIC[name]}.jsonl', repo_type='dataset'
            )
    except Exception as error:  # whatever a connection or a cache can raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f'{name} could not be fetched ({reason}); give a file of JSON lines instead'
        ) from None


def answer_all(
    table: Table,
    questions: Sequence[Json],
    number: int,
    *,
    metric: str,
    samples: int,
    answerer: str = '',
    done: Callable[[], None] = lambda: None,
) -> list[Answered]:
    """Greedy answers (`samples` 1), or the best of several at the solver's temperature (pass@k).

    Args:
      number: names this evaluation; with the place of a question it seeds its samples.
      answerer: name of the weights that write the last turn, after another policy's searches (SCOPE table 4); ''
        leaves it to the solver.
    """

    async def ask(i, item):
        heat = 0.0 if samples == 1 else None
        try:
            tries = await table.ask('solver', (number, i), samples, heat, **solving.asked(item))
            if answerer:
                tries = [await _answer_after(table, answerer, t) for t in tries]
        except TaskDropped as drop:
            where = f'question {i} ({item["question"][:60]!r})'
            raise UserError(
                f'{where} cannot be asked: {drop.reason}; raise config.rollout.prompt_tokens'
            ) from drop
        given = [solving.answer(t) for t in tries]
        scores = [
            await solving.score(table, metric, (number, i, j), item, g) for j, g in enumerate(given)
        ]
        queries = [q for turn in tries[0].turns for q in turn.queries]
        known = [0.0 if s is None else s for s in scores]  # no verdict is no approval
        return Answered(max(known), len(queries), redundancy(queries), given[int(np.argmax(known))])

    return table.scheduler.run([ask(i, item) for i, item in enumerate(questions)], done)


async def _answer_after(table: Table, weights: str, searched: Trajectory) -> Trajectory:
    """The last turn of a rollout written anew by other weights, which see everything before it."""
    player = table.roles['solver']
    starts = np.flatnonzero(np.diff((searched.source == POLICY).astype(np.int8), prepend=0) == 1)
    prompt = searched.tokens[: starts[-1]] if len(starts) else searched.tokens
    limits = dataclasses.replace(player.env.limits, max_turns=1)
    env = dataclasses.replace(player.env, search=None, limits=limits)
    (last,) = await table.scheduler.rollout(
        Request(weights, prompt, (*searched.identity, 1), env, 1, 0.0)
    )
    return dataclasses.replace(last, turns=(*searched.turns[:-1], *last.turns))


def redundancy(queries: Sequence[str]) -> float:
    """How much queries repeat earlier ones: mean over all but the first of the largest share of words in common
    (Jaccard) with an earlier one; 0 for fewer than two. π-Play reports such a number without defining it."""
    words = [set(normalize_answer(q).split()) for q in queries]
    best = [max(_overlap(a, b) for b in words[:i]) for i, a in enumerate(words) if i]
    return float(np.mean(best)) if best else 0.0


def _overlap(a: set[str], b: set[str]) -> float:
    return len(a & b) / len(a | b) if a | b else 0.0


def summary(answered: Sequence[Answered]) -> dict[str, float]:
    """Means over questions."""
    names = ('score', 'searches', 'redundancy')
    return {name: float(np.mean([getattr(a, name) for a in answered])) for name in names}


def results(
    settings: Json, sets: dict[str, tuple[Sequence[Json], Sequence[Answered]]]
) -> dict[str, Any]:
    """What `--out` writes: settings, and per set its fingerprint and one entry per question."""
    out: dict[str, Any] = {'settings': dict(settings), 'sets': {}}
    for name, (questions, answered) in sets.items():
        text = json.dumps(
            [[q['question'], q.get('rubrics', q['answers'])] for q in questions], ensure_ascii=False
        )
        out['sets'][name] = {
            'questions': hashlib.sha256(text.encode()).hexdigest()[:16],
            'mean': summary(answered),
            'answered': [dataclasses.asdict(a) for a in answered],
        }
    return out


def compare(one: Json, other: Json, draws: int = 10_000) -> dict[str, tuple[float, float, float]]:
    """Set → (mean difference other − one, low, high): 95 % interval of a paired bootstrap with a fixed seed.

    Raises:
      UserError: results that were made under different conditions, or on other questions; names what differs.
    """
    differ = [k for k in SETTINGS if one['settings'].get(k) != other['settings'].get(k)]
    if differ:
        shown = '; '.join(
            f'{k}: {one["settings"].get(k)} and {other["settings"].get(k)}' for k in differ
        )
        raise UserError(
            f'these results cannot be compared, they differ in {shown}; evaluate both alike'
        )
    shared = [name for name in one['sets'] if name in other['sets']]
    for name in shared:
        if one['sets'][name]['questions'] != other['sets'][name]['questions']:
            raise UserError(
                f'the questions of {name} differ between the two results; evaluate both on the same'
            )
    if not shared:
        raise UserError('the two results have no set in common; evaluate both on the same sets')
    gaps = {}
    for name in shared:
        pairs = zip(*(r['sets'][name]['answered'] for r in (one, other)), strict=True)
        gap = np.array([b['score'] - a['score'] for a, b in pairs])
        rng = np.random.default_rng(0)
        means = [
            gap[rng.integers(0, len(gap), len(gap))].mean() for _ in itertools.repeat(None, draws)
        ]
        low, high = np.quantile(means, (0.025, 0.975))
        gaps[name] = (float(gap.mean()), float(low), float(high))
    return gaps
