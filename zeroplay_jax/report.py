"""Writes a run's page again: `python -m zeroplay_jax.report WORKDIR`."""

import argparse
import sys

from zeroplay_jax.evaluation import report


def main(argv: list[str] | None = None) -> int:
    """Writes WORKDIR/report.html and prints where it is."""
    parser = argparse.ArgumentParser(prog='python -m zeroplay_jax.report', description=__doc__)
    parser.add_argument('workdir', help='folder of a run, for example runs/quickstart')
    try:
        print(report.write_report(parser.parse_args(argv).workdir))
    except FileNotFoundError as error:
        print(f'zeroplay_jax.report: {error}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
