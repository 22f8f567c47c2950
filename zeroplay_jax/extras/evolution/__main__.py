"""Shows what self-play asks over training: tasks with questions, duplicates, topics and, with a solver, difficulty.

    zeroplay evolution runs/mine
    zeroplay evolution runs/mine --parts=4 --topics=12
    zeroplay evolution runs/mine --policy=zeroplay_jax/mini/base --config=configs/drzero.py:mini
    zeroplay evolution runs/mine --policy=POLICY --config=configs/ssp.py --metric=rating

Reads tasks.jsonl, prints a line per iteration (in a run of one: per range of steps) and writes the questions of each
as RUN/evolution/NAME.jsonl, with pictures beside them. With --policy a fixed solver answers each set: the solve rate
with its 95 % interval, and the searches of what it solved. Further flags are those of zeroplay evaluate, such as
--limit=2000. The solver searches what the run searched, unless they say otherwise. With --metric=rating it answers
nothing, and the judge of the config rates every question from 1 to 5.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zeroplay_jax.configuration import fields
from zeroplay_jax.evaluation import report_builder
from zeroplay_jax.extras.evolution import questions
from zeroplay_jax.retrieval.command import Parser, exit_status, number_type
from zeroplay_jax.runtime.workdir import local_run
from zeroplay_jax.types import UserError

if TYPE_CHECKING:
    from zeroplay_jax.evaluation.results import Results

# Flags of evaluate that this command sets itself, or whose results it could not read.
_SET_HERE = ('answering', 'out', 'samples', 'sets', 'workdir')
_DISK_FIX = 'give a copy of the run'
_RUN_WITH_QUESTIONS = (
    'give the workdir of a run that makes some, such as RUN of '
    'zeroplay train --config=configs/drzero.py:mini --workdir=RUN'
)


def main(argv: list[str] | None = None) -> int:
    """Prints the table and the paths of the files; returns the exit status (`exit_status`)."""
    return exit_status(
        'zeroplay evolution', lambda: _show(*_parser().parse_known_args(argv)), _DISK_FIX
    )


def _parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(
        prog='zeroplay evolution',
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument('workdir', metavar='RUN', help='workdir of a run, or gs://bucket/path')
    parser.add_argument(
        '--parts', type=number_type(int, 1), default=0, help='ranges of steps (default: iterations)'
    )
    parser.add_argument(
        '--topics', type=number_type(int, 2), default=8, help='number of topics (default: 8)'
    )
    parser.add_argument('--policy', default='', metavar='FOLDER', help='solver of every set')
    parser.add_argument('--config', default='', metavar='FILE', help='with --policy: its config')
    return parser


def _show(arguments: argparse.Namespace, evaluate_flags: Sequence[str]) -> None:
    """Prints the table, the topics and the paths of the files."""
    if bool(arguments.policy) != bool(arguments.config):
        raise UserError('--policy and --config: give both, or none')
    if evaluate_flags and not arguments.policy:
        raise UserError(f'{evaluate_flags[0]}: is for a solver; add --policy and --config')
    for flag in evaluate_flags:
        if flag.strip('-').partition('=')[0] in _SET_HERE:
            raise UserError(f'{flag}: this command sets it itself; leave it out')
    workdir = local_run(arguments.workdir)
    if arguments.policy and ',' in str(workdir):
        raise UserError(f'{workdir}: --policy needs a path without a comma; rename the folder')
    notes: list[str] = []
    path = workdir / 'tasks.jsonl'
    parts = questions.parts_of(report_builder.read_lines(path, notes), arguments.parts)
    if not parts:
        reason = f' ({" ".join(notes)})' if notes else ''
        raise UserError(f'{path}: no question that a proposer made{reason}; {_RUN_WITH_QUESTIONS}')
    for note in notes:
        print(f'note: {note}', file=sys.stderr)
    figures: dict[str, dict[str, Any]] = {part.name: part.figures() for part in parts}
    shares: dict[str, list[float]] = {}
    try:
        for part in parts:
            figures[part.name]['near-duplicates'] = questions.near_duplicates(part.texts)
        shares = questions.topics(parts, arguments.topics)
        if len(shares) < arguments.topics:
            print(
                f'note: {len(shares)} topics instead of {arguments.topics}: too few questions or words',
                file=sys.stderr,
            )
    except ImportError:
        fix = 'pip install scikit-learn'
        print(f'note: near-duplicates and topics need scikit-learn; {fix}', file=sys.stderr)
    folder = workdir / 'evolution'
    sets = questions.write_sets(parts, folder)
    if arguments.policy:
        is_open = any(record.get('rubrics') for record in parts[0].questions)
        flags = [*_corpus_flags(workdir), *evaluate_flags]
        result = _answers(arguments, flags, sets, is_open)
        read = questions.rated if result.settings['metric'] == 'rating' else questions.solved
        for name, of_set in result.sets.items():
            figures[name] |= read(of_set.answered)
    print(questions.table(figures))
    if shares:
        rows = {topic: dict(zip(figures, of_parts)) for topic, of_parts in shares.items()}
        print(f'\n{questions.table(rows)}')
    for path in questions.write_pictures(figures, shares, folder):
        print(path)


def _corpus_flags(workdir: pathlib.Path) -> list[str]:
    """Returns the flags by which a solver searches what the run searched; [] without a record of the run."""
    config = fields.read_stored_config(workdir)
    if config is None:
        return []
    names = ('retrieval.kind', 'retrieval.path', 'retrieval.url', 'world.train', 'world.evaluation')
    values = fields.leaves(config)
    return [f'--config.{name}={values[name]}' for name in names if name in values]


def _answers(
    arguments: argparse.Namespace,
    evaluate_flags: Sequence[str],
    sets: Sequence[pathlib.Path],
    is_open: bool,
) -> Results:
    """Returns the results of `zeroplay evaluate`, which a process of its own writes beside the sets.

    Raises:
      UserError: it failed; its own line was printed.
    """
    if not sets:
        raise UserError('--policy: no question of the run has an answer; leave it out')
    out = sets[0].parent / 'answers.json'
    # An earlier answer must not be read if this evaluation writes none.
    out.unlink(missing_ok=True)
    command = [sys.executable, '-m', 'zeroplay_jax.evaluate', f'--config={arguments.config}']
    command += [f'--policy={arguments.policy}', f'--sets={",".join(map(str, sets))}']
    command += [f'--metric={"rubrics" if is_open else "em"}', f'--out={out}', *evaluate_flags]
    # Its table would stand above ours; its bar and errors are on stderr.
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise UserError('--policy: zeroplay evaluate failed; its line above says why')
    # This import loads JAX, which a call without a solver does not need.
    from zeroplay_jax.evaluation.results import Results

    return Results.read(out)


if __name__ == '__main__':
    sys.exit(main())
