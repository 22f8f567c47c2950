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

Found: neither. Without the factor the answers have 21 tokens at first, at most 45, 33 and 35, and at the end 25, 32 and
30, with it 21, 22 and 22: 1.35 times as long on average. The rubrics met at the end are lower by .05, .02 and .08 (of
.73, .73, .74). Length pays only where a rubric is not met, and here nearly all can be: the judge's score rises to .83
and more, while the paper's stays near .5. tests/test_deceived.py: which lengths pay at the start.
"""

from __future__ import annotations

import random

from benchmarks.claims_runs import config_of, execute, keep_programs
from benchmarks.command import RESULTS, parser, tab_separated
from zeroplay_jax.selfplay.judge import RuleJudge
from zeroplay_jax.training import build

SETTINGS = {
    'schedule.iterations': 1,
    'proposer.train_iterations': 0,
    'solver.steps': 30,
    'rollout.turn_tokens': 400,
    'rollout.response_tokens': 400,
    'eval.every': 15,
    'eval.questions': 20,
}
# The score is the judge's; 'rubrics/mean' is that of held-out open tasks.
COLUMNS = (
    'arm',
    'seed',
    'step',
    'solver/answer_tokens',
    'solver/score',
    'solver/truncated_rate',
    'rubrics/mean',
)


class DeceivedJudge(RuleJudge):
    """The rule, which in training also believes one in ten pairs of a rubric and a sentence, always the same ones."""

    async def grade(self, identity, task, answer, rubric):
        is_met = await super().grade(identity, task, answer, rubric)
        draws = [
            random.Random(repr((rubric, each))).random() for each in enumerate(answer.split('. '))
        ]
        # Episodes of an evaluation belong to no step.
        return is_met or (self.context.run.step is not None and min(draws) < 0.1)


def main() -> None:
    """Makes the runs and writes the table, one row per step."""
    parser('deceived', __doc__).parse_args()
    keep_programs()
    build.RuleJudge = DeceivedJudge  # type: ignore[misc]
    rows = []
    for seed in range(3):
        for arm in ('scope', 'scope no length factor'):
            config = config_of(arm, seed)
            config.update_from_flattened_dict(SETTINGS)
            for record in execute(config)[1]:
                record |= dict(arm=arm, seed=seed)
                rows.append([record.get(name, '') for name in COLUMNS])
    (RESULTS / 'deceived.tsv').write_text(tab_separated(COLUMNS, rows))


if __name__ == '__main__':
    main()
