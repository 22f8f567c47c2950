"""Builds the input files of runs: answers to hide, questions to solve, documents to ask about.

Every line names its origin. The same command writes the same file, completely or not at all. Corpora are read as
streams: .jsonl, .tsv or .parquet, also .gz and .zst, as `zeroplay index` takes them.
"""

from __future__ import annotations

import argparse
import collections
import logging
import pathlib
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from zeroplay_jax.data import files
from zeroplay_jax.extras.inputs import builders, cloze_files
from zeroplay_jax.retrieval import progress, rows
from zeroplay_jax.retrieval.command import (
    FIELDS_HELP,
    Parser,
    exit_status,
    number_type,
    passage_fields,
    passage_words,
    path_or_packaged,
    show_messages,
)
from zeroplay_jax.retrieval.corpus import Record, read
from zeroplay_jax.runtime import signals
from zeroplay_jax.settings.kinds import MAX_HOPS
from zeroplay_jax.types import UserError

T = TypeVar('T')


def _names(text: str) -> list[str]:
    """An argparse type: distinct names with commas between them."""
    names = [name.strip() for name in text.split(',')]
    is_repeated = len(set(names)) < len(names)
    if is_repeated or not all(names):
        raise argparse.ArgumentTypeError(
            f'{text!r} must be names with commas between them, each once'
        )
    return names


def _json_lines(text: str) -> pathlib.Path:
    """An argparse type: the path of a file that is read again as what is written into it."""
    path = pathlib.Path(text)
    is_packed = path.suffix.lower() in rows.COMPRESSED
    if is_packed or rows.suffix_of(path) in ('.tsv', '.parquet', '.csv'):
        raise argparse.ArgumentTypeError(
            f'{text}: plain JSON lines are written; name the file .jsonl'
        )
    return path


def _ratio(text: str) -> tuple[int, ...]:
    """An argparse type: one to MAX_HOPS whole numbers with colons between them."""
    shares = text.split(':')
    # isdecimal, because int() would also accept signs, blanks and underscores.
    are_numbers = all(share.isdecimal() for share in shares)
    if len(shares) > MAX_HOPS or not are_numbers or not any(map(int, shares)):
        raise argparse.ArgumentTypeError(
            f'{text!r} must be one to six whole numbers, not all 0, such as 4:3:2:1'
        )
    return tuple(map(int, shares))


def _parser() -> Parser:
    """Returns the parser of the command line; its `kind` is the name of the subcommand."""
    parser = Parser(
        prog='zeroplay inputs',
        description=__doc__,
        epilog=builders.EXAMPLES,
    )
    commands = parser.add_subparsers(
        dest='kind', required=True, metavar='{answers,questions,documents,cloze}'
    )
    for kind, (summary, description, examples) in builders.HELP.items():
        command = commands.add_parser(kind, help=summary, description=description, epilog=examples)
        _add_file(command, '--out', 'an existing file is replaced; a missing folder is created')
        _add_number(command, '--seed', 0, 'seed of the sample', least=0)
        _ADD[kind](command)
    return parser


def _add_file(parser: Parser, flag: str, what: str, required: bool = True) -> None:
    parser.add_argument(flag, type=_json_lines, required=required, metavar='FILE', help=what)


def _add_number(parser: Parser, flag: str, default: int, what: str, least: int = 1) -> None:
    kind = number_type(int, least)
    parser.add_argument(flag, type=kind, default=default, metavar='N', help=f'{what} ({default})')


def _add_corpus(parser: Any, required: bool = True) -> None:
    parser.add_argument(
        '--corpus',
        type=path_or_packaged,
        required=required,
        metavar='FILE',
        help='passages: .jsonl, .tsv or .parquet, also .gz and .zst, or a folder of texts',
    )


def _add_fields(parser: Parser) -> None:
    parser.add_argument('--fields', type=passage_fields, metavar='ID,TEXT,…', help=FIELDS_HELP)


def _add_answers(parser: Parser) -> None:
    sources = parser.add_mutually_exclusive_group(required=True)
    sets_help = 'JSON lines of questions with answers'
    sources.add_argument('--sets', type=_names, metavar='FILE,…', help=sets_help)
    _add_corpus(sources, required=False)
    _add_fields(parser)
    _add_number(parser, '--count', 50_000, 'number of answers, as in the paper')
    _add_number(parser, '--most-words', 10, 'longer answers are left out')


def _add_questions(parser: Parser) -> None:
    sets_help = 'JSON lines of questions with answers, or nq, …'
    parser.add_argument('--sets', type=_names, required=True, metavar='SET,…', help=sets_help)
    _add_number(parser, '--count', 0, 'questions of each set; 0: all', least=0)
    not_in_help = 'held-out sets; their questions are left out'
    parser.add_argument('--not-in', type=_names, default=[], metavar='SET,…', help=not_in_help)


def _add_documents(parser: Parser) -> None:
    _add_corpus(parser)
    _add_fields(parser)
    add = parser.add_argument
    add('--count', type=number_type(int, 1), required=True, metavar='N', help='how many')
    hops_help = 'shares of 1, 2, … hops (4:3:2:1)'
    add('--hops', type=_ratio, default=(4, 3, 2, 1), metavar='A:B:…', help=hops_help)
    types_help = 'types of task, equally often'
    add('--types', type=_names, default=[], metavar='NAME,…', help=types_help)
    _add_number(parser, '--least-words', 20, 'shorter passages are left out')


def _add_cloze(parser: Parser) -> None:
    _add_corpus(parser)
    _add_fields(parser)
    _add_file(parser, '--documents', 'where the documents to train on are written')
    held_out_help = 'ids of the held-out passages (OUT with _passages before its suffix)'
    _add_file(parser, '--held-out', held_out_help, required=False)
    _add_number(parser, '--count', 240, 'questions')
    _add_number(parser, '--most-documents', 20_000, 'a larger corpus is sampled')
    words_help = 'as for zeroplay index (0)'
    parser.add_argument(
        '--passage-words', type=passage_words, default=0, metavar='N', help=words_help
    )


_ADD = {
    'answers': _add_answers,
    'questions': _add_questions,
    'documents': _add_documents,
    'cloze': _add_cloze,
}


def _with_progress(items: Iterable[T], name: str, unit: str) -> Iterator[T]:
    """Yields the same items and shows a progress bar."""
    with progress.Bar(None, unit, pathlib.Path(name).name) as bar:
        for item in items:
            yield item
            bar.update()


def _is_public(name: str) -> bool:
    """Returns whether a set is a public name such as 'nq', because there is no file of this name."""
    return not pathlib.Path(name).is_file()


def _lines(name: str, *fields: str, answered: bool = True) -> Iterator[builders.Line]:
    """Yields (name, line number, record) of a file; with a required field also of a public set, which is downloaded."""
    path = name
    if fields and _is_public(name):
        path = files.path_of_set(name)
    lines = files.numbered_lines(path, *fields, answered=answered)
    for number, record in _with_progress(lines, name, 'lines'):
        yield name, number, record


def _held_out_questions(names: Sequence[str]) -> Iterator[str]:
    """Yields the questions of the held-out sets."""
    for name in names:
        # They need no answers: only the questions are compared.
        for _, _, record in _lines(name, 'question', answered=False):
            yield record['question']


def build(args: argparse.Namespace) -> builders.BuiltFile:
    """Returns the lines of the file that the arguments request, of any kind but 'cloze'."""
    if args.kind == 'questions':
        sets = [_lines(name, 'question') for name in args.sets]
        held_out = _held_out_questions(args.not_in)
        return builders.questions_of_sets(sets, held_out, args.count, args.seed)
    if args.kind == 'answers' and args.sets:
        sets = [_lines(path) for path in args.sets]
        return builders.answers_of_sets(sets, args.count, args.seed, args.most_words)
    source = str(args.corpus)
    passages = _with_progress(read(args.corpus, fields=args.fields), source, 'passages')
    if args.kind == 'answers':
        return builders.answers_of_corpus(passages, source, args.count, args.seed, args.most_words)
    return builders.documents_of_corpus(
        passages, source, args.count, args.seed, args.hops, args.types, args.least_words
    )


def _ratio_flag(shares: Iterable[float]) -> str:
    """Returns the flag of a ratio of hops; that of one hop count is a tuple with a comma at its end."""
    ratio = ','.join(f'{share:g}' for share in shares)
    return (
        f'--config.schedule.hop_ratio=({ratio})'
        if ',' in ratio
        else f'--config.schedule.hop_ratio=({ratio},)'
    )


def _report_cloze(args: argparse.Namespace, built: cloze_files.ClozeFiles) -> str:
    """Returns a line about the three cloze files written, and the flags with which a run takes them."""
    flags = [
        f'--config.eval.file={args.out}',
        f'--config.eval.questions={len(built.questions)}',
        f'--config.inputs.documents={args.documents}',
        f'--config.retrieval.held_out={args.held_out}',
        _ratio_flag(cloze_files.hop_ratio(built.documents)),
    ]
    return f'{args.out}: {built}; taken by recipe drzero with {shlex.join(flags)}'


def _report(args: argparse.Namespace, built: builders.BuiltFile) -> str:
    """Returns a line about the file written, the lines left out, and the recipe and flags that take it."""
    of_hops = ''
    recipe = {'answers': 'ssp', 'questions': 'dspo'}.get(args.kind, 'drzero')
    flags = [f'--config.inputs.{args.kind}={args.out}']
    if args.kind == 'documents':
        counts = collections.Counter(line['hops'] for line in built.lines)
        parts = [f'{count} of {hops} hops' for hops, count in sorted(counts.items())]
        of_hops = f' ({", ".join(parts)})'
        recipe = 'scope' if args.types else recipe
        # A run refuses a file without the hops that its own ratio asks for.
        flags.append(_ratio_flag(args.hops))
    use = f'taken by recipe {recipe} with'
    # Papers report results on the public sets, so they are for evaluation only.
    if args.kind == 'questions' and any(map(_is_public, args.sets)):
        use, flags = 'to be measured by:', [f'--config.eval.file={args.out}']
    wrote = f'{args.out}: {len(built.lines)} {args.kind}{of_hops}'
    return f'{wrote}; left out: {built.dropped}; {use} {shlex.join(flags)}'


def _check_files(args: argparse.Namespace) -> None:
    """Raises UserError if an output would overwrite an input or another output."""
    names = [*(getattr(args, 'sets', None) or []), *getattr(args, 'not_in', [])]
    if getattr(args, 'corpus', None):
        names.append(args.corpus)
    taken = {pathlib.Path(name).resolve() for name in names}
    # Inputs are read as streams, so the file would be replaced while it is read.
    for flag in ('out', 'documents', 'held_out'):
        path = getattr(args, flag, None)
        if path and path.resolve() in taken:
            name = flag.replace('_', '-')
            raise UserError(
                f'--{name} {path} is one of the inputs or another output; choose another file'
            )
        taken |= {path.resolve()} if path else set()


def _run(args: argparse.Namespace) -> None:
    """Writes the file or files that the arguments ask for, and prints the report line."""
    if args.kind == 'cloze' and args.held_out is None:
        args.held_out = args.out.with_name(f'{args.out.stem}_passages{args.out.suffix}')
    _check_files(args)
    if args.kind != 'cloze':
        built = build(args)
        files.write_lines(args.out, built.lines)
        print(_report(args, built))
        return
    source = str(args.corpus)

    def passages() -> Iterator[tuple[int, Record]]:
        records = read(args.corpus, None, args.passage_words, args.fields)
        return _with_progress(records, source, 'passages')

    split_corpus = cloze_files.build(passages, source, args.count, args.seed, args.most_documents)
    files.write_lines(args.held_out, split_corpus.held_out_passages)
    files.write_lines(args.documents, split_corpus.documents)
    files.write_lines(args.out, split_corpus.questions)
    print(_report_cloze(args, split_corpus))


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the files of one kind; returns the exit status (`exit_status`)."""
    signals.raise_again()
    return exit_status(
        'zeroplay inputs',
        lambda: _run(_parser().parse_args(argv)),
        disk_fix='choose another file with --out',
        stopped='stopped; nothing was written',
    )


if __name__ == '__main__':
    show_messages(logging.WARNING)
    sys.exit(main())
