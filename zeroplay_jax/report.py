"""Writes the HTML report of a run, or one report that compares several runs."""

import argparse
import pathlib
import sys

from zeroplay_jax.evaluation import report_builder
from zeroplay_jax.retrieval.command import Parser
from zeroplay_jax.runtime.remote_workdir import local_run
from zeroplay_jax.types import UserError

EXAMPLES = """examples:
  python -m zeroplay_jax.report runs/quickstart
  python -m zeroplay_jax.report runs/a runs/b --out comparison.html
  python -m zeroplay_jax.report runs/quickstart --picture curve.svg
"""


def main(argv: list[str] | None = None) -> int:
    """Writes the file and prints its path; a user error is one line on stderr and exit code 2."""
    parser = _parser()
    try:
        # Parsed inside the `try`: `Parser` raises RetrievalError for mistakes on the command line.
        print(_write(parser.parse_args(argv)))
    except UserError as error:
        print(f'zeroplay_jax.report: {error}', file=sys.stderr)
        return 2
    except OSError as error:
        # No space, or no permission to write.
        problem = str(error)
        if error.filename:
            problem = f'{error.filename}: cannot be written ({error.strerror})'
        print(f'zeroplay_jax.report: {problem}; choose another file', file=sys.stderr)
        return 2
    return 0


def _parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(
        prog='python -m zeroplay_jax.report',
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        'workdirs',
        nargs='+',
        metavar='WORKDIR',
        help='workdir of a run, or gs://bucket/path; further runs are compared with the first',
    )
    parser.add_argument(
        '--out', metavar='FILE', help='HTML file (default: report.html in the first WORKDIR)'
    )
    parser.add_argument(
        '--picture', metavar='FILE', help='write only the plot of exact match of one run, as SVG'
    )
    return parser


def _write(arguments: argparse.Namespace) -> pathlib.Path:
    """Writes the report or the plot; returns the path of the file."""
    for name, suffix in ((arguments.out, '.html'), (arguments.picture, '.svg')):
        if name and not name.lower().endswith(suffix) and not pathlib.Path(name).is_dir():
            raise UserError(f'{name}: end its name with {suffix}, which is what is written')
    # A plot is an SVG file for a README; an HTML report would need a browser.
    if not arguments.picture:
        workdirs = [local_run(workdir) for workdir in arguments.workdirs]
        return report_builder.write_report(*workdirs, out=arguments.out)
    if len(arguments.workdirs) > 1 or arguments.out:
        raise UserError('--picture plots one run into one file; pass one WORKDIR and no --out')
    run = report_builder.read_run(local_run(arguments.workdirs[0]))
    return report_builder.write_curve_plot(run, arguments.picture)


if __name__ == '__main__':
    sys.exit(main())
