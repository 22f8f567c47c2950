"""Builds an index folder from a corpus: a file of passages, or a folder of texts.

    zeroplay index --corpus wiki.jsonl.gz --encoder e5-base-v2 --query-prefix 'query: ' \\
        --passage-prefix 'passage: ' --out indexes/wiki
    zeroplay index --corpus wiki.jsonl.gz --kind bm25 --out indexes/wiki-bm25

Repeating the command resumes an interrupted build. On several hosts with one file system: --stage corpus once, --stage
encode --host h --hosts n on each, --stage index once.
"""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import pathlib
import shlex
import time
from collections.abc import Callable, Sequence

from . import downloads, folder
from .command import (
    FIELDS_HELP,
    Parser,
    one_line,
    passage_fields,
    passage_words,
    show_messages,
    similar_path,
)
from .encoder_folder import MINILM
from .index import SCANN_PARAMETERS
from .lexical import LexicalEncoder
from .types import Encoder, RetrievalError

# Encoders that are no folders, in an error.
_OTHERS = "hf://owner/model, 'minilm' or 'lexical'"
# Arguments of an encoder that is a checkpoint.
_ENCODING = ('query_prefix', 'passage_prefix', 'max_tokens', 'encoder_dtype')
# Arguments → what they need. Elsewhere they would have no effect, so they are refused.
_NEEDS: tuple[tuple[tuple[str, ...], Callable[[argparse.Namespace], bool], str], ...] = (
    (
        ('encoder', 'dtype', 'host', 'hosts', *_ENCODING),
        lambda args: args.kind != 'bm25',
        'bm25 has no vectors; take it away, or choose another --kind',
    ),
    (
        _ENCODING,
        lambda args: args.encoder != 'lexical',
        'the encoder lexical does not take it; take it away, or choose another --encoder',
    ),
    (
        SCANN_PARAMETERS,
        lambda args: args.kind == 'scann',
        'is for ScaNN alone; take it away, or choose --kind scann',
    ),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    # Progress and warnings go to stderr: stdout has the parameters of the index only.
    show_messages()
    one_line(lambda: _run(_arguments(argv)))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the arguments; RetrievalError for one that would have no effect."""
    parser = _parser()
    args = parser.parse_args(argv)
    for names, is_met, reason in _NEEDS:
        for name in names:
            value = getattr(args, name)
            if value != parser.get_default(name) and not is_met(args):
                flag = f'--{name.replace("_", "-")} {shlex.quote(str(value))}'
                raise RetrievalError(f'{flag}: {reason}')
    return args


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog='zeroplay index',
        description=__doc__,
    )
    add = parser.add_argument
    corpus_help = (
        '.jsonl, .tsv or .parquet, also .gz and .zst, or a folder of texts; also gs://bucket/path'
    )
    add('--corpus', required=True, help=corpus_help)
    add('--out', type=pathlib.Path, required=True, help='folder of the index; must not exist')
    kind_help = 'kind of index; bm25 takes no encoder (scann)'
    add('--kind', choices=folder.KINDS, default='scann', help=kind_help)
    bad_lines_help = 'leave bad lines of the corpus out instead of stopping'
    add('--skip-bad-lines', action='store_true', help=bad_lines_help)
    words_help = (
        'cut long passages and texts into whole sentences of this many words (0: as they are)'
    )
    add('--passage-words', type=passage_words, default=0, metavar='N', help=words_help)
    add('--fields', type=passage_fields, metavar='ID,TEXT,…', help=FIELDS_HELP)
    dtype_help = 'type of the vectors on disk'
    add('--dtype', choices=('float32', 'float16'), default='float32', help=dtype_help)
    # Of the encoder.
    encoder_help = (
        "folder of a BERT checkpoint, hf://owner/model, 'minilm' of a package, or 'lexical'"
    )
    add('--encoder', help=encoder_help)
    # No default: E5 gives poor results without its prefixes, and others give poor results with them.
    query_help = (
        "text before every query ('query: ' for E5); required if the folder does not have it"
    )
    add('--query-prefix', help=query_help)
    add('--passage-prefix', help="text before every passage ('passage: ' for E5)")
    add('--max-tokens', type=int, help='longest sequence; default: from the folder')
    dtype_help = 'type of weights and activations'
    add('--encoder-dtype', choices=('float32', 'bfloat16'), default='float32', help=dtype_help)
    # Of ScaNN.
    add('--leaves', type=int, help='ScaNN: partitions')
    add('--leaves-searched', type=int, help='ScaNN: partitions read per query')
    reorder_help = 'ScaNN: type of its own copy of the vectors'
    add('--reorder', choices=('float32', 'bfloat16'), default='float32', help=reorder_help)
    # Of the parts of a build.
    add('--stage', choices=folder.STAGES, help='only this part; default: all')
    add('--host', type=int, default=0, help='number of this host among --hosts, from 0 (0)')
    add('--hosts', type=int, default=1, help='number of hosts that share the encoding (1)')
    return parser


def _run(args: argparse.Namespace) -> None:
    """Runs the stages that the arguments name."""
    started = time.monotonic()
    stages = (args.stage,) if args.stage else folder.STAGES
    encoder = None
    # Reading the corpus needs no encoder, so a host without an accelerator can do it.
    if args.kind != 'bm25' and stages != ('corpus',):
        encoder = encoder_named(
            args.encoder,
            args.query_prefix,
            args.passage_prefix,
            args.max_tokens,
            args.encoder_dtype,
        )
    parameters = {}
    if args.kind == 'scann':
        parameters = {name: getattr(args, name) for name in SCANN_PARAMETERS}
    source = pathlib.Path(downloads.fetch(args.corpus))
    folder.build(
        source,
        args.out,
        args.kind,
        encoder,
        parameters,
        dtype=args.dtype,
        strict=not args.skip_bad_lines,
        passage_words=args.passage_words,
        fields=args.fields,
        stages=stages,
        host=args.host,
        hosts=args.hosts,
    )
    if 'index' in stages:
        _report(args.out, time.monotonic() - started)


def _report(out: pathlib.Path, seconds: float) -> None:
    """Logs the size of an index and prints its parameters as JSON."""
    manifest = folder.read_manifest(out)
    size = sum(file['bytes'] for file in manifest['files'].values())
    passages = manifest['corpus']['passages']
    logging.info('%s: %d passages, %.1f MB, %.0f s', out, passages, size / 1e6, seconds)
    print(json.dumps(manifest['parameters']))


def encoder_named(
    name: str | None,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    max_tokens: int | None = None,
    dtype: str = 'float32',
) -> Encoder:
    """Returns the encoder of --encoder; RetrievalError if there is none or it cannot be used."""
    if not name:
        raise RetrievalError(
            f'--encoder is missing: name the folder of a BERT checkpoint, {_OTHERS}'
        )
    if name == 'lexical':
        return LexicalEncoder()
    if name == MINILM:
        # It was trained without prefixes.
        query_prefix, passage_prefix = query_prefix or '', passage_prefix or ''
    elif not downloads.is_name(name) and not pathlib.Path(name).is_dir():
        meant = difflib.get_close_matches(name, ['lexical', 'minilm'])
        suggestion = f'; did you mean {meant[0]!r}?' if meant else similar_path(name)
        if name == 'bm25':
            suggestion = '; BM25 has no encoder: give --kind bm25'
        raise RetrievalError(
            f'--encoder {name}: no such folder; name the folder of a BERT checkpoint, {_OTHERS}{suggestion}'
        )
    # Imported here, because it imports TensorFlow, which BM25 does not need.
    from .encoder import TextEncoder

    return TextEncoder(downloads.fetch_model(name), query_prefix, passage_prefix, max_tokens, dtype)


if __name__ == '__main__':
    main()
