"""Builds an index folder from a corpus: a file of passages, or a folder of texts.

    python -m retrieval.build --corpus wiki.jsonl.gz --encoder e5-base-v2 --query-prefix 'query: ' \\
        --passage-prefix 'passage: ' --out indexes/wiki
    python -m retrieval.build --corpus wiki.jsonl.gz --kind bm25 --out indexes/wiki-bm25

A build that was stopped goes on with the same command. On several hosts with one file system: --stage corpus once,
--stage encode --host h --hosts n on each, --stage index once.
"""

from __future__ import annotations

import argparse
import json
import logging
import pathlib
import sys
import time
from collections.abc import Sequence

from . import folder, shards
from .command import Parser, one_line
from .lexical import LexicalEncoder
from .types import Encoder, RetrievalError


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    logging.basicConfig(level=logging.INFO, format='%(message)s', stream=sys.stderr)
    one_line(lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog='python -m retrieval.build',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        '--corpus',
        type=pathlib.Path,
        required=True,
        help='.jsonl or .tsv, also .gz and .zst, or a folder of texts',
    )
    add('--out', type=pathlib.Path, required=True, help='folder of the index; must not exist')
    add(
        '--kind',
        choices=folder.KINDS,
        default='scann',
        help='of index; bm25 takes no encoder (scann)',
    )
    add('--encoder', help="folder of a BERT checkpoint, or 'lexical'")
    add(
        '--query-prefix',
        help="put before every query ('query: ' for E5); needed where the folder does not say it",
    )
    add('--passage-prefix', help="put before every passage ('passage: ' for E5)")
    add('--max-tokens', type=int, help='longest sequence; default: as the folder says, at most 256')
    add(
        '--encoder-dtype',
        choices=('float32', 'bfloat16'),
        default='float32',
        help='of weights and activations',
    )
    add('--batch-tokens', type=int, help='tokens of one batch of passages')
    add('--dtype', choices=('float32', 'float16'), default='float32', help='of the vectors on disk')
    add(
        '--skip-bad-lines',
        action='store_true',
        help='leave bad lines of the corpus out instead of stopping',
    )
    add('--leaves', type=int, help='ScaNN: partitions')
    add('--leaves-searched', type=int, help='ScaNN: partitions read per query')
    add('--overfetch', type=int, default=32, help='ScaNN: candidates scored again exactly')
    add(
        '--reordered',
        type=int,
        help='ScaNN: candidates it looks at twice itself; default 4 × overfetch',
    )
    add('--threshold', type=float, default=0.2, help='ScaNN: of anisotropic quantisation')
    add(
        '--reorder',
        choices=('float32', 'bfloat16'),
        default='float32',
        help='ScaNN: its own copy of the vectors',
    )
    add('--stage', choices=folder.STAGES, help='only this part; default: all')
    add('--host', type=int, default=0, help='which of --hosts this one is, from 0 (0)')
    add('--hosts', type=int, default=1, help='how many hosts share the encoding (1)')
    add('--shard-rows', type=int, default=shards.SHARD_ROWS, help='passages that a kill can cost')
    return parser


def _run(args: argparse.Namespace) -> None:
    started = time.monotonic()
    stages = (args.stage,) if args.stage else folder.STAGES
    encoder = None if args.kind == 'bm25' or stages == ('corpus',) else _encoder(args)
    parameters = {}
    if args.kind == 'scann':
        names = ('leaves', 'leaves_searched', 'overfetch', 'reordered', 'threshold', 'reorder')
        parameters = {name: getattr(args, name) for name in names}
    folder.build(
        args.corpus,
        args.out,
        args.kind,
        encoder,
        parameters,
        dtype=args.dtype,
        strict=not args.skip_bad_lines,
        stages=stages,
        shard_rows=args.shard_rows,
        host=args.host,
        hosts=args.hosts,
    )
    if 'index' in stages:
        manifest = folder.read_manifest(args.out)
        size = sum(file['bytes'] for file in manifest['files'].values())
        logging.info(
            '%s: %d passages, %.1f MB, %.0f s', args.out, manifest['corpus']['passages'], size / 1e6,
            time.monotonic() - started,
        )  # fmt: skip
        print(json.dumps(manifest['parameters']))


def _encoder(args: argparse.Namespace) -> Encoder:
    if not args.encoder:
        raise RetrievalError(
            "--encoder is missing: name the folder of a BERT checkpoint, or 'lexical'"
        )
    if args.encoder == 'lexical':
        return LexicalEncoder()
    from .encoder import TextEncoder  # here and not above: TensorFlow, which bm25 does without

    return TextEncoder(
        args.encoder,
        args.query_prefix,
        args.passage_prefix,
        args.max_tokens,
        args.encoder_dtype,
        args.batch_tokens,
    )


if __name__ == '__main__':
    main()
