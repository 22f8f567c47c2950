"""Compares two results that `python -m zeroplay_jax.evaluate --out=FILE` wrote.

    python -m zeroplay_jax.compare base.json trained.json

Prints, per set, both means and the difference with a 95 % interval (paired bootstrap over questions). Results whose
retriever, corpus, passages per query, prompts or metric differ are not compared: the difference would mean nothing.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

from zeroplay_jax.evaluation import qa
from zeroplay_jax.retrieval.command import Parser
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.types import UserError


def _read(path: pathlib.Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding='utf-8'))
        if not isinstance(found, dict) or not {'settings', 'sets'} <= found.keys():
            raise ValueError('it has no "settings" and "sets"')
    except OSError as error:
        raise UserError(
            f'{path}: cannot be read ({error.strerror}); name a file of zeroplay_jax.evaluate --out'
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f'{path}: no result ({error}); name a file of zeroplay_jax.evaluate --out'
        ) from None
    return found


def main(argv: list[str] | None = None) -> int:
    """Prints the table."""
    parser = Parser(
        prog='python -m zeroplay_jax.compare',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('one', type=pathlib.Path, help='result that the other is set against')
    parser.add_argument('other', type=pathlib.Path, help='result whose gain is shown')
    try:
        args = parser.parse_args(argv)
        one, other = _read(args.one), _read(args.other)
        gaps = qa.compare(one, other)
    except (UserError, RetrievalError) as error:
        print(f'zeroplay_jax.compare: {error}', file=sys.stderr)
        return 2
    print(f'{"set":20} {args.one.stem[:12]:>12} {args.other.stem[:12]:>12}   difference')
    for name, (gap, low, high) in gaps.items():
        a, b = (r['sets'][name]['mean']['score'] for r in (one, other))
        print(f'{name[-20:]:20} {a:12.3f} {b:12.3f}   {gap:+.3f} [{low:+.3f}, {high:+.3f}]')
    return 0


if __name__ == '__main__':
    sys.exit(main())
