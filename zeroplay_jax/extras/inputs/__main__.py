"""Builds the input files of runs: answers to hide, questions to solve, documents to ask about.

Every line names its origin. The same command writes the same file, completely or not at all. Corpora are read as
streams: .jsonl, .tsv or .parquet, also .gz and .zst, as `python -m zeroplay_jax.retrieval.build` takes them.
"""

from __future__ import annotations

import argparse
import collections
import logging
import pathlib
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

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


# ---- command line -----------------------------------------------------------------------------------


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
    if path.suffix.lower() in rows.COMPRESSED or rows.suffix_of(path) in (
        '.tsv',
        '.parquet',
        '.csv',
    ):
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
        prog='python -m zeroplay_jax.extras.inputs',
        description=__doc__,
        epilog=builders.EXAMPLES,
    )
    commands = parser.add_subparsers(
        dest='kind', required=True, metavar='{answers,questions,documents,cloze}'
    )
    _add_answers(commands)
    _add_questions(commands)
    _add_documents(commands)
    _add_cloze(commands)
    return parser


def _add_command(commands, name: str, summary: str, description: str, examples: str) -> Parser:
    """Adds a command with the flags that all commands have; returns its parser."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=examples,
    )
    parser.add_argument(
        '--out',
        type=_json_lines,
        required=True,
        metavar='FILE',
        help='an existing file is replaced; a missing folder is created',
    )
    parser.add_argument(
        '--seed', metavar='N', type=number_type(int, 0), default=0, help='seed of the sample (0)'
    )
    return parser


def _add_corpus(parser, required: bool = False) -> None:
    parser.add_argument(
        '--corpus',
        type=path_or_packaged,
        required=required,
        metavar='FILE',
        help='passages: .jsonl, .tsv or .parquet, also .gz and .zst, or a folder of texts',
    )


def _add_fields(parser) -> None:
    parser.add_argument('--fields', type=passage_fields, metavar='ID,TEXT,…', help=FIELDS_HELP)


def _add_answers(commands) -> None:
    """Adds the subcommand `answers`, from sets of questions or from a corpus."""
    parser = _add_command(
        commands,
        'answers',
        'answers to hide (SSP)',
        builders.ANSWERS,
        builders.ANSWERS_EXAMPLES,
    )
    sources = parser.add_mutually_exclusive_group(required=True)
    sources.add_argument(
        '--sets', type=_names, metavar='FILE,…', help='JSON lines of questions with answers'
    )
    _add_corpus(sources)
    _add_fields(parser)
    parser.add_argument(
        '--count',
        metavar='N',
        type=number_type(int, 1),
        default=50_000,
        help='number of answers (50000, as in the paper)',
    )
    parser.add_argument(
        '--mix',
        choices=('pool', 'equal'),
        default='pool',
        help='--sets: sample from all together (pool), or equally many of each',
    )
    parser.add_argument(
        '--most-words',
        metavar='N',
        type=number_type(int, 1),
        default=10,
        help='longer answers are left out (10)',
    )


def _add_questions(commands) -> None:
    """Adds the subcommand `questions`, from sets of questions."""
    parser = _add_command(
        commands,
        'questions',
        'questions with answers (DSPO)',
        builders.QUESTIONS,
        builders.QUESTIONS_EXAMPLES,
    )
    parser.add_argument(
        '--sets',
        type=_names,
        required=True,
        metavar='SET,…',
        help='JSON lines of questions with answers, or nq, …',
    )
    parser.add_argument(
        '--count',
        metavar='N',
        type=number_type(int, 0),
        default=0,
        help='questions of each set (0: all)',
    )
    parser.add_argument(
        '--not-in',
        type=_names,
        default=[],
        metavar='SET,…',
        help='held-out sets; their questions are left out',
    )


def _add_documents(commands) -> None:
    """Adds the subcommand `documents`, from a corpus."""
    summary = 'documents with hops (Dr. Zero, π-Play, SCOPE)'
    parser = _add_command(
        commands, 'documents', summary, builders.DOCUMENTS, builders.DOCUMENTS_EXAMPLES
    )
    _add_corpus(parser, required=True)
    _add_fields(parser)
    parser.add_argument(
        '--count', metavar='N', type=number_type(int, 1), required=True, help='number of documents'
    )
    parser.add_argument(
        '--hops',
        type=_ratio,
        default=(4, 3, 2, 1),
        metavar='A:B:…',
        help='shares of 1, 2, … hops (4:3:2:1)',
    )
    parser.add_argument(
        '--types', type=_names, default=[], metavar='NAME,…', help='types of task, equally often'
    )
    parser.add_argument(
        '--least-words',
        metavar='N',
        type=number_type(int, 1),
        default=20,
        help='shorter passages are left out (20)',
    )


def _add_cloze(commands) -> None:
    """Adds the subcommand `cloze`, which writes questions and documents of a corpus."""
    summary = 'held-out questions of any corpus, and documents to train on'
    parser = _add_command(commands, 'cloze', summary, builders.CLOZE, builders.CLOZE_EXAMPLES)
    _add_corpus(parser, required=True)
    _add_fields(parser)
    parser.add_argument(
        '--documents',
        type=_json_lines,
        required=True,
        metavar='FILE',
        help='where the documents to train on are written',
    )
    parser.add_argument(
        '--held-out',
        type=_json_lines,
        metavar='FILE',
        help='where the ids of the held-out passages are written (OUT with _passages before its suffix)',
    )
    parser.add_argument(
        '--count', metavar='N', type=number_type(int, 1), default=240, help='questions (240)'
    )
    parser.add_argument(
        '--most-documents',
        metavar='N',
        type=number_type(int, 1),
        default=20_000,
        help='a larger corpus is sampled (20000)',
    )
    parser.add_argument(
        '--passage-words',
        metavar='N',
        type=passage_words,
        default=0,
        help='as for python -m zeroplay_jax.retrieval.build (0)',
    )


# ---- reading -----------------------------------------------------------------------------------------


def _with_progress(items: Iterable[T], name: str, unit: str) -> Iterator[T]:
    """Yields the same items and shows a progress bar."""
    with progress.Bar(None, unit, pathlib.Path(name).name) as bar:
        for item in items:
            yield item
            bar.update()


def _answer_lines(path: str) -> Iterator[builders.Line]:
    """Yields (path, line number, record) of a file with answers; questions are not required."""
    for number, record in _with_progress(files.numbered_lines(path), path, 'lines'):
        yield path, number, record


def _is_public(name: str) -> bool:
    """Returns whether a set is a public name such as 'nq', because there is no file of this name."""
    return not pathlib.Path(name).is_file()


def _question_lines(name: str, answered: bool = True) -> Iterator[builders.Line]:
    """Yields (name, line number, record) of a file with questions, or of a public set, which is downloaded."""
    path = name
    if _is_public(name):
        path = files.path_of_set(name)
    # Held-out sets need no answers: only their questions are compared.
    lines = files.numbered_lines(path, 'question', answered=answered)
    for number, record in _with_progress(lines, name, 'lines'):
        yield name, number, record


def _held_out_questions(names: Sequence[str]) -> Iterator[str]:
    """Yields the questions of the held-out sets."""
    for name in names:
        for _, _, record in _question_lines(name, answered=False):
            yield record['question']


def build(args: argparse.Namespace) -> builders.BuiltFile:
    """Returns the lines of the file that the arguments request, of any kind but 'cloze'."""
    if args.kind == 'questions':
        sets = [_question_lines(name) for name in args.sets]
        held_out = _held_out_questions(args.not_in)
        return builders.questions_of_sets(sets, held_out, args.count, args.seed)
    if args.kind == 'answers' and args.sets:
        sets = [_answer_lines(path) for path in args.sets]
        return builders.answers_of_sets(sets, args.count, args.seed, args.most_words, args.mix)
    source = str(args.corpus)
    passages = _with_progress(read(args.corpus, fields=args.fields), source, 'passages')
    if args.kind == 'answers':
        return builders.answers_of_corpus(passages, source, args.count, args.seed, args.most_words)
    return builders.documents_of_corpus(
        passages, source, args.count, args.seed, args.hops, args.types, args.least_words
    )


# ---- report ------------------------------------------------------------------------------------------


def _report_cloze(args: argparse.Namespace, built: cloze_files.ClozeFiles) -> str:
    """Returns a line about the three cloze files written, and the flags with which a run takes them."""
    ratio = ','.join(f'{share:g}' for share in cloze_files.hop_ratio(built.documents))
    # A ratio of one hop count is a tuple with a comma at its end, as Python writes it.
    hop_ratio = f'({ratio})' if ',' in ratio else f'({ratio},)'
    flags = [
        f'--config.eval.file={args.out}',
        f'--config.eval.questions={len(built.questions)}',
        f'--config.inputs.documents={args.documents}',
        f'--config.retrieval.held_out={args.held_out}',
        f'--config.schedule.hop_ratio={hop_ratio}',
    ]
    return f'{args.out}: {built}; taken by recipe drzero with {shlex.join(flags)}'


def _report(args: argparse.Namespace, built: builders.BuiltFile) -> str:
    """Returns a line about the file written, the lines left out, and the run that takes it."""
    of_hops = ''
    if args.kind == 'documents':
        counts = collections.Counter(line['hops'] for line in built.lines)
        parts = [f'{count} of {hops} hops' for hops, count in sorted(counts.items())]
        of_hops = f' ({", ".join(parts)})'
    return (
        f'{args.out}: {len(built.lines)} {args.kind}{of_hops}; '
        f'left out: {built.dropped}; {_usage(args)}'
    )


def _usage(args: argparse.Namespace) -> str:
    """Returns the recipe and the flags with which a run takes the file."""
    flags = [f'--config.inputs.{args.kind}={args.out}']
    if args.kind == 'answers':
        recipe = 'ssp'
    elif args.kind == 'documents':
        recipe = 'scope' if args.types else 'drzero'
        ratio = ','.join(map(str, args.hops))
        # A ratio of one hop count is a tuple with a comma at its end, as Python writes it.
        ratio = f'({ratio},)' if len(args.hops) == 1 else f'({ratio})'
        # A run refuses a file without the hops that its own ratio asks for.
        flags.append(f'--config.schedule.hop_ratio={ratio}')
    elif any(map(_is_public, args.sets)):
        # Papers report results on the public sets, so they are for evaluation only.
        return f'to be measured by: {shlex.join([f"--config.eval.file={args.out}"])}'
    else:
        recipe = 'dspo'
    return f'taken by recipe {recipe} with {shlex.join(flags)}'


def _check_out(args: argparse.Namespace) -> None:
    """Raises UserError if an output would overwrite an input or the other output."""
    names = [*(getattr(args, 'sets', None) or []), *getattr(args, 'not_in', [])]
    if getattr(args, 'corpus', None):
        names.append(args.corpus)
    inputs = {pathlib.Path(name).resolve() for name in names}
    # Inputs are read as streams, so the file would be replaced while it is read.
    if args.out.resolve() in inputs:
        raise UserError(f'--out {args.out} is one of the inputs; choose another file')
    if args.kind != 'cloze':
        return
    if args.documents.resolve() in {*inputs, args.out.resolve()}:
        problem = 'is the corpus or --out'
        raise UserError(f'--documents {args.documents} {problem}; choose another file')
    if args.held_out.resolve() in {*inputs, args.out.resolve(), args.documents.resolve()}:
        problem = 'is the corpus, --out or --documents'
        raise UserError(f'--held-out {args.held_out} {problem}; choose another file')


def _run(args: argparse.Namespace) -> None:
    """Writes the file or files that the arguments ask for, and prints the report line."""
    if args.kind == 'cloze' and args.held_out is None:
        args.held_out = args.out.with_name(f'{args.out.stem}_passages{args.out.suffix}')
    _check_out(args)
    if args.kind != 'cloze':
        built = build(args)
        files.write_lines(args.out, built.lines)
        print(_report(args, built))
        return
    source = str(args.corpus)

    def passages() -> Iterator[tuple[int, Record]]:
        return _with_progress(
            read(args.corpus, None, args.passage_words, args.fields), source, 'passages'
        )

    split_corpus = cloze_files.build(passages, source, args.count, args.seed, args.most_documents)
    files.write_lines(args.held_out, split_corpus.held_out_passages)
    files.write_lines(args.documents, split_corpus.documents)
    files.write_lines(args.out, split_corpus.questions)
    if split_corpus.warning:
        print(
            f'zeroplay_jax.extras.inputs: warning: {source}: {split_corpus.warning}',
            file=sys.stderr,
        )
    print(_report_cloze(args, split_corpus))


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the files of one kind; returns the exit status (`exit_status`)."""
    signals.raise_again()
    return exit_status(
        'zeroplay_jax.extras.inputs',
        lambda: _run(_parser().parse_args(argv)),
        disk_fix='choose another file with --out',
        stopped='stopped; nothing was written',
    )


if __name__ == '__main__':
    show_messages(logging.WARNING)
    sys.exit(main())
