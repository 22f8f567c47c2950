"""Builds the files that runs take their inputs from: answers to hide, questions to solve, documents to ask about.

Every line says where it comes from. The same command writes the same file, whole or not at all. Corpora are read as
streams: .jsonl or .tsv, also .gz and .zst, as `python -m retrieval.build` takes them.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from zeroplay_jax.retrieval import progress
from zeroplay_jax.retrieval.command import Parser
from zeroplay_jax.retrieval.corpus import read
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.runtime.atomic import write_text
from zeroplay_jax.selfplay import builders, files
from zeroplay_jax.types import UserError

T = TypeVar('T')

EXAMPLES = """examples:
  python -m zeroplay_jax.inputs answers --sets nq_train.jsonl,hotpotqa_train.jsonl --out answers.jsonl
  python -m zeroplay_jax.inputs questions --sets nq_train.jsonl,hotpotqa_train.jsonl --out questions.jsonl
  python -m zeroplay_jax.inputs documents --corpus wiki-18.jsonl.gz --count 100000 --out documents.jsonl

`python -m zeroplay_jax.inputs answers --help` tells more, and so for the other two.
"""
ANSWERS = """Answers that SSP's proposer hides.

--sets: a random sample of the first accepted answers of QA training questions, as in the paper (50,000 of NQ,
HotpotQA and others). Ours: no answer comes twice in normal form, and yes, no and long ones are left out, for no
question with one true answer can be made of them.

--corpus: without questions of anybody. Candidates are the titles of the corpus, without what tells them apart in
brackets and without lists, and what at least two documents mention: dates, years, and names of two or more words,
which are found by their capitals (Latin script). No language model is asked. The sample is uniform over what is
distinct.

Lines: {"answer", "source", "line"}; of a corpus also "kind" (title, entity, date) and "document_id".
"""
ANSWERS_EXAMPLES = """examples:
  python -m zeroplay_jax.inputs answers --sets nq_train.jsonl,hotpotqa_train.jsonl --out answers.jsonl
  python -m zeroplay_jax.inputs answers --corpus wiki-18.jsonl.gz --count 50000 --out answers.jsonl
"""
QUESTIONS = """Questions with answers, for DSPO: several sets in one form, shuffled, each question once.

A set is a file, or one of nq, triviaqa, popqa, hotpotqa, 2wikimultihopqa, musique, bamboogle, which are fetched when
online. Those are the held-out questions that papers report on: for config.eval.file and --not-in, not to train on.

Answers may be called answers, golden_answers, answer or target, or stand in verl's reward_model; they become a list.

Lines: {"question", "answers", "source", "line"}, and "hops" where the set says so.
"""
QUESTIONS_EXAMPLES = """examples:
  python -m zeroplay_jax.inputs questions --sets nq_train.jsonl,hotpotqa_train.jsonl --out questions.jsonl
  python -m zeroplay_jax.inputs questions --sets nq_train.jsonl,hotpotqa_train.jsonl --count 5000 \\
      --not-in nq,hotpotqa --out questions.jsonl
  python -m zeroplay_jax.inputs questions --sets nq --out data/nq_test.jsonl
"""
DOCUMENTS = """Documents that a proposer starts from, with the number of hops (Dr. Zero, π-Play) or searches (SCOPE).

A uniform sample of the corpus. Hops are assigned exactly in the ratio, not drawn; a run takes them in the ratio of its
config, which should be the same. --types also assigns kinds of task, equally often; those of SCOPE are
long_form_qa, summarisation, planning and writing, and leaving one out is a row of its table 6.

Lines: {"title", "text", "source", "document_id", "line", "hops"}, and "type" with --types.
"""
DOCUMENTS_EXAMPLES = """examples:
  python -m zeroplay_jax.inputs documents --corpus wiki-18.jsonl.gz --count 100000 --hops 4:3:2:1 --out documents.jsonl
  python -m zeroplay_jax.inputs documents --corpus wiki-18.jsonl.gz --count 30000 --hops 4:3:2 \\
      --types long_form_qa,summarisation,planning,writing --out documents.jsonl
"""


def _parser() -> argparse.ArgumentParser:
    form: Any = dict(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = Parser(
        prog='python -m zeroplay_jax.inputs', description=__doc__, epilog=EXAMPLES, **form
    )
    kinds = parser.add_subparsers(
        dest='kind', required=True, metavar='{answers,questions,documents}'
    )

    def command(name: str, short: str, description: str, epilog: str) -> argparse.ArgumentParser:
        added = kinds.add_parser(name, help=short, description=description, epilog=epilog, **form)
        added.add_argument(
            '--out',
            type=pathlib.Path,
            required=True,
            metavar='FILE',
            help='replaced if it is there; its folder is made',
        )
        added.add_argument(
            '--seed', metavar='N', type=_whole(0), default=0, help='names the sample (0)'
        )
        return added

    sets: Any = dict(type=_names, metavar='FILE,…', help='JSON lines of questions with answers')
    corpus: Any = dict(
        type=pathlib.Path,
        metavar='FILE',
        help='passages: .jsonl or .tsv, also .gz and .zst, or a folder of texts',
    )

    answers = command('answers', 'answers to hide (SSP)', ANSWERS, ANSWERS_EXAMPLES)
    either = answers.add_mutually_exclusive_group(required=True)
    either.add_argument('--sets', **sets)
    either.add_argument('--corpus', **corpus)
    add = answers.add_argument
    add(
        '--count',
        metavar='N',
        type=_whole(1),
        default=50_000,
        help='how many (50000, as in the paper)',
    )
    add(
        '--mix',
        choices=('pool', 'equal'),
        default='pool',
        help='--sets: all together (pool), or as many of each',
    )
    add(
        '--most-words',
        metavar='N',
        type=_whole(1),
        default=10,
        help='longer answers are left out (10)',
    )

    add = command(
        'questions', 'questions with answers (DSPO)', QUESTIONS, QUESTIONS_EXAMPLES
    ).add_argument
    add(
        '--sets',
        required=True,
        **sets | dict(metavar='SET,…', help='JSON lines of questions with answers, or nq, …'),
    )
    add('--count', metavar='N', type=_whole(0), default=0, help='how many of each set (0: all)')
    add(
        '--not-in',
        type=_names,
        default=[],
        metavar='SET,…',
        help='held-out sets; their questions are left out',
    )

    about = 'documents with hops (Dr. Zero, π-Play, SCOPE)'
    add = command('documents', about, DOCUMENTS, DOCUMENTS_EXAMPLES).add_argument
    add('--corpus', required=True, **corpus)
    add('--count', metavar='N', type=_whole(1), required=True, help='how many')
    add(
        '--hops',
        type=_ratio,
        default=(4, 3, 2, 1),
        metavar='A:B:…',
        help='shares of 1, 2, … hops (4:3:2:1)',
    )
    add('--types', type=_names, default=[], metavar='NAME,…', help='kinds of task, equally often')
    add(
        '--least-words',
        metavar='N',
        type=_whole(1),
        default=20,
        help='shorter passages are left out (20)',
    )
    return parser


def _whole(least: int):
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f'{text!r} is no whole number from {least} on')
        return int(text)

    return number


def _names(text: str) -> list[str]:
    found = [name.strip() for name in text.split(',')]
    if not all(found) or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(
            f'{text!r} must be names with commas between them, each once'
        )
    return found


def _ratio(text: str) -> tuple[int, ...]:
    shares = text.split(':')
    if (
        not 1 <= len(shares) <= 4
        or not all(s.isdecimal() for s in shares)
        or not any(map(int, shares))
    ):
        raise argparse.ArgumentTypeError(
            f'{text!r} must be one to four whole numbers, not all 0, such as 4:3:2:1'
        )
    return tuple(map(int, shares))


def _watched(items: Iterable[T], name: str, unit: str) -> Iterator[T]:
    """The same items, with a bar where somebody looks."""
    with progress.bar(None, unit, pathlib.Path(name).name) as bar:
        for item in items:
            yield item
            bar.update()


def _lines(name: str) -> Iterator[builders.Line]:
    for number, record in _watched(files.numbered_lines(name), name, 'lines'):
        yield name, number, record


def _is_public(name: str) -> bool:
    return not pathlib.Path(name).is_file()


def _set_lines(name: str, answered: bool = True) -> Iterator[builders.Line]:
    """Of a file, or of a public set, whose lines bear its name."""
    path = name
    if _is_public(name):
        files.check_set(name)

        path = question_sets.path_of(name)
    for number, record in _watched(
        files.numbered_lines(path, 'question', answered=answered), name, 'lines'
    ):
        yield name, number, record


def build(args: argparse.Namespace) -> builders.Built:
    """The lines that the arguments ask for."""
    if args.kind == 'questions':
        held_out = (
            r['question'] for name in args.not_in for _, _, r in _set_lines(name, answered=False)
        )
        return builders.questions_of_sets(
            list(map(_set_lines, args.sets)), held_out, args.count, args.seed
        )
    if args.kind == 'answers' and args.sets:
        lines = [_lines(name) for name in args.sets]
        return builders.answers_of_sets(lines, args.count, args.seed, args.most_words, args.mix)
    source = str(args.corpus)
    passages = _watched(read(args.corpus), source, 'passages')
    if args.kind == 'answers':
        return builders.answers_of_corpus(passages, source, args.count, args.seed, args.most_words)
    words = args.least_words
    return builders.documents_of_corpus(
        passages, source, args.count, args.seed, args.hops, args.types, words
    )


def _said(args: argparse.Namespace, built: builders.Built) -> str:
    """What was written, what was left out, and the run that takes it."""
    counts = collections.Counter(
        str(line['hops']) for line in built.lines if args.kind == 'documents'
    )
    hops = (
        f' ({", ".join(f"{n} of {h} hops" for h, n in sorted(counts.items()))})' if counts else ''
    )
    left = ', '.join(f'{n} {reason}' for reason, n in sorted(built.dropped.items()) if n)
    recipe = {'answers': 'ssp', 'questions': 'dspo'}.get(
        args.kind, 'scope' if getattr(args, 'types', 0) else 'drzero'
    )
    flags = [f'--config.inputs.{args.kind}={args.out}']
    if args.kind == 'documents':
        flags.append(f'--config.schedule.hop_ratio={args.hops}'.replace(' ', ''))
    taken = f'taken by recipe {recipe} with {shlex.join(flags)}'
    if args.kind == 'questions' and any(map(_is_public, args.sets)):
        taken = f'to be measured by: {shlex.join([f"--config.eval.file={args.out}"])}'
    return (
        f'{args.out}: {len(built.lines)} {args.kind}{hops}; left out: {left or "nothing"}; {taken}'
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Writes one file; what its user can mend is one line and code 2."""
    try:
        args = _parser().parse_args(argv)
        given = [
            *(getattr(args, 'sets', None) or []),
            *getattr(args, 'not_in', []),
            getattr(args, 'corpus', None),
        ]
        if args.out.resolve() in {pathlib.Path(name).resolve() for name in given if name}:
            raise UserError(f'--out {args.out} is one of the inputs; choose another file')
        built = build(args)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(args.out, (json.dumps(line, ensure_ascii=False) + '\n' for line in built.lines))
    except (UserError, RetrievalError, OSError) as error:
        hint = '; choose another file with --out' if isinstance(error, OSError) else ''
        print(f'zeroplay_jax.inputs: {error}{hint}', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print('zeroplay_jax.inputs: stopped; nothing was written', file=sys.stderr)
        return 130
    print(_said(args, built))
    return 0


if __name__ == '__main__':
    sys.exit(main())
