"""Exact match on questions that no run, and no choice of an arm or of a start, has seen.

    python -m benchmarks.fresh zeroplay_jax/mini/parts/base runs/hops/composed_long-*/policy/solver

All held-out worlds with other facts (`DEAL`), 200 questions of every length; the passages of the training worlds are
distractors, as in the quickstart.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile

from benchmarks.command import one_line_errors, parser
from benchmarks.hops import HOPS, training_worlds
from zeroplay_jax.data import files
from zeroplay_jax.mini.world import World, evaluation_questions, worlds_available
from zeroplay_jax.types import Json, UserError

# Starts are trained on small numbers; self-play and its evaluations use 0.
DEAL = 20_261_129


def write(folder: pathlib.Path, questions: int) -> None:
    """Writes corpus.jsonl, and HOPS.jsonl with `questions` questions for every length."""
    seeds = range(worlds_available('evaluation'))
    held_out = [World(seed, 'evaluation', deal=DEAL) for seed in seeds]
    passages: list[Json] = []
    for world in (*training_worlds(), *held_out):
        for passage in world.passages:
            number = str(len(passages))
            passages.append({'id': number, 'title': passage.title, 'text': passage.text})
    files.write_lines(folder / 'corpus.jsonl', passages)
    for hops in HOPS:
        drawn = evaluation_questions(held_out, questions, (int(hops),))
        files.write_lines(folder / f'{hops}.jsonl', drawn)


def _run(module: str, *words: str) -> str:
    """Returns the output of a command of the project."""
    command = [sys.executable, '-m', f'zeroplay_jax.{module}', *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(f'{" ".join(command)} ended with status {done.returncode}')
    return done.stdout


def measure(folder: pathlib.Path, policy: str) -> list[float]:
    """Returns the exact match of a policy by hops."""
    sets = ','.join(str(folder / f'{hops}.jsonl') for hops in HOPS)
    words = ('--config=configs/quickstart.py', f'--index={folder / "index"}', f'--sets={sets}')
    output = _run('evaluate', *words, f'--policy={policy}', '--config.progress=False')
    scores = json.loads(output.splitlines()[-1])
    return [scores[hops]['score'] for hops in HOPS]


def main(argv=None) -> None:
    """Measures every policy and prints a row for it."""
    flags = parser('fresh', __doc__)
    flags.add_argument('policies', nargs='+', help='folders of policies')
    flags.add_argument('--questions', type=int, default=200, help='of every length (200)')
    arguments = flags.parse_args(argv)
    with one_line_errors('benchmarks.fresh'), tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write(folder, arguments.questions)
        corpus, index = folder / 'corpus.jsonl', folder / 'index'
        _run('retrieval.build', f'--corpus={corpus}', '--encoder=lexical', f'--out={index}')
        print('policy', *HOPS, sep='\t')
        for policy in arguments.policies:
            print(policy, *measure(folder, policy), sep='\t', flush=True)


if __name__ == '__main__':
    main()
