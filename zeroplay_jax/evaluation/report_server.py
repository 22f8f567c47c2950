"""Serves the report of runs that are going on: the page asks for the version of their files, and loads itself again."""

import contextlib
import functools
import http.server
from collections.abc import Sequence
from pathlib import Path

from zeroplay_jax.evaluation import report_builder
from zeroplay_jax.retrieval import downloads, loopback
from zeroplay_jax.types import UserError

HOST = '127.0.0.1'  # no other machine reaches it
FILES = (*report_builder.RUN_FILES, 'alarms.jsonl', 'run.json')


def serve(workdirs: Sequence[str], port: int) -> None:
    """Serves the report until Ctrl-C; prints its address.

    Args:
      workdirs: those of `report_builder.write_report`.
      port: of the loopback interface; 0: any free one.

    Raises:
      UserError: one line; a workdir cannot be read or lies in a bucket, or the port is taken.
    """
    for workdir in workdirs:
        if downloads.is_address(workdir):
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
