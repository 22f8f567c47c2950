"""What self-play teaches beyond its demonstrations, with controls: exact match by hops before and after a run.

    python -m benchmarks.hops --svg benchmarks/results/quickstart.svg
    python -m benchmarks.hops --arms selfplay --seeds 0 1 2 3 4
    python -m benchmarks.hops --arms random frozen two_hops --seeds 0 1
    python -m benchmarks.hops --arms form majority cloning supervised_two supervised_all --seeds 0 1 2
    python -m benchmarks.hops --arms composed --seeds 0 1 2 3 4

Each arm is configs/quickstart.py with the settings of `ARMS`. All but `quickstart` have as many steps as two iterations
of self-play, unless their settings say otherwise, and are evaluated with up to six hops. The start was shown chains of
at most two hops (tools/checkpoints/base_parts.py). Runs from other starts, and of credit per turn, can be made from
commit 21656cfd.
Finished runs in --folder are not made again: give another one after a change of the code. Prints a table: means over
seeds, with the lowest and the highest seed; and the differences of the other arms from the first, paired by seed, with
Student's 95 % intervals.
"""

from __future__ import annotations

import hashlib
import json
import math
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.command import one_line_errors, parser, table
from zeroplay_jax.configuration import fields
from zeroplay_jax.data import files
from zeroplay_jax.evaluation.statistics import difference, interval_text
from zeroplay_jax.mini.world import World, evaluation_questions
from zeroplay_jax.types import Json, UserError

HOPS = ('1', '2', '3', '4', '5', '6')


# Self-play's three hops: .43 at the start, .73 on average, .70 in its lowest of five seeds.
_HALF, _LOWEST = 'below .58 with three hops (half of the gain)', '.70 or more (its lowest seed)'


class Arm(NamedTuple):
    """Settings of a run beside those of the quickstart.

    Attributes:
      text: what it is, in the table.
      flags: the settings, as on the command line.
      support, contradiction: of a claim, written down before the first run of the arm; '' where nothing was.
      questions: how many questions of 1, 2, … hops about the training worlds are given in a file; (): no file.
    """

    text: str
    flags: tuple[str, ...] = ()
    support: str = ''
    contradiction: str = ''
    questions: tuple[int, ...] = ()


# Evaluations in between: after the steps of two iterations, and after twice as many.
_CURVE = 'eval.every=24'
# The solver's steps, groups and rollouts of two iterations of self-play, on new questions in every step.
_GIVEN = ('recipe=dspo', 'schedule.iterations=1', 'solver.steps=24')
_GIVEN_LONG = (*_GIVEN, 'solver.steps=72', _CURVE)
# As many questions of each length that has a share.
_SUPERVISED = (*_GIVEN, 'inputs.world_questions=400')

# Four attempts per document, because the solver confirms every question.
_CONFIRMED = (
    'proposer.train_iterations=0',
    'schedule.hop_ratio=(0,1,2,2)',
    'pool.samples=4',
)
# One or two facts at a time; the answers of all parts but the last need documents of their own.
_COMPOSED = ('recipe=examples.composing.recipe', *_CONFIRMED)

# Seed 0 first stopped in its fifth iteration, where all rollouts of two steps were right: the last field was set then.
_ONE_HOP = (
    'schedule.hop_ratio=(1,)',
    'schedule.iterations=6',
    _CURVE,
    'stop_after_empty_steps=0',
)

# Of all arms but the first, unless their own settings say otherwise.
_TWO_ITERATIONS = ('schedule.iterations=2', 'eval.hops=(1,2,3,4,5,6)')

ARMS = {
    'quickstart': Arm(
        '`make quickstart`: one iteration of self-play',
        ('schedule.iterations=1', 'eval.hops=(1,2,3,4)'),
    ),
    'selfplay': Arm('self-play (Dr. Zero)'),
    'random': Arm(
        'rewards drawn at random, of both roles', ('reward.answer=benchmarks.hops:random_score',)
    ),
    'frozen': Arm('proposer not trained', ('proposer.train_iterations=0',)),
    'two_hops': Arm('questions of two hops asked for', ('schedule.hop_ratio=(0,1)',)),
    'form': Arm(
        'rewards for form only, of both roles',
        (
            'reward.answer=benchmarks.hops:answered',
            'reward.difficulty=benchmarks.hops:no_difficulty',
            # Nearly all rollouts answer: most groups, and perhaps whole steps, have equal rewards.
            'stop_after_empty_steps=0',
        ),
        f'correct answers are needed: {_HALF}',
        f'form is enough: {_LOWEST}',
    ),
    'majority': Arm(
        'label: the majority of the answers, not that of the proposer',
        ('drzero.labels=majority',),
        f'answers of the proposer tell what is right: {_HALF}',
        f'agreement is enough: {_LOWEST}',
    ),
    'cloning': Arm(
        'right answers copied, wrong ones left out; proposer not trained',
        ('proposer.train_iterations=0', 'solver.baseline=none', 'solver.scale=none'),
        f'reinforcement learning is needed: {_HALF}',
        f'copying is enough: {_LOWEST}',
    ),
    'window': Arm(
        'self-play on the questions that one to three of four solves answer rightly',
        ('pool.measure=4', 'pool.window=(0.2,0.8)'),
        'such questions teach more: .78 or more with three hops (above its highest seed)',
        '.73 or less (its mean)',
    ),
    'grounded': Arm(
        'self-play on questions whose every step the proposer read',
        # Four attempts per document, because most are rejected.
        ('recipe=benchmarks.grounded', 'pool.samples=4'),
        'wrong and short questions are what limits: .88 or more with three hops (labels of these lengths)',
        '.77 or less (its highest seed)',
    ),
    'grounded_long': Arm(
        'self-play on questions whose every step the proposer read, six iterations',
        ('recipe=benchmarks.grounded', 'pool.samples=4', 'schedule.iterations=6', _CURVE),
        'with right questions more steps bring four hops: .40 or more',
        '.32 or less (highest seed of two iterations of self-play)',
    ),
    'four_hops': Arm(
        'self-play, most questions of four hops asked for',
        ('schedule.hop_ratio=(0,0,1,3)',),
        'asking for longer questions does not make them: .32 or less with four hops (its highest seed)',
        '.40 or more',
    ),
    'long': Arm(
        'self-play, six iterations in place of two',
        ('schedule.iterations=6', _CURVE),
        'steps are what limits four hops: .40 or more',
        '.32 or less (highest seed of two iterations)',
    ),
    'long_frozen': Arm(
        'self-play, six iterations, proposer not trained',
        ('schedule.iterations=6', 'proposer.train_iterations=0', _CURVE),
        "its training is what limits the arm 'long' with four hops: .40 or more",
        '.32 or less',
    ),
    'composed': Arm(
        'questions of two hops, and of three and four composed of shorter ones; proposer not trained',
        _COMPOSED,
        'right questions of four hops are what was missing: .40 or more with four hops',
        '.32 or less (highest seed of self-play)',
    ),
    'composed_long': Arm(
        'composed questions, six iterations in place of two',
        (*_COMPOSED, 'schedule.iterations=6', _CURVE),
        'as good as labels of all lengths after as many steps: .60 or more with four hops',
        '.45 or less (their highest seed after a third of the steps)',
    ),
    'confirmed': Arm(
        'questions of two to four hops asked for at once, the solver agrees; proposer not trained',
        # As many questions of each length and attempts as `composed`, confirmed as a whole.
        (*_CONFIRMED, 'pool.measure=1', 'pool.window=(1.0,1.0)'),
        'composing is needed: .34 or less with four hops (below the lowest seed of composed)',
        'confirming is enough: .40 or more',
    ),
    'one_hop': Arm(
        'questions of one hop asked for, six iterations',
        _ONE_HOP,
        'a trained proposer asks harder questions than it is asked for: .10 or more above the frozen one with two '
        'or with three hops',
        'at most .03 above it with both',
    ),
    'one_hop_frozen': Arm(
        'questions of one hop asked for, six iterations; proposer not trained',
        (*_ONE_HOP, 'proposer.train_iterations=0'),
    ),
    'supervised_two': Arm(
        'given questions of one and two hops, no proposer',
        (*_SUPERVISED, 'schedule.hop_ratio=(1,1)'),
        'self-play is as good without questions: at most .05 above its means with three and four hops',
        'more than .05 above',
    ),
    'supervised_long': Arm(
        'given questions of one to six hops, three times the steps',
        (*_SUPERVISED, 'schedule.hop_ratio=(1,1,1,1,1,1)', 'solver.steps=72', _CURVE),
        'this start can reach .85 with three and .70 with four hops in 72 steps',
        '.45 or less with four hops (highest seed of 24 steps)',
    ),
    'supervised_all': Arm(
        'given questions of one to six hops, no proposer',
        (*_SUPERVISED, 'schedule.hop_ratio=(1,1,1,1,1,1)'),
        'self-play is as good without questions: at most .05 above its means with three and four hops',
        'more than .05 above',
    ),
    'supervised_same': Arm(
        'given questions of the lengths that self-play asks for, no proposer',
        _GIVEN,
        'self-play is as good without questions: at most .05 above its means with three and four hops',
        'more than .05 above',
        (0, 0, 576, 192),
    ),
    'supervised_realised': Arm(
        'given questions of the lengths that questions of self-play have, no proposer',
        _GIVEN,
        'right answers alone make labels better: .78 or more with three hops (above the highest seed of self-play)',
        '.73 or less (its mean)',
        # The pools of seed 0: 360 questions of two hops, 158 of three, 46 of four or more; some 40 that are none.
        (0, 490, 215, 63),
    ),
    'supervised_composed': Arm(
        'given questions of the lengths that composing asks for, three times the steps',
        _GIVEN_LONG,
        # Of the first three seeds of composing.
        'labels lead composing after as many steps: .80 or more with four hops (its mean is .78)',
        '.74 or less (below its lowest seed)',
        (0, 460, 922, 922),
    ),
}


def random_score(prediction: str, golds: Sequence[str]) -> float:
    """Returns 0 or 1, each with probability ½ and always the same for the same texts."""
    digest = hashlib.blake2b(repr((prediction, sorted(golds))).encode(), digest_size=1).digest()
    return float(digest[0] & 1)


def answered(prediction: str | None, golds: Sequence[str]) -> float:
    """Returns 1 for any answer, 0 for none: a reward for form."""
    del golds
    return float(bool(prediction and prediction.strip()))


def no_difficulty(solved: float, n: int, target: float) -> float:
    """Returns 0: a question earns its proposer no more than its form."""
    del solved, n, target
    return 0.0


def words(name: str, seed: int, workdir: pathlib.Path) -> list[str]:
    """Returns the arguments of Python that make a run of an arm."""
    command = ['-m', 'zeroplay_jax.main', '--config=configs/quickstart.py']
    command += [f'--workdir={workdir}', f'--config.seed={seed}', '--config.progress=False']
    command += ['--config.eval.every=0', '--config.log.writers=()']
    if ARMS[name].questions:
        command += [f'--config.inputs.questions={_questions_file(workdir)}']
    settings = dict(flag.split('=', 1) for flag in (*_TWO_ITERATIONS, *ARMS[name].flags))
    return command + [f'--config.{field}={value}' for field, value in settings.items()]


def _questions_file(workdir: pathlib.Path) -> pathlib.Path:
    return workdir.with_suffix('.questions.jsonl')


def training_worlds() -> list[World]:
    """Returns the worlds that runs of the quickstart are trained on."""
    first, count = fields.config('quickstart').world.train
    return [World(seed) for seed in range(first, first + count)]


def write_questions(path: pathlib.Path, numbers: Sequence[int]) -> None:
    """Writes distinct questions about the training worlds, `numbers` of 1, 2, … hops."""
    worlds = training_worlds()
    questions: list[Json] = []
    for hops, number in enumerate(numbers, 1):
        questions += evaluation_questions(worlds, number, (hops,))
    files.write_lines(path, questions)


def play(folder: pathlib.Path, name: str, seed: int) -> dict[str, dict[str, float]]:
    """Returns 'before' and 'after', hops → exact match, of a run that is made unless it is there."""
    workdir = folder / f'{name}-{seed}'
    summary = workdir / 'summary.json'
    if not summary.is_file():
        if ARMS[name].questions:
            write_questions(_questions_file(workdir), ARMS[name].questions)
        command = [sys.executable, *words(name, seed, workdir)]
        with workdir.with_suffix('.log').open('w') as log:
            status = subprocess.run(command, stdout=log, stderr=log).returncode
        if status:
            raise UserError(f'{name}, seed {seed} ended with status {status}; see {log.name}')
    return json.loads(summary.read_text())['em_by_hop']


def _cell(values: Sequence[float]) -> str:
    if any(map(math.isnan, values)):
        return ''
    mean = f'{statistics.mean(values):.2f}'
    if len(values) == 1:
        return mean
    return f'{mean} [{min(values):.2f}, {max(values):.2f}]'


def _scores(run: dict[str, float]) -> list[float]:
    """Returns exact match by hops, NaN where they were not measured, and the mean of three and four."""
    return [*(run.get(hop, math.nan) for hop in HOPS), (run['3'] + run['4']) / 2]


def draw(path: pathlib.Path, before: dict[str, float], after: Sequence[dict[str, float]]) -> None:
    """Draws exact match by hops at the start and after self-play, with the range over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 2.6), layout='constrained')
    axes = figure.subplots()
    measured = [hop for hop in HOPS if hop in before]
    hops = list(map(int, measured))
    axes.axvspan(0.6, 2.4, color='0.92')
    axes.text(1.5, 0.04, 'shown to the start', ha='center', color='0.4', fontsize=9)
    axes.plot(hops, [before[hop] for hop in measured], 'o--', color='0.45', label='start')
    by_hop = [[run[hop] for run in after] for hop in measured]
    axes.fill_between(hops, list(map(min, by_hop)), list(map(max, by_hop)), alpha=0.2)
    axes.plot(hops, list(map(statistics.mean, by_hop)), 'o-', label='after self-play')
    axes.set(xlabel='searches that a question needs', ylabel='exact match')
    axes.set(xlim=(0.6, hops[-1] + 0.4), ylim=(-0.02, 1.04), xticks=hops)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={'Date': None})


def main(argv=None) -> None:
    """Makes the runs and prints the table."""
    flags = parser('hops', __doc__)
    flags.add_argument(
        '--arms', nargs='+', choices=ARMS, default=['quickstart'], help='(quickstart)'
    )
    flags.add_argument(
        '--seeds', nargs='+', type=int, default=[0, 1, 2, 3, 4], help='of each arm (0 to 4)'
    )
    flags.add_argument('--folder', default='runs/hops', type=pathlib.Path, help='of the runs')
    flags.add_argument('--svg', type=pathlib.Path, help='draws the first arm into this file')
    arguments = flags.parse_args(argv)
    names, seeds = arguments.arms, arguments.seeds
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    results = {}
    with one_line_errors('benchmarks.hops'):
        for seed in seeds:
            for name in names:
                results[name, seed] = play(arguments.folder, name, seed)
    before = results[names[0], seeds[0]]['before']
    rows.append(['start', *(_cell([score]) for score in _scores(before))])
    # Arm → for each column the scores of its seeds.
    columns = {}
    for name in names:
        after = [_scores(results[name, seed]['after']) for seed in seeds]
        columns[name] = list(zip(*after, strict=True))
        rows.append([ARMS[name].text, *map(_cell, columns[name])])
    for name in names[1:] if len(seeds) > 1 else []:
        pairs = zip(columns[names[0]], columns[name], strict=True)
        gains = []
        for first, other in pairs:
            # Against an exact 0 the interval is that of the paired differences.
            paired = [x - y for x, y in zip(other, first, strict=True)]
            gains.append(interval_text(difference([0.0], paired), sign='+'))
        rows.append([f'{name} - {names[0]}', *('' if 'nan' in gain else gain for gain in gains)])
    if arguments.svg:
        draw(arguments.svg, before, [results[names[0], seed]['after'] for seed in seeds])
    print(table(['hops', *HOPS, '3 and 4'], rows))
    files = [arguments.folder / f'{name}-{seed}.code' for name, seed in results]
    codes = sorted({path.read_text() if path.is_file() else 'unknown' for path in files})
    print(f'code of the runs: {", ".join(codes)}', file=sys.stderr)


if __name__ == '__main__':
    main()
