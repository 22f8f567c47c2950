"""Self-play on texts of your own: index, held-out questions, training, report.

    zeroplay quickstart --corpus texts --workdir runs/own
    make quickstart CORPUS=texts WORKDIR=runs/own

The corpus is a folder of texts (.txt, .md, .html, .rst, also .gz), or JSON lines or TSV of passages (docs/corpus.md).
Long texts are cut into passages. Questions are made of documents or passages that training never reads;
--config.eval.file=FILE asks your own instead. Passages, index and questions are written into the workdir, the run into
run/ in it, one with other settings into run2/. The same command resumes at the step that was interrupted. Further
arguments are settings of the run (configs/english.py): --config.FIELD=VALUE.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from zeroplay_jax.configuration import command_line, fields, places
from zeroplay_jax.data import files
from zeroplay_jax.extras import load_extra
from zeroplay_jax.mini.question_form import warning_of
from zeroplay_jax.retrieval import downloads, json_text, progress
from zeroplay_jax.retrieval.command import RESUMABLE, Parser, exit_status, path_or_packaged
from zeroplay_jax.retrieval.corpus import files_of, read
from zeroplay_jax.runtime import disk, signals
from zeroplay_jax.runtime.record import digest, identity_of
from zeroplay_jax.runtime.workdir import check_is_folder
from zeroplay_jax.selfplay.recipe import recipe_class
from zeroplay_jax.settings.kinds import CONFIGS, refuse
from zeroplay_jax.types import Json, Question, UserError

# The name at the start of every error line, the same as for the run.
_NAME = 'zeroplay_jax'
_CONFIG = 'english'
# Name of a run's folder → its settings, in the workdir.
_RUNS = 'runs.json'
_PASSAGE_WORDS = 50
_QUESTIONS = 240
# A quickstart draws fewer than a thousand documents; more of them would only make the file larger.
_MAX_DOCUMENTS = 5_000
# The split does not depend on --seed: runs with different seeds are compared on the same questions.
_SPLIT_SEED = 0
# The form of a file, and its compression.
_SUFFIXES = re.compile(r'(?i)\.\w+(\.(gz|zst|bz2|xz))?$')
# Raised when the files in a workdir change, so that a workdir of an earlier version is not resumed.
_FILES_VERSION = 5


def _parser() -> Parser:
    """Returns the parser of the command's own arguments; settings of the run are not among them."""
    parser = Parser(prog='zeroplay quickstart', description=__doc__)
    parser.add_argument(
        '--corpus',
        type=path_or_packaged,
        required=True,
        metavar='PATH',
        help='folder of English texts, or .jsonl or .tsv of passages, also .gz and .zst',
    )
    parser.add_argument(
        '--workdir',
        type=pathlib.Path,
        metavar='FOLDER',
        help='created if it is missing (runs/ and the name of the corpus)',
    )
    parser.add_argument(
        '--encoder',
        choices=('bm25', 'minilm', 'lexical'),
        default='bm25',
        help='bm25: a BM25 index; ScaNN over vectors: minilm, of a sentence encoder that a package has, or lexical, of '
        'hashed words (bm25)',
    )
    parser.add_argument('--seed', type=int, default=0, metavar='N', help='seed of the run (0)')
    return parser


def _arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Returns the checked arguments, and the settings of the run as flags (--config.FIELD=VALUE).

    Raises:
      UserError: an unknown argument or field, or an unusable file of --eval.
    """
    args, run_flags = _parser().parse_known_args(argv)
    # --index is left as it is, and refused below: this command builds an index.
    if not any(flag.startswith('--index') for flag in run_flags):
        run_flags = command_line.with_short_flags(run_flags)
    # Checked here, so that a mistake is reported before the index is built.
    config = fields.config(_CONFIG)
    fields.set_fields(config, run_flags)
    config.policy.path = downloads.fetch(config.policy.path)
    refuse(config, places.policy_folder(config, recipe_class(config.recipe)))
    args.eval = config.eval.file
    for path in filter(None, args.eval.split(',')):
        # Names on the Hub and in buckets are read by the run.
        if not downloads.is_name(path) and not downloads.is_address(path):
            _warn_of_own_questions(pathlib.Path(path), files.questions(path), config.policy.path)
    args.corpus = args.corpus.expanduser()
    corpus = args.corpus.resolve()
    # A name such as 'notes.2024.jsonl.gz' keeps what stands before its suffixes.
    name = corpus.name if corpus.is_dir() else _SUFFIXES.sub('', corpus.name)
    workdir = args.workdir or pathlib.Path('runs', name or 'corpus')
    check_is_folder(workdir)
    args.workdir = workdir.expanduser()
    # Its files would be read as texts, and the corpus would differ after every step.
    if args.corpus.is_dir() and args.workdir.resolve().is_relative_to(args.corpus.resolve()):
        raise UserError(
            f'{args.workdir}: the workdir lies in the corpus {args.corpus}; name a folder outside of it with --workdir'
        )
    return args, run_flags


def _origin(args: argparse.Namespace) -> Json:
    """Returns all values that the files in the workdir depend on, by argument; reads the whole corpus."""
    text_name = load_extra('inputs', 'texts').text_name
    with progress.clock('checksum of the corpus'):
        # The contents are hashed, not the times, so that a copied or unpacked corpus has the same hash. What cannot be
        # read is left out of the corpus as well.
        paths = [path for path in files_of(args.corpus) if os.access(path, os.R_OK)]
        names = [text_name(args.corpus, path) for path in paths]
        contents = digest(list(zip(names, disk.file_digests(paths), strict=True)))
    made_with = [_PASSAGE_WORDS, 0 if args.eval else _QUESTIONS, _FILES_VERSION]
    return {'corpus': contents, 'encoder': args.encoder, 'version': made_with}


def _check_origin(workdir: pathlib.Path, origin: Json) -> None:
    """Raises UserError for a workdir of another corpus or other arguments, or one that this command did not make."""
    path = workdir / 'origin.json'
    if not path.exists():
        # A folder with other files is refused: they could have the names of ours, as the corpus itself does.
        if workdir.is_file() or (workdir.is_dir() and any(workdir.iterdir())):
            problem = 'is not empty and was not made from a corpus'
            raise UserError(f'{workdir}: {problem}; choose another workdir')
        return
    fix = 'choose another workdir, or remove this one'
    recorded = json_text.load_object(path, fix)
    differing = [name for name, value in origin.items() if recorded.get(name) != value]
    if differing:
        raise UserError(f'{workdir}: was begun with another {" and ".join(differing)}; {fix}')


# A step is left out if what it writes is there: the files are complete, because each is renamed into place.


def _report(step: str, text: object) -> None:
    """Prints the result of a step."""
    print(f'== {step}: {text}', flush=True)


def _warn(place: pathlib.Path, text: str) -> None:
    """Prints a warning, if there is one."""
    if text:
        print(f'{_NAME}: warning: {place}: {text}', file=sys.stderr)


def _make_corpus(args: argparse.Namespace, origin: Json) -> None:
    """Writes origin.json and the passages into the workdir; reports unusable texts."""
    out = args.workdir / 'corpus.jsonl'
    if out.exists():
        return
    args.workdir.mkdir(parents=True, exist_ok=True)
    # Written first: `_check_origin` refuses a workdir with files but without it, so a repetition needs it.
    disk.write_text(args.workdir / 'origin.json', json.dumps(origin, indent=1) + '\n')
    cleaning = load_extra('inputs', 'cleaning')
    inventory = cleaning.write_clean(args.corpus, out, _PASSAGE_WORDS)
    total = inventory.usable + inventory.unusable
    english = f'{inventory.usable} of {total} {inventory.unit} are English text'
    _report('corpus', f'{english}; {inventory.passages} passages')
    _warn(args.corpus, inventory.left_out())


def _make_questions(args: argparse.Namespace) -> None:
    """Writes the held-out questions, and the documents to train on."""
    documents_path = args.workdir / 'documents.jsonl'
    if documents_path.exists():
        return

    def passages() -> Iterator[Any]:
        with progress.Bar(None, 'passages', 'find sentences') as bar:
            for item in read(args.workdir / 'corpus.jsonl'):
                yield item
                bar.update()

    split = load_extra('inputs', 'cloze_files').build(
        passages, str(args.corpus), 0 if args.eval else _QUESTIONS, _SPLIT_SEED, _MAX_DOCUMENTS
    )
    if args.eval:
        # The user's own questions may be about any document, so none is held out.
        _report('questions', f'those of {args.eval}; {len(split.documents)} passages to train on')
    else:
        files.write_lines(args.workdir / 'questions.jsonl', split.questions)
        # Searches of training leave these passages out (`retrieval.held_out`).
        files.write_lines(args.workdir / 'held_out.jsonl', split.held_out_passages)
        left_out = args.workdir / 'left_out.json'
        text = json.dumps(split.sentences_left_out.to_json(), ensure_ascii=False, indent=1)
        disk.write_text(left_out, text + '\n')
        _report('questions', split)
        counts = [f'{count} {name}' for name, count in split.sentences_left_out.most_common()]
        _report('sentences not asked about', f'{", ".join(counts)}; examples in {left_out}')
    # Written last: its existence means that all files are complete.
    files.write_lines(documents_path, split.documents)


def _warn_of_own_questions(path: pathlib.Path, questions: Sequence[Question], policy: str) -> None:
    """Warns of questions that the policy cannot read, and of very few."""
    if not downloads.is_address(policy):
        _warn(path, warning_of(questions, pathlib.Path(policy)))
    least = load_extra('inputs', 'cloze_files').MIN_QUESTIONS
    if len(questions) < least:
        _warn(path, f'so few questions decide little ({len(questions)}); give {least} or more')


def _make_index(args: argparse.Namespace) -> None:
    """Builds the index; an interrupted build is resumed."""
    out = args.workdir / 'index'
    if out.exists():
        return
    with progress.clock('loading libraries'):
        command_line.prepare_process()
        # These imports take seconds, so they follow the checks of the corpus.
        from zeroplay_jax.retrieval import build, folder
    encoder = None if args.encoder == 'bm25' else build.encoder_named(args.encoder)
    folder.build(args.workdir / 'corpus.jsonl', out, 'scann' if encoder else 'bm25', encoder)
    made = folder.read_manifest(out)['parameters']
    recall = f', recall@3 of exact search {made["recall"]:.3f}' if 'recall' in made else ''
    _report('index', f'{args.encoder} in {out}{recall}')


def _prepare(argv: Sequence[str] | None) -> list[str]:
    """Makes all files that the run reads; returns the command line of the run."""
    args, run_flags = _arguments(argv)
    origin = _origin(args)
    _check_origin(args.workdir, origin)
    try:
        _make_corpus(args, origin)
        # Made before the index, so that a corpus with too few sentences is refused at once.
        _make_questions(args)
    except UserError:
        # The command can be repeated with a corrected corpus. The user may have put other files there.
        for name in ('corpus.jsonl', 'origin.json'):
            (args.workdir / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            args.workdir.rmdir()
        raise
    _make_index(args)
    settings = [f'--config.seed={args.seed}', *run_flags]
    run = _run_folder(args.workdir, _identity(settings))
    _report('self-play', f'{run}; it can be stopped at any time, the same command resumes')
    config = f'--config={CONFIGS / _CONFIG}.py:{args.workdir}'
    return ['zeroplay_jax.main', config, f'--workdir={run}', *settings]


def _identity(settings: Sequence[str]) -> Json:
    """Returns the fields that flags change, without those that may change when a run is resumed."""
    usual = fields.config(_CONFIG)
    config = fields.config(_CONFIG)
    fields.set_fields(config, settings)
    changeable = fields.changeable_fields(config)
    known = identity_of(usual.to_dict(), changeable, {})
    given = identity_of(config.to_dict(), changeable, {})
    return {name: value for name, value in given.items() if value != known.get(name)}


def _run_folder(workdir: pathlib.Path, settings: Json) -> pathlib.Path:
    """Returns the folder of the run with these settings: run, run2, …; passages, questions and index serve all."""
    path = workdir / _RUNS
    runs = json_text.read_object(path) if path.exists() else {}
    for name, known in runs.items():
        if known == settings:
            return workdir / name
    name = f'run{len(runs) + 1}' if runs else 'run'
    disk.write_text(path, json.dumps(runs | {name: settings}, indent=1) + '\n')
    return workdir / name


def main(argv: Sequence[str] | None = None) -> None:
    """Runs all steps; exits with status 2 after a user error (one line), 130 after Ctrl-C."""
    signals.raise_again()
    command = []
    status = exit_status(_NAME, lambda: command.extend(_prepare(argv)), stopped=RESUMABLE)
    if status:
        sys.exit(status)
    # The run replaces this process, in which JAX may have its devices already, of the index: `cpu_devices` divides a
    # CPU before, and a resumed run, which builds no index, must have the same devices.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, '-m', *command])


if __name__ == '__main__':
    main()
