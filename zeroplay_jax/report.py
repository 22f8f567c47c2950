"""Writes the page of a run again, or one page on which several runs are compared."""

import argparse
import pathlib
import sys

from zeroplay_jax.evaluation import picture, report
from zeroplay_jax.retrieval.command import Parser
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.types import UserError

EXAMPLES = """examples:
  python -m zeroplay_jax.report runs/quickstart
  python -m zeroplay_jax.report runs/a runs/b --out comparison.html
  python -m zeroplay_jax.report runs/quickstart --picture curve.svg
"""


def main(argv: list[str] | None = None) -> int:
    """Writes the page and prints where it is; a mistake of the user is one line and code 2."""
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
        help='folder of a run; others are set against the first',
    )
    parser.add_argument(
        '--out', metavar='FILE', help='the page (default: report.html in the first WORKDIR)'
    )
    parser.add_argument('--picture', metavar='FILE', help='write only the curve of one run, as SVG')
    try:
        arguments = parser.parse_args(argv)
        if arguments.picture:
            if len(arguments.workdirs) > 1 or arguments.out:
                raise UserError(
                    '--picture draws one run into one file; give one WORKDIR and no --out'
                )
            print(
                picture.write_picture(
                    report.read_run(pathlib.Path(arguments.workdirs[0])), arguments.picture
                )
            )
        else:
            print(report.write_report(*arguments.workdirs, out=arguments.out))
    except (UserError, RetrievalError, OSError) as error:
        hint = '; choose another file' if isinstance(error, OSError) else ''
        print(f'zeroplay_jax.report: {error}{hint}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
