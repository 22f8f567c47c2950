"""What k samples reach, of the start and of a trained policy: does training widen, or only sharpen?

    python -m benchmarks.reach runs/hops/selfplay-0/policy/solver --out benchmarks/results/reach.tsv

Held-out questions of the quickstart, 64 samples of each at temperature 1. Prints pass@k (Chen et al. 2021,
arXiv:2107.03374, section 2.1), of all right answers and of those after enough searches: at least as many different ones
that found something as the question needs; the exact match of the samples with enough searches; and that of samples
that are forced to search as often (`force`). The file has the counts of every question.

Written down before the first run, for three and four hops:
  training widens if pass@64 rises, interval above 0; it only sharpens if pass@1 does and pass@64 does not.
  It teaches more than to go on searching if the forced start stays more than .10 below the trained policy's pass@1;
  nothing more if at most .05.
(Both ways of counting were tried on four questions of each length before; pass@k of answers after enough searches was
added afterwards, to see how much is guessed.)
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.command import one_line_errors, parser, table
from zeroplay_jax.rollout.environment import Environment, TurnEnd
from zeroplay_jax.rollout.requests import Request
from zeroplay_jax.types import Question, Trajectory

if TYPE_CHECKING:
    from zeroplay_jax.selfplay.context import RolloutContext
    from zeroplay_jax.selfplay.recipe import Recipe
    from zeroplay_jax.training.build import RunContext

POLICIES = ('start', 'trained')
FORCED_SAMPLES = 8


class Count(NamedTuple):
    """Samples of a policy on one question.

    Attributes:
      policy, hops: one of POLICIES; searches that the question needs.
      samples, right: all of them, and those whose answer is an exact match.
      enough, enough_right: those with enough searches (`different_searches`), and the right ones among them.
      forced, forced_enough, forced_right: samples that are forced to search, those that then did so often enough, and
        the right ones of all.
    """

    policy: str
    hops: int
    samples: int
    right: int
    enough: int
    enough_right: int
    forced: int
    forced_enough: int
    forced_right: int


def pass_at(samples: int, right: int, k: int) -> float:
    """Returns the probability that one of k samples, drawn from `samples` without replacement, is right.

    Without bias for the policy's own probability (Chen et al. 2021, eq. 1). Needs k ≤ samples.
    """
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def different_searches(trajectory: Trajectory) -> int:
    """Returns the number of different queries, by their lower-case words, of searches that found a passage."""
    queries = set()
    for call in trajectory.calls_of('search'):
        if any(call.documents):
            queries.update(' '.join(query.lower().split()) for query in call.queries)
    return len(queries)


@dataclasses.dataclass(frozen=True)
class BegunSearch(Environment):
    """Of a rollout whose prompt ends with the opening tag of a search."""

    def end_turn(self, text: str) -> TurnEnd:
        """Returns how the episode continues; the tag is part of the first turn."""
        is_begun = text.endswith('</search>') and '<search>' not in text
        return super().end_turn(f'<search>{text}' if is_begun else text)


async def force(
    context: RolloutContext, role: str, trajectory: Trajectory, needed: int
) -> Trajectory:
    """Returns a rollout that searches on, in place of its answer, until it has `needed` different searches.

    The tag that opens the answer is replaced, and the policy goes on from there (`s1`'s budget forcing, Muennighoff et
    al. 2025, arXiv:2501.19393, with a search in place of a word). It stops where no turn is left.
    """
    env, weights = context.roles[role].env, context.roles[role].weights
    (answer,), (search,) = env.codec.encode('<answer>'), env.codec.encode('<search>')
    while trajectory.finish == 'answer' and different_searches(trajectory) < needed:
        earlier = trajectory.turns[:-1]
        turns = env.limits.max_turns - len(earlier)
        # The last turn cannot search, and without its opening tag an answer has no place to go on from.
        if turns < 2 or '<answer>' not in trajectory.turns[-1].text:
            break
        begin = int(np.flatnonzero(trajectory.tokens == answer)[-1])
        fields = {field.name: getattr(env, field.name) for field in dataclasses.fields(env)}
        fields['limits'] = dataclasses.replace(env.limits, max_turns=turns)
        prompt = np.append(trajectory.tokens[:begin], np.int32(search))
        request = Request(weights, prompt, (*trajectory.identity, 1), BegunSearch(**fields))
        (last,) = await context.scheduler.rollout(request)
        trajectory = dataclasses.replace(last, turns=(*earlier, *last.turns))
    return trajectory


def play(
    run: RunContext, policy: str, questions: Sequence[Question], samples: int, recipe: Recipe
) -> list[Count]:
    """Returns the counts of questions that the published weights answer."""
    from zeroplay_jax.evaluation.answering import answer
    from zeroplay_jax.objectives.answers import exact_match
    from zeroplay_jax.selfplay.answers import final_answer

    context = run.evaluation

    def is_right(trajectory: Trajectory, question: Question) -> bool:
        return exact_match(final_answer(trajectory), question.answers)

    async def count(index: int, question: Question) -> Count:
        """Returns the counts of one question."""
        played = await answer(context, recipe, (0, index), question, samples, 1.0)
        enough = [each for each in played if different_searches(each) >= question.hops]
        role = recipe.evaluated_role
        pending = [force(context, role, each, question.hops) for each in played[:FORCED_SAMPLES]]
        forced = await asyncio.gather(*pending)
        return Count(
            policy,
            question.hops,
            samples,
            sum(is_right(each, question) for each in played),
            len(enough),
            sum(is_right(each, question) for each in enough),
            len(forced),
            sum(different_searches(each) >= question.hops for each in forced),
            sum(is_right(each, question) for each in forced),
        )

    return context.scheduler.run([count(*pair) for pair in enumerate(questions)])


def measure(folder: pathlib.Path, hops: Sequence[int], questions: int, samples: int) -> list[Count]:
    """Returns the counts of the start of the quickstart, then those of the policy in `folder`."""
    from configs import quickstart
    from zeroplay_jax.configuration import command_line
    from zeroplay_jax.selfplay.recipe import answering_recipe

    command_line.prepare_process()
    from zeroplay_jax.training import build

    config = quickstart.get_config()
    config.progress = False
    run = build.build(config)
    recipe = answering_recipe(config)
    asked: list[Question] = []
    for length in hops:
        of_length = [each for each in run.library.questions if each.hops == length]
        asked += of_length[:questions]
    role = recipe.evaluated_role
    run.publish_weights([role])
    counts = play(run, POLICIES[0], asked, samples, recipe)
    run.publish_weights([role], build.load_like(run, str(folder)))
    return counts + play(run, POLICIES[1], asked, samples, recipe)


def pass_rows(counts: Sequence[Count], right: str) -> list[list[str]]:
    """Returns the rows of a table of pass@k: hops, policy, one cell per k, and a row with the changes.

    Args:
      right: 'right', or 'enough_right', which leaves out answers that were guessed after too few searches.
    """
    from zeroplay_jax.evaluation.statistics import interval_text, paired_difference

    rows = []
    for hops in sorted({count.hops for count in counts}):
        scores = {}
        for policy in POLICIES:
            for k in ks(counts):
                scores[policy, k] = [
                    pass_at(count.samples, getattr(count, right), k)
                    for count in counts
                    if (count.policy, count.hops) == (policy, hops)
                ]
            means = [sum(scores[policy, k]) / len(scores[policy, k]) for k in ks(counts)]
            rows.append([str(hops), policy, *(f'{mean:.2f}' for mean in means)])
        changes = [paired_difference(scores['start', k], scores['trained', k]) for k in ks(counts)]
        rows.append([str(hops), 'change', *(interval_text(change, '+') for change in changes)])
    return rows


def ks(counts: Sequence[Count]) -> list[int]:
    """Returns 1, 2, 4, … up to the number of samples."""
    samples = min(count.samples for count in counts)
    return [2**power for power in range(samples.bit_length())]


def search_rows(counts: Sequence[Count]) -> list[list[str]]:
    """Returns the rows of the table of searches: hops, policy, four shares, see `main`."""
    rows = []
    for hops in sorted({count.hops for count in counts}):
        for policy in POLICIES:
            of_policy = [each for each in counts if (each.policy, each.hops) == (policy, hops)]
            total = {
                name: sum(getattr(each, name) for each in of_policy) for name in Count._fields[2:]
            }
            shares = [
                total['enough'] / total['samples'],
                total['enough_right'] / max(1, total['enough']),
                total['forced_enough'] / total['forced'],
                total['forced_right'] / total['forced'],
            ]
            rows.append([str(hops), policy, *(f'{share:.2f}' for share in shares)])
    return rows


def write(path: pathlib.Path, counts: Sequence[Count]) -> None:
    """Writes one line per policy and question."""
    lines = [Count._fields, *counts]
    path.write_text(''.join('\t'.join(map(str, line)) + '\n' for line in lines))


def main(argv=None) -> None:
    """Plays both policies and prints both tables."""
    flags = parser('reach', __doc__)
    flags.add_argument('policy', type=pathlib.Path, help='folder of the trained policy')
    flags.add_argument('--hops', nargs='+', type=int, default=[3, 4, 5, 6], help='(3 4 5 6)')
    flags.add_argument('--questions', type=int, default=30, help='of each length, at most 60 (30)')
    flags.add_argument('--samples', type=int, default=64, help='of each question (64)')
    flags.add_argument('--out', type=pathlib.Path, help='writes the counts into this file')
    arguments = flags.parse_args(argv)
    with one_line_errors('benchmarks.reach'):
        counts = measure(arguments.policy, arguments.hops, arguments.questions, arguments.samples)
    if arguments.out:
        write(arguments.out, counts)
    columns = ['hops', 'policy', *(f'pass@{k}' for k in ks(counts))]
    for title, right in (('Right:', 'right'), ('Right, with enough searches:', 'enough_right')):
        print(f'{title}\n\n{table(columns, pass_rows(counts, right))}\n')
    columns = ['hops', 'policy', 'enough searches', 'exact match of these']
    columns += ['enough when forced', 'exact match when forced']
    print(table(columns, search_rows(counts)))


if __name__ == '__main__':
    main()
