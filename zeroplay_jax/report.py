"""Writes the HTML report of a run, also of one that is going on, or of several runs compared."""

import sys

from zeroplay_jax.evaluation import report_builder
from zeroplay_jax.retrieval.command import Parser, exit_status
from zeroplay_jax.runtime import signals
from zeroplay_jax.runtime.workdir import local_run

EXAMPLES = """examples:
  zeroplay report runs/quickstart
  zeroplay report runs/a runs/b --out comparison.html
"""


def main(argv: list[str] | None = None) -> int:
    """Writes the file and prints its path; returns the exit status (`exit_status`)."""
    signals.raise_again()
    return exit_status('zeroplay report', lambda: _run(argv), 'choose another file')


def _run(argv: list[str] | None) -> None:
    arguments = _parser().parse_args(argv)
    out = report_builder.output_path(arguments.out, '.html')
    workdirs = [local_run(workdir) for workdir in arguments.workdirs]
    print(report_builder.write_report(*workdirs, out=out))


def _parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(
        prog='zeroplay report',
        description=__doc__,
        epilog=EXAMPLES,
    )
    parser.add_argument(
        'workdirs',
        nargs='+',
        metavar='WORKDIR',
        help='workdir of a run, or gs://bucket/path; further runs are compared with the first',
    )
    parser.add_argument(
        '--out',
        metavar='FILE',
        help='file to write (default: report.html in the first WORKDIR)',
    )
    return parser


if __name__ == '__main__':
    sys.exit(main())
