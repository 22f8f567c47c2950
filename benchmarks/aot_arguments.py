"""The flags that `benchmarks.tpu_aot` and `benchmarks.gpu_aot` share."""

from __future__ import annotations

import argparse
import pathlib

from benchmarks import adapter_work, tpu_shapes

SEVERAL = 'may be given several times (default: all)'


def shared_parser(module: str, description: str | None, least_rank: int) -> argparse.ArgumentParser:
    """Returns a parser with --model, --config, --adapters, --unrolled, --again and --out.

    Args:
      module: of the benchmark.
      description: its docstring.
      least_rank: 0 if it also compiles full fine-tuning; 1 if --adapters is needed.
    """
    parser = argparse.ArgumentParser(
        prog=f'python -m {module}',
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def rank(text: str) -> int:
        value = int(text)
        if value < least_rank:
            raise argparse.ArgumentTypeError('give a rank of 1 or more')
        return value

    rank_help = 'their rank' if least_rank else 'rank of adapters; 0: full fine-tuning'
    models = (*tpu_shapes.MODELS, *tpu_shapes.FURTHER_MODELS)
    parser.add_argument(
        '--adapters', type=rank, default=0, required=least_rank > 0, metavar='RANK', help=rank_help
    )
    parser.add_argument('--model', choices=models, action='append', default=[], help=SEVERAL)
    config_help = "a paper's config, with its lengths; may be given several times"
    if not least_rank:
        config_help = f'with --adapters: {config_help}'
    parser.add_argument(
        '--config', choices=adapter_work.CONFIGS, action='append', default=[], help=config_help
    )
    unrolled_help = 'compile the layers of updates one by one, without policy.scan'
    if not least_rank:
        unrolled_help = f'with --adapters: {unrolled_help}'
    parser.add_argument('--unrolled', action='store_true', help=unrolled_help)
    parser.add_argument('--again', action='store_true', help='compile stored results again')
    parser.add_argument('--out', type=pathlib.Path, help='file of the results')
    return parser
