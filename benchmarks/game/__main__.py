"""Trains each paper's proposer in a game whose best choice is known: python -m benchmarks.game --folder FOLDER > FILE

The game is benchmarks/game/recipe.py. The difficulty, the number of solver rollouts, the groups, advantages, loss and
optimiser are those of a paper's config; the learning rate, the steps and the rollouts of a step are the game's. The
policy has the size of the miniature's, and random weights, in which documents of similar chances are similar. Prints
a row per run: the chance with the highest expected reward, which is computed by enumeration; and of the choices of the
first step and of the last ones the mean chance, and the mean distance of their chances from the best one. A folder of
finished runs gives the same table again.
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict
from scipy.stats import binom

import zeroplay_jax as zp
from benchmarks.command import one_line_errors, parser, read_lines
from benchmarks.game.recipe import CHANCES, NAMES, ROLE
from zeroplay_jax.configs import ablations
from zeroplay_jax.configuration import fields
from zeroplay_jax.extras.drawing import new_axes, save
from zeroplay_jax.objectives import rewards
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT

# Configs, and rows of configs/ablations.py. The proposer of π-Play has the settings of Dr. Zero's.
PROPOSERS = {
    'drzero': 'Dr. Zero, π-Play',
    'drzero/parabolic': 'Dr. Zero, parabolic',
    'drzero/sqlm': 'SQLM*',
    'drzero/r_zero': 'R-Zero*',
    'scope': 'SCOPE',
    'ssp': 'SSP',
}
STEPS = 60
# Rollouts of a step.
BATCH = 256
# Steps whose choices are averaged.
LAST = 10
# Chances that differ by this have embeddings with a correlation of exp(-1/2).
SIMILAR = 0.1


def paper_config(proposer: str) -> ConfigDict:
    """Returns the config of a paper, or of a row of its ablations."""
    return ablations.get_config(proposer) if '/' in proposer else fields.config(proposer)


def expected_rewards(reward: ConfigDict, chances: np.ndarray) -> np.ndarray:
    """Returns the expected reward of a question that a solver answers with each of these chances."""
    total = 0.0 * chances
    for solved in range(reward.solves + 1):
        score = rewards.difficulty(solved, reward.solves, reward.difficulty, reward.target)
        total += score * binom.pmf(solved, reward.solves, chances)
    return total


def game_config(proposer: str, start: pathlib.Path, seed: int) -> ConfigDict:
    """Returns the config of a run: the game, with the proposer of a paper."""
    paper = paper_config(proposer)
    config = fields.default_config('benchmarks.game.recipe')
    config.reward.update(paper.reward)
    config.reward.answer = 'em'
    role = config[ROLE]
    role.update({name: paper[ROLE][name] for name in role if name in paper[ROLE]})
    # The papers' learning rates are those of models with billions of parameters.
    role.update(learning_rate=1e-4, warmup_steps=0, prompt_tokens=0)
    role.update(steps=STEPS, batch=BATCH // role.samples)
    config.seed = seed
    config.policy.update(path=str(start), dtype='float32', logits='trained')
    config.compilation.cache = str(start.parent / 'programs')
    config.rollout.update(prompt_tokens=16, turn_tokens=1, max_turns=1)
    config.sampler.update(slots=128, context=24, chunk=16, fill_rows=128, burst=1)
    config.micro.update(rows=64, tokens=48)
    config.world.update(train=(0, 1), evaluation=(0, 1))
    config.eval.update(every=0, questions=1, hops=(1,))
    config.checkpoint.every = STEPS
    config.update(progress=False, log_trajectories=0)
    return config


def write_start(folder: pathlib.Path, seed: int) -> None:
    """Writes a policy of the miniature's size with random weights."""
    import jax

    from zeroplay_jax.policy import hf, transformer
    from zeroplay_jax.policy.shape import read_config

    model = read_config(BUILT_IN_CHECKPOINT)
    params = transformer.init(model, jax.random.key(seed))
    distances = np.subtract.outer(CHANCES, CHANCES)
    covariance = np.exp(-0.5 * (distances / SIMILAR) ** 2)
    draws = np.random.default_rng(seed).multivariate_normal(0 * CHANCES, covariance, 128)
    # Small ones: in the beginning all documents are about as likely.
    of_chances = 0.05 * draws.T
    tokens = np.arange(model.vocab_size)
    params['embedding'] = of_chances[tokens % len(CHANCES)].astype(np.float32)
    hf.save(folder, model, params, BUILT_IN_CHECKPOINT)


def play(proposer: str, seed: int, folder: pathlib.Path) -> np.ndarray:
    """Trains a proposer, or resumes it; returns the shares of its choices by step, float64 [steps, chances]."""
    start = folder / f'start_{seed}'
    if not start.exists():
        write_start(start, seed)
    workdir = folder / f'{proposer.replace("/", "_")}_{seed}'
    with contextlib.redirect_stdout(sys.stderr):
        zp.train(game_config(proposer, start, seed), workdir)
    shares = []
    for line in read_lines(workdir / 'metrics.jsonl'):
        if line['phase'] == ROLE:
            shares.append([line.get(f'{ROLE}/reward/{name}', 0.0) for name in NAMES])
    return np.array(shares)


def best_chance(reward: ConfigDict) -> float:
    """Returns the chance with the highest expected reward, to three digits."""
    chances = np.linspace(0.0, 1.0, 1001)
    return float(chances[expected_rewards(reward, chances).argmax()])


def draw(path: pathlib.Path, chosen: dict[str, list[np.ndarray]]) -> None:
    """Writes a figure of expected rewards and of the shares of choices by seed, one proposer above another."""
    title = 'What each proposer is paid for, and what it chooses after training'
    drawing, axes = new_axes(title, 'chance that the solver answers', '')
    drawing.set_figheight(4.5)
    axes.set_yticks(range(len(chosen)), [PROPOSERS[name] for name in reversed(chosen)])
    for level, (proposer, of_seeds) in enumerate(reversed(chosen.items())):
        shares = np.mean(of_seeds, axis=0)
        expected = expected_rewards(paper_config(proposer).reward, CHANCES)
        # A label that begins with a line below is left out of the legend.
        hidden = '_' * level
        heights = [level + 0.9 * values / values.max() for values in (shares, expected)]
        axes.fill_between(
            CHANCES, level, heights[0], color='C0', alpha=0.5, label=f'{hidden}choices'
        )
        axes.plot(CHANCES, heights[1], 'C1', label=f'{hidden}expected reward')
    save(drawing, axes, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains the proposers and prints the table."""
    arguments = parser('game', __doc__)
    arguments.add_argument('--proposers', nargs='+', choices=PROPOSERS, default=list(PROPOSERS))
    arguments.add_argument('--seeds', nargs='+', type=int, default=list(range(5)))
    arguments.add_argument('--folder', type=pathlib.Path, required=True, help='of the runs')
    arguments.add_argument('--svg', type=pathlib.Path, help='figure to write')
    args = arguments.parse_args(argv)
    print('proposer\tseed\tbest chance\tfirst chance\tfirst distance\tlast chance\tlast distance')
    chosen: dict[str, list[np.ndarray]] = {}
    with one_line_errors('benchmarks.game'):
        for proposer in args.proposers:
            best = best_chance(paper_config(proposer).reward)
            for seed in args.seeds:
                of_steps = play(proposer, seed, args.folder)
                last = of_steps[-LAST:].mean(0)
                chosen.setdefault(proposer, []).append(last)
                numbers = [best]
                for shares in (of_steps[0], last):
                    numbers += [shares @ CHANCES, shares @ abs(CHANCES - best)]
                cells = [f'{number:.3f}' for number in numbers]
                print(PROPOSERS[proposer], seed, *cells, sep='\t', flush=True)
    if args.svg:
        draw(args.svg, chosen)


if __name__ == '__main__':
    main()
