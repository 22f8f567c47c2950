"""Searches an index folder.

zeroplay search --index indexes/wiki "who wrote the first novel" "when"
zeroplay search --index indexes/wiki --verify
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from . import folder, progress
from .command import Parser, number_type, one_line
from .types import RetrievalError, search_records, split

# Passages per query without --k; fewer if the index has fewer.
_PASSAGES = 3
# Characters of a passage that are printed, its id and title included.
_PRINTED_CHARACTERS = 200


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    one_line(lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog='zeroplay search',
        description=__doc__,
    )
    add = parser.add_argument
    add('queries', nargs='*', metavar='QUERY', help='text to search for, each in quotes')
    add('--index', type=pathlib.Path, required=True, help='folder that zeroplay index wrote')
    add('--encoder', help='checkpoint folder, if it has moved since the build')
    add('--k', type=number_type(int, 1), help=f'passages per query ({_PASSAGES})')
    add('--verify', action='store_true', help='first compare every byte with the manifest')
    return parser


def _run(args: argparse.Namespace) -> None:
    """Verifies the index (--verify), searches for the queries, or both, and prints the results."""
    if not args.queries and not args.verify:
        raise RetrievalError(
            'no query is given; write one in quotes after the command, or --verify'
        )
    # Verified before the index is opened, so that a damaged file is reported by its name.
    if args.verify:
        with progress.clock('verify'):
            manifest = folder.verify(args.index)
        print(f'{args.index}: all files are as they were built ({len(manifest["files"])})')
    if not args.queries:
        return
    folder.check_encoder_flag(args.index, args.encoder)
    index = folder.open_index(args.index, encoder_folder=args.encoder)
    k = args.k or min(_PASSAGES, len(index))
    for query, results in zip(args.queries, search_records(index, args.queries, k)):
        print(query if results else f'{query}\n  no passage found')
        for rank, (record, score) in enumerate(results, 1):
            title, text = split(record.contents)
            line = _printable(f'[{record.id}] {title}: {text}')
            print(f'  {rank}  {score:.4f}  {line}')


def _printable(text: str) -> str:
    """Returns the beginning of a text in one line, with U+FFFD for every character that a terminal would obey."""
    # A slice first: the text may have a megabyte.
    words = text[: 2 * _PRINTED_CHARACTERS].split()
    line = ' '.join(words)[:_PRINTED_CHARACTERS]
    characters = []
    for character in line:
        # Escape codes of a page could recolour, retitle or overwrite what the terminal shows.
        characters.append(character if character.isprintable() else '\ufffd')
    return ''.join(characters)


if __name__ == '__main__':
    main()
