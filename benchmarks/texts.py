"""What self-play adds on texts that the start never saw, with controls: exact match before and after a run.

    python -m benchmarks.texts --corpora sets/next-md sets/rfc-std --arms selfplay random labelled copying --seeds 0
    python -m benchmarks.texts --corpora sets/next-md --seeds 0 1 2 >> benchmarks/results/texts.tsv

Every run is that of `make quickstart CORPUS=…` with the settings of `ARMS`; those of one corpus share its passages,
index and held-out questions, and all have as many steps of the solver. Where the corpora come from:
results/corpora.tsv. Finished runs in --folder are not made again. Prints a row per run: intervals are those of a
bootstrap over documents.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.command import one_line_errors, parser, table
from zeroplay_jax.data import files
from zeroplay_jax.evaluation.statistics import interval_text
from zeroplay_jax.extras.inputs import cloze_files
from zeroplay_jax.retrieval.corpus import read
from zeroplay_jax.types import Json, UserError


class Arm(NamedTuple):
    """Settings of a run beside those of configs/english.py, and what was expected of it before the first was made."""

    text: str
    prediction: str
    flags: tuple[str, ...] = ()


# Steps and groups of the solver as in two iterations of self-play.
_STEPS = 'solver.steps=12'
ARMS = {
    'selfplay': Arm('self-play (Dr. Zero)', 'between 0 and +.06; the mean of the runs is above 0'),
    'random': Arm(
        'rewards drawn at random, of both roles',
        'between -.05 and +.01',
        ('reward.answer=benchmarks.hops:random_score',),
    ),
    'labelled': Arm(
        'given blanks of the texts with their words, the same number of solver steps',
        'as much as self-play, or up to .03 more',
        ('recipe=dspo', 'schedule.iterations=1', _STEPS),
    ),
    'copying': Arm(
        'right answers copied, wrong ones left out; proposer not trained',
        'less than self-play, more than 0',
        ('proposer.train_iterations=0', 'solver.baseline=none', 'solver.scale=none'),
    ),
}
# Questions of the arm that is given some: more than its steps read.
_LABELLED = 400
COLUMNS = ('corpus', 'arm', 'seed', 'questions', 'documents', 'before', 'after', 'difference')


def write_questions(workdir: pathlib.Path) -> pathlib.Path:
    """Writes questions about the passages that training may read; returns the file."""
    path = workdir / 'labelled.jsonl'
    if not path.exists():
        if not (workdir / 'held_out.jsonl').exists():
            raise UserError(f'{workdir}: has no questions yet; give another arm first')
        lines = (workdir / 'held_out.jsonl').read_text(encoding='utf-8').splitlines()
        held_out = {json.loads(line)['document_id'] for line in lines}
        passages = [item for item in read(workdir / 'corpus.jsonl') if item[1].id not in held_out]
        split = cloze_files.build(lambda: passages, str(workdir), _LABELLED, 0, 8)
        files.write_lines(path, split.questions)
    return path


def flags(name: str, seed: int, workdir: pathlib.Path) -> list[str]:
    """Returns the settings of a run as flags, and its seed."""
    settings = [*ARMS[name].flags]
    if name == 'labelled':
        settings.append(f'inputs.questions={write_questions(workdir)}')
    return [f'--seed={seed}', *(f'--config.{setting}' for setting in settings)]


def play(corpus: pathlib.Path, name: str, seed: int, folder: pathlib.Path) -> Json:
    """Returns the summary of a run, which is made unless it is there."""
    workdir = folder / corpus.name
    kept = folder / f'{corpus.name}-{name}-{seed}.json'
    if not kept.exists():
        command = [sys.executable, '-m', 'zeroplay_jax.quickstart', f'--corpus={corpus}']
        command += [f'--workdir={workdir}', '--config.progress=False', *flags(name, seed, workdir)]
        log = kept.with_suffix('.log')
        with log.open('w') as output:
            status = subprocess.run(command, stdout=output, stderr=output).returncode
        if status:
            raise UserError(f'{kept.stem} ended with status {status}; see {log}')
        # Named there, because other runs of the workdir may be newer: a finished one is not written again.
        (run,) = re.findall('^== self-play: (.*); it can be', log.read_text(), re.M)
        kept.write_bytes(pathlib.Path(run, 'summary.json').read_bytes())
    return json.loads(kept.read_text())


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the runs and prints the table."""
    arguments = parser('texts', __doc__)
    arguments.add_argument('--corpora', nargs='+', type=pathlib.Path, required=True)
    arguments.add_argument('--arms', nargs='+', choices=ARMS, default=['selfplay'])
    arguments.add_argument('--seeds', nargs='+', type=int, default=[0])
    arguments.add_argument('--folder', type=pathlib.Path, default='runs/texts', help='of the runs')
    args = arguments.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    with one_line_errors('benchmarks.texts'):
        names = [corpus.name for corpus in args.corpora]
        if len({*names}) < len(names):
            raise UserError(f'--corpora: two have the same name, by which runs are kept: {names}')
        for corpus in args.corpora:
            for name in args.arms:
                for seed in args.seeds:
                    run = play(corpus, name, seed, args.folder)
                    scores = [f'{run[when]:.3f}' for when in ('em_before', 'em_after')]
                    change = interval_text(run['difference'], sign='+')
                    about = [str(run['questions']), str(run['documents'])]
                    rows.append([corpus.name, name, str(seed), *about, *scores, change])
    print(table(COLUMNS, rows))


if __name__ == '__main__':
    main()
