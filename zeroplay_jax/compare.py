"""Compares results that `python -m zeroplay_jax.evaluate --out=FILE` wrote: of two policies, or of several runs each.

    python -m zeroplay_jax.compare base.json trained.json
    python -m zeroplay_jax.compare --base base.json --other seed0.json seed1.json seed2.json
    python -m zeroplay_jax.compare --base a0.json a1.json a2.json --other b0.json b1.json b2.json --paired

Prints, per question set, both mean scores and their difference with a 95 % interval. Of two files it is Newcombe's for
pairs, as in the table of a run: it covers the choice of questions only, and two seeds of one config can differ by more.
Of several runs it covers the runs, such as seeds, on these questions: Welch's t interval; Student's over the
differences of run i and run i with --paired, and over the runs of the other side if one side is a single file, such as
the policy before training.
Results are refused if the retriever, the corpus, the number of passages per query, the prompts, the tools, the metric,
the judge or the numbers of samples, questions or tokens differ: their difference would not measure the policy. So are
two results of one run on a side.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from zeroplay_jax.evaluation import question_sets, statistics
from zeroplay_jax.retrieval import downloads, json_text
from zeroplay_jax.retrieval.command import Parser
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.types import UserError

_ADVICE = 'name a file of zeroplay_jax.evaluate --out'


def _read_result(path: pathlib.Path) -> dict:
    """Returns the result in a file of `zeroplay_jax.evaluate --out`; UserError for another file."""
    # The user knows the address of a file in a bucket, not the path of its copy.
    address = downloads.address_of(str(path))
    try:
        result = json_text.read_object(path)
        # Any JSON file parses; these two fields tell a result from another file.
        if not {'settings', 'sets'} <= result.keys():
            raise ValueError('it has no "settings" and "sets"')
    except OSError as error:
        raise UserError(f'{address}: cannot be read ({error.strerror}); {_ADVICE}') from None
    except ValueError as error:
        raise UserError(f'{address}: not a result ({error}); {_ADVICE}') from None
    return result


def _parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(
        prog='python -m zeroplay_jax.compare',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        'files',
        nargs='*',
        metavar='FILE',
        help='two results, also gs://bucket/path: the one to compare with, and the one whose gain is printed',
    )
    parser.add_argument('--base', nargs='+', metavar='FILE', help='results to compare with')
    parser.add_argument(
        '--other',
        nargs='+',
        metavar='FILE',
        help='results whose gain is printed',
    )
    parser.add_argument(
        '--paired',
        action='store_true',
        help='run i of --base belongs to run i of --other, such as by its seed',
    )
    return parser


def _sides(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Returns the files of both sides; raises UserError for a command line that does not name them."""
    if args.files and (args.base or args.other):
        raise UserError('give two files, or --base and --other with any number of them, not both')
    if args.files:
        if len(args.files) != 2:
            raise UserError(
                f'{len(args.files)} files; give two, or --base FILE… --other FILE… for several runs'
            )
        return [args.files[0]], [args.files[1]]
    if not args.base or not args.other:
        raise UserError('no results; give two files, or --base FILE… --other FILE…')
    if args.paired and len(args.base) != len(args.other):
        raise UserError(
            f'--paired: {len(args.base)} and {len(args.other)} files cannot be paired; give as many of both'
        )
    if args.paired and len(args.base) == 1:
        raise UserError(
            '--paired: one pair has no variance; give two pairs or more, or leave it out'
        )
    return args.base, args.other


def _differences(
    baselines: list[dict], candidates: list[dict], paired: bool
) -> tuple[dict[str, statistics.Interval], str]:
    """Returns {set: (difference, low, high)}, and what the interval covers in words.

    Raises:
      UserError: results that cannot be compared.
    """
    if len(baselines) == len(candidates) == 1:
        text = 'the choice of questions (Newcombe, paired), not the seed: for that give several runs of each side'
        return question_sets.compare(baselines[0], candidates[0]), text
    for result in (*baselines[1:], *candidates):
        question_sets.check_comparable(baselines[0], result)
    intervals = {}
    for name in question_sets.shared_sets([*baselines, *candidates]):
        before = [result['sets'][name]['mean']['score'] for result in baselines]
        after = [result['sets'][name]['mean']['score'] for result in candidates]
        intervals[name] = statistics.difference(before, after, paired)
    statistic = statistics.statistic(len(baselines), len(candidates), paired)
    return intervals, f'the runs on these questions ({statistic})'


def _read_side(files: list[str]) -> tuple[str, list[dict]]:
    """Returns the heading of a side and its results.

    The heading is the name of its file, cut so that the columns stay aligned, or how many there are.

    Raises:
      UserError: a file is no result, or two are of one run: they would count as two.
    """
    paths = [pathlib.Path(downloads.fetch(file, is_file=True)) for file in files]
    results = [_read_result(path) for path in paths]
    file_of_run: dict[str, str] = {}
    for file, result in zip(files, results, strict=True):
        # Policies that no run exported, and results of earlier versions, name none.
        run = result['settings'].get(run_record.HASH_FIELD) or str(pathlib.Path(file).resolve())
        if run in file_of_run:
            raise UserError(
                f'{file_of_run[run]} and {file} are of the same run; give one result of each run'
            )
        file_of_run[run] = file
    return paths[0].stem[:12] if len(paths) == 1 else f'{len(paths)} runs', results


def _mean_score(results: list[dict], name: str) -> float:
    scores = [result['sets'][name]['mean']['score'] for result in results]
    return sum(scores) / len(scores)


def main(argv: list[str] | None = None) -> int:
    """Prints the comparison and returns the exit status, 2 after an error of the user."""
    try:
        args = _parser().parse_args(argv)
        base_files, other_files = _sides(args)
        base_heading, baselines = _read_side(base_files)
        other_heading, candidates = _read_side(other_files)
        differences, covered = _differences(baselines, candidates, args.paired)
    except UserError as error:
        print(f'zeroplay_jax.compare: {error}', file=sys.stderr)
        return 2
    print(f'{"set":20} {base_heading:>12} {other_heading:>12}   difference')
    for name, interval in differences.items():
        scores = f'{_mean_score(baselines, name):12.3f} {_mean_score(candidates, name):12.3f}'
        # The end of a set's name distinguishes it: names are often paths.
        print(f'{name[-20:]:20} {scores}   {statistics.interval_text(interval, "+")}')
    print(f'The intervals of 95 % cover {covered}.')
    return 0


if __name__ == '__main__':
    sys.exit(main())
