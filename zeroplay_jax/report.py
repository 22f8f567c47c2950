"""Writes or serves the HTML report of a run, or of several runs compared.

The served page asks for the version of the runs' files, and loads itself again.
"""

import contextlib
import functools
import http.server
import sys
from collections.abc import Sequence
from pathlib import Path

from zeroplay_jax.evaluation import report_builder
from zeroplay_jax.retrieval import loopback, objects
from zeroplay_jax.retrieval.command import Parser, exit_status, number_type
from zeroplay_jax.runtime import signals
from zeroplay_jax.runtime.workdir import local_run
from zeroplay_jax.types import UserError

EXAMPLES = """examples:
  python -m zeroplay_jax.report runs/quickstart
  python -m zeroplay_jax.report runs/a runs/b --out comparison.html
  python -m zeroplay_jax.report --serve runs/quickstart
"""
HOST = '127.0.0.1'  # no other machine reaches it
FILES = (*report_builder.RUN_FILES, 'alarms.jsonl', 'run.json')


def main(argv: list[str] | None = None) -> int:
    """Writes the file and prints its path; returns the exit status (`exit_status`)."""
    signals.raise_again()
    return exit_status('zeroplay_jax.report', lambda: _run(argv), 'choose another file')


def _run(argv: list[str] | None) -> None:
    arguments = _parser().parse_args(argv)
    if arguments.serve:
        serve(arguments.workdirs, arguments.port)
        return
    out = report_builder.output_path(arguments.out, '.html')
    workdirs = [local_run(workdir) for workdir in arguments.workdirs]
    print(report_builder.write_report(*workdirs, out=out))


def _parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(
        prog='python -m zeroplay_jax.report',
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


def serve(workdirs: Sequence[str], port: int) -> None:
    """Serves the report until Ctrl-C; prints its address.

    Args:
      workdirs: those of `report_builder.write_report`.
      port: of the loopback interface; 0: any free one.

    Raises:
      UserError: one line; a workdir cannot be read or lies in a bucket, or the port is taken.
    """
    for workdir in workdirs:
        if objects.is_address(workdir):
            raise UserError(
                f'{workdir}: --serve follows folders of this machine alone; write the report without it'
            )
    with server(list(map(Path, workdirs)), port) as running:
        try:
            print(f'http://{HOST}:{running.server_port}/   Ctrl-C ends it', flush=True)
            running.serve_forever()
        except KeyboardInterrupt:
            print()


def server(workdirs: Sequence[Path], port: int) -> http.server.ThreadingHTTPServer:
    """Returns the server of `serve`, listening; errors are those of `serve`."""
    # A mistake in a path is told before there is an address.
    report_builder.read_runs(workdirs, has_trajectories=False)

    class Handler(_Handler):
        runs = workdirs

    try:
        return http.server.ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise UserError(
            f'--port={port}: cannot be used ({error.strerror}); choose another, or 0 for any free one'
        ) from None


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers / with the page, and /version with the version of the files."""

    runs: Sequence[Path] = ()

    def handle(self) -> None:
        """Answers the requests of a connection; one that its client resets is left."""
        with contextlib.suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        """Answers a request; what cannot be read is one line, with status 503."""
        reason = loopback.refusal(self.headers)
        if reason or self.path not in ('/', '/version'):
            self.send_error(403 if reason else 404, reason or None)
            return
        status, kind, text = 200, 'plain', _version(self.runs)
        try:
            if self.path == '/':
                kind, text = 'html', _page(tuple(self.runs), text)
        except (UserError, OSError) as error:
            status, text = 503, str(error)
        content = text.encode()
        self.send_response(status)
        self.send_header('Content-Type', f'text/{kind}; charset=utf-8')
        self.send_header('Content-Length', str(len(content)))
        self.send_header('Cache-Control', 'no-store')
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Prints nothing: the page asks every two seconds."""


def _version(workdirs: Sequence[Path]) -> str:
    """Returns a text that changes with the files of the runs."""
    paths = [workdir / name for workdir in workdirs for name in FILES]
    states = [path.stat() for path in paths if path.is_file()]
    return ' '.join(f'{state.st_size}-{state.st_mtime_ns}' for state in states)


# Tabs that follow a run want the page of one version at a time.
@functools.lru_cache(maxsize=1)
def _page(workdirs: tuple[Path, ...], version: str) -> str:
    return report_builder.render(report_builder.read_runs(workdirs), version)


if __name__ == '__main__':
    sys.exit(main())
