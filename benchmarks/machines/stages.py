"""Seconds and resident memory of a run on a CPU, by stage.

    python -m benchmarks.machines.stages --config=configs/drzero.py:small --workdir=W --policy=FOLDER --index=FOLDER …

takes the flags of `zeroplay train` and prints a row for the rollouts and the update of every step. Memory is what is
resident beyond what was before the weights were read, because a plan counts neither libraries nor the index. Works on
Linux, whose /proc it reads.
"""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks import command
from zeroplay_jax.extras.plan.machines import GIB

PAGE = 4096


class Sample(NamedTuple):
    """A process at a moment: seconds, resident GiB, whether it reads the weights, and lines of its log of metrics."""

    time: float
    resident: float
    reads: bool
    lines: int


def watch(words: list[str], metrics: pathlib.Path) -> list[Sample]:
    """Runs a command of Python to its end; returns five samples a second."""
    process = subprocess.Popen([sys.executable, *words])
    folder = pathlib.Path('/proc', str(process.pid))
    samples = []
    while process.poll() is None:
        # A process that has just ended has no such files, or empty ones.
        with contextlib.suppress(OSError, IndexError):
            pages = int((folder / 'statm').read_text().split()[1])
            reads = 'model.safetensors' in (folder / 'maps').read_text()
            lines = metrics.read_bytes().count(b'\n') if metrics.exists() else 0
            samples.append(Sample(time.monotonic(), pages * PAGE / GIB, reads, lines))
        time.sleep(0.2)
    # The last lines may be younger than the last sample.
    lines = metrics.read_bytes().count(b'\n')
    return [*samples, samples[-1]._replace(time=time.monotonic(), lines=lines)]


def rows(samples: list[Sample], records: list[dict[str, Any]]) -> Iterator[tuple]:
    """Yields (step, phase, stage, seconds, GiB, sampler gap, gradient norm) of the lines of a log."""
    # Twice in a row: the header alone is read earlier.
    pairs = zip(samples, samples[1:])
    before = next(first.resident for first, second in pairs if first.reads and second.reads)
    began = samples[0].time
    for step, record in enumerate(records):
        ended = next(sample.time for sample in samples if sample.lines > step)
        updates = ended - record.get('seconds/update', 0)
        role = record['phase']
        signs = [record.get(f'{role}/{name}', '') for name in ('sampler_gap', 'gradient_norm')]
        for stage, start, end in (('rollouts', began, updates), ('update', updates, ended)):
            inside = [sample.resident for sample in samples if start <= sample.time <= end]
            if inside and end - start > 1:
                memory = f'{max(inside) - before:.2f}'
                yield step, role, stage, round(end - start), memory, *signs
        began = ended


def main() -> None:
    """Runs the command and prints its rows."""
    parser = command.parser('machines.stages', __doc__)
    parser.add_argument('--workdir', required=True, help='of the run')
    arguments, words = parser.parse_known_args()
    metrics = pathlib.Path(arguments.workdir, 'metrics.jsonl')
    run = ['-m', 'zeroplay_jax.main', f'--workdir={arguments.workdir}', *words]
    samples = watch(run, metrics)
    for row in rows(samples, command.read_lines(metrics)):
        print(*row, sep='\t')


if __name__ == '__main__':
    main()
