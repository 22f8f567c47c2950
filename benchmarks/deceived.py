"""Whether answers grow without SCOPE's length factor (figure 2) where the judge prefers long ones.

    python -m benchmarks.deceived       # six runs, half an hour; writes results/deceived.tsv

In the claims' arms nothing deceives the judge, and the length factor makes no difference. Here the rule believes in
training, besides what is right, one in ten pairs of a rubric and a sentence, whatever the sentence says: where a rubric
is not met, another sentence pays. Evaluations are not deceived. The challenger is not trained, and the solver does 30
steps (the paper 60) from the claims' start. As in the paper a turn may fill the whole response: of 400 tokens, 17 times
the mean answer.

Written down before the first run with these seeds. Of the start, 512 sampled answers had been seen (seed 100): 70 %
have one to three sentences, 22 % four or five, 7 % six to nine, .6 % ten to eighteen; 1.2 % of the rollouts are cut
off. So longer answers are within reach.
  The collapse of figure 2 appears if the answers of the last step without the factor are, in every seed, at least twice
  as long as with it, and the rubrics met at the end are on average lower by more than .05.
  Answers only grow if the first holds alone. It does not appear if they are on average less than 1.25 times as long.
Expected: they grow, because every step samples five long answers; the loss of rubrics needs rollouts that are cut off,
for which 30 steps may be too few.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from benchmarks import claims_runs
from benchmarks.command import RESULTS, parser, tab_separated
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.selfplay.judge import RuleJudge
from zeroplay_jax.training import build

ARMS = ('scope', 'scope no length factor')
SETTINGS = {
    'schedule.iterations': 1,
    'proposer.train_iterations': 0,
    'solver.steps': 30,
    'rollout.turn_tokens': 400,
    'rollout.response_tokens': 400,
    'eval.every': 15,
    'eval.questions': 20,
}
# Training's as the judge sees it, then that of held-out open tasks.
METRICS = ('solver/answer_tokens', 'solver/score', 'solver/truncated_rate', 'rubrics/mean')


class DeceivedJudge(RuleJudge):
    """The rule, which in training also believes one in ten pairs of a rubric and a sentence, always the same ones."""

    async def grade(self, identity, task, answer, rubric):
        is_met = await super().grade(identity, task, answer, rubric)
        sentences = enumerate(answer.split('. '))
        draws = [random.Random(repr((rubric, each))).random() for each in sentences]
        # Episodes of an evaluation belong to no step.
        return is_met or (self.context.run.step is not None and min(draws) < 0.1)


def rows_of(arm: str, seed: int) -> list[list[Any]]:
    """Makes a run and returns arm, seed, step and METRICS of its steps."""
    build.RuleJudge = DeceivedJudge  # type: ignore[misc]
    config = claims_runs.config_of(arm, seed)
    config.update_from_flattened_dict(SETTINGS)
    _, records, _ = claims_runs.execute(config)
    rows = []
    for record in records:
        rows.append([arm, seed, record['step'], *(record.get(name, '') for name in METRICS)])
    return rows


def main(argv=None) -> None:
    """Makes the runs and writes the table."""
    parser('deceived', __doc__).parse_args(argv)
    claims_runs.keep_programs()
    rows = []
    for seed, arm in itertools.product(range(3), ARMS):
        rows += rows_of(arm, seed)
        text = tab_separated(('arm', 'seed', 'step', *METRICS), rows)
        write_text(RESULTS / 'deceived.tsv', text)


if __name__ == '__main__':
    main()
