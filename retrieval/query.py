"""Asks an index folder.

python -m retrieval.query --index indexes/wiki "who wrote the first novel" "when"
python -m retrieval.query --index indexes/wiki --verify
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from . import folder, progress
from .command import Parser, one_line
from .types import RetrievalError


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = Parser(
        prog='python -m retrieval.query',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        'queries', nargs='*', metavar='QUERY', help='what to look for, each in quotes'
    )
    parser.add_argument(
        '--index', type=pathlib.Path, required=True, help='folder that retrieval.build made'
    )
    parser.add_argument(
        '--encoder', help='checkpoint folder, where it is no longer at its place of the build'
    )
    parser.add_argument('--k', type=int, default=3, help='passages per query')
    parser.add_argument(
        '--verify', action='store_true', help='read every byte and compare with the manifest first'
    )
    one_line(lambda: _run(parser.parse_args(argv)))


def _run(args: argparse.Namespace) -> None:
    if not args.queries and not args.verify:
        raise RetrievalError(
            'no query is given; write one in quotes behind the command, or --verify'
        )
    if args.verify:
        with progress.clock('verify'):
            manifest = folder.verify(args.index)
        print(f'{args.index}: {len(manifest["files"])} files are as they were built')
    if not args.queries:
        return
    index = folder.open_index(args.index, encoder_folder=args.encoder)
    ids, scores = index.search(args.queries, args.k)
    for query, row, score in zip(args.queries, ids, scores):
        print(query)
        found = [(passage, s) for passage, s in zip(index.passages(row[row >= 0]), score)]
        for number, (passage, value) in enumerate(found, 1):
            print(
                f'  {number}  {value:.4f}  [{passage["id"]}] {passage["title"]}: '
                + ' '.join(passage['text'].split())[:160]
            )


if __name__ == '__main__':
    main()
