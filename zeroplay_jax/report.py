"""Writes or serves the HTML report of a run, or of several runs compared; or writes a named figure of a paper."""

import argparse
import pathlib
import sys

from zeroplay_jax.evaluation import pictures, report_builder, report_server
from zeroplay_jax.retrieval.command import Parser, exit_status, number_type
from zeroplay_jax.runtime import signals
from zeroplay_jax.runtime.remote_workdir import local_run
from zeroplay_jax.types import UserError

EXAMPLES = """examples:
  python -m zeroplay_jax.report runs/quickstart
  python -m zeroplay_jax.report runs/a runs/b --out comparison.html
  python -m zeroplay_jax.report --serve runs/quickstart
  python -m zeroplay_jax.report --figure=em runs/quickstart --out curve.svg
  python -m zeroplay_jax.report --figure=ssp5a runs/a runs/b
  python -m zeroplay_jax.report --figure=list
"""


def main(argv: list[str] | None = None) -> int:
    """Writes the file and prints its path; returns the exit status (`exit_status`)."""
    signals.raise_again()
    return exit_status('zeroplay_jax.report', lambda: _run(argv), 'choose another file')


def _run(argv: list[str] | None) -> None:
    parser = _parser()
    arguments = parser.parse_args(argv)
    if not arguments.workdirs and arguments.figure != 'list':
        parser.error('the following arguments are required: WORKDIR')
    if arguments.serve:
        report_server.serve(arguments.workdirs, arguments.port)
    else:
        print(_written(arguments))


def _parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(
        prog='python -m zeroplay_jax.report',
        description=__doc__,
        epilog=EXAMPLES,
    )
    parser.add_argument(
        'workdirs',
        nargs='*',
        metavar='WORKDIR',
        help='workdir of a run, or gs://bucket/path; further runs are compared with the first; or ATIF documents: '
        'a JSON file, or a folder with some',
    )
    parser.add_argument(
        '--out',
        metavar='FILE',
        help='file to write (default: report.html or NAME.svg in the first WORKDIR)',
    )
    parser.add_argument(
        '--figure', metavar='NAME', help='write a figure as SVG and PNG instead; list: names all'
    )
    parser.add_argument(
        '--serve',
        action='store_true',
        help='serve the report on this machine instead; the page follows runs that are going on',
    )
    parser.add_argument(
        '--port',
        type=number_type(int, 0, 65535),
        default=8765,
        metavar='N',
        help='of --serve; 0: any free one (default: %(default)s)',
    )
    return parser


def _written(arguments: argparse.Namespace) -> str:
    """Writes the report or the figure; returns what to print: the paths of its files, or the list of figures."""
    if arguments.figure == 'list':
        named = pictures.figures().items()
        return '\n'.join(f'{name:18} {figure["title"]}' for name, figure in named)
    suffix = '.svg' if arguments.figure else '.html'
    out = pathlib.Path(arguments.out or suffix)
    if not out.name.lower().endswith(suffix) and not out.is_dir():
        raise UserError(f'{out}: end its name with {suffix}, which is what is written')
    if not out.parent.is_dir():
        raise UserError(f'{out}: folder {out.parent} does not exist; create it first')
    workdirs = [local_run(workdir) for workdir in arguments.workdirs]
    if arguments.figure:
        runs = report_builder.read_runs(workdirs, has_trajectories=False)
        target = arguments.out or workdirs[0] / f'{arguments.figure}.svg'
        return '\n'.join(map(str, pictures.write_figure(arguments.figure, runs, target)))
    return str(report_builder.write_report(*workdirs, out=arguments.out))


if __name__ == '__main__':
    sys.exit(main())
