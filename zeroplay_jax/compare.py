"""Compares two results that `python -m zeroplay_jax.evaluate --out=FILE` wrote.

    python -m zeroplay_jax.compare base.json trained.json

Prints, per question set, both mean scores and their difference with a 95 % interval (paired bootstrap over questions).
Results are refused if the retriever, the corpus, the number of passages per query, the prompts, the tools, the metric,
the judge or the numbers of samples, questions or tokens differ: their difference would not measure the policy.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

from zeroplay_jax.evaluation import question_sets
from zeroplay_jax.retrieval.command import Parser
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.types import UserError


def _read_result(path: pathlib.Path) -> dict:
    """Returns the result in a file of `zeroplay_jax.evaluate --out`; UserError for another file."""
    try:
        result = json.loads(path.read_text(encoding='utf-8'))
        # Any JSON file parses; these two fields tell a result from another file.
        if not isinstance(result, dict) or not {'settings', 'sets'} <= result.keys():
            raise ValueError('it has no "settings" and "sets"')
    except OSError as error:
        raise UserError(
            f'{path}: cannot be read ({error.strerror}); name a file of zeroplay_jax.evaluate --out'
        ) from None
    # Both json.loads and a wrong encoding raise a ValueError.
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f'{path}: not a result ({error}); name a file of zeroplay_jax.evaluate --out'
        ) from None
    return result


def main(argv: list[str] | None = None) -> int:
    """Prints the comparison and returns the exit status, 2 after an error of the user."""
    parser = Parser(
        prog='python -m zeroplay_jax.compare',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('one', type=pathlib.Path, help='result to compare with')
    parser.add_argument('other', type=pathlib.Path, help='result whose gain is printed')
    try:
        args = parser.parse_args(argv)
        baseline = _read_result(args.one)
        candidate = _read_result(args.other)
        differences = question_sets.compare(baseline, candidate)
    except (UserError, RetrievalError) as error:
        print(f'zeroplay_jax.compare: {error}', file=sys.stderr)
        return 2
    # File names and set names are cut so that the columns stay aligned.
    print(f'{"set":20} {args.one.stem[:12]:>12} {args.other.stem[:12]:>12}   difference')
    for name, (difference, low, high) in differences.items():
        baseline_score = baseline['sets'][name]['mean']['score']
        candidate_score = candidate['sets'][name]['mean']['score']
        scores = f'{baseline_score:12.3f} {candidate_score:12.3f}'
        # The end of a set's name distinguishes it: names are often paths.
        print(f'{name[-20:]:20} {scores}   {difference:+.3f} [{low:+.3f}, {high:+.3f}]')
    return 0


if __name__ == '__main__':
    sys.exit(main())
