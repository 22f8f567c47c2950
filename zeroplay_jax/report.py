"""Writes the page of a run again, or one page on which several runs are compared."""

import argparse
import sys

from zeroplay_jax.evaluation import report
from zeroplay_jax.types import UserError

EXAMPLES = """examples:
  python -m zeroplay_jax.report runs/quickstart
  python -m zeroplay_jax.report runs/a runs/b --out comparison.html
"""


def main(argv: list[str] | None = None) -> int:
    """Writes the page and prints where it is; a mistake of the user is one line and code 2."""
    parser = argparse.ArgumentParser(
        prog='python -m zeroplay_jax.report',
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        'workdirs', nargs='+', metavar='WORKDIR', help='folder of a run; others are set against the first'
    )
    parser.add_argument('--out', metavar='FILE', help='the page (default: report.html in the first WORKDIR)')
    arguments = parser.parse_args(argv)
    try:
        print(report.write_report(*arguments.workdirs, out=arguments.out))
    except (UserError, OSError) as error:
        hint = '' if isinstance(error, UserError) else '; choose another file with --out'
        print(f'zeroplay_jax.report: {error}{hint}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
