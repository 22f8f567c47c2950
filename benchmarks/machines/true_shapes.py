"""A whole run of Dr. Zero at the shapes of Qwen2.5-0.5B on two CPU cores: where time and memory go, beside the plan.

    python -m benchmarks.machines.true_shapes --policy FOLDER --corpus corpus.jsonl --questions nq.jsonl --work FOLDER

All goes through the public commands: an index of ScaNN over the corpus, configs/drzero.py with its prompts and
tools.syntax=qwen, adapters of both roles, the flags of the plan. The run: evaluation, a step of the proposer, one that
makes questions, a step of the solver, evaluation, export. The stored rows are of random weights in which a script of
calls, questions and answers was written; that policy, and rows about a run that kill -9 ended and about exported
weights in transformers and peft, are from commit 21656cfd.

Smaller than the paper (`SMALLER`): numbers of rollouts and of turns, because a core computes 100 tokens of a prompt per
second. Prompts, turns, observations and passages are as long as there. One JAX device uses all cores: each of two would
hold a copy of the weights.

Prints, and writes to WORK/true_shapes.tsv, wall and CPU seconds and the most resident memory of every stage, and the
plan's memory. The plan counts arrays and temporaries: measured is what is resident beyond what was before the first
weight was read; compilers and their programs are not planned. Works on Linux, whose /proc it reads.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks import command
from zeroplay_jax.extras.plan.machines import GIB
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.types import UserError

# One update per role.
SMALLER = {
    'schedule.iterations': 1,
    'schedule.hop_ratio': '(1,)',
    'proposer.steps': 1,
    'proposer.batch': 3,
    'pool.batch': 1,
    'pool.samples': 2,
    'solver.steps': 1,
    'solver.batch': 1,
    'solver.samples': 4,
    'reward.solves': 2,
    'eval.questions': 1,
    'rollout.max_turns': 2,
    # 768 + 2 · 256 + 512.
    'sampler.context': 1792,
    'micro.tokens': 1792,
    'micro.rows': 1,
    'sampler.slots': 4,
    'proposer.warmup_steps': 0,
    'solver.warmup_steps': 0,
}
FURTHER = {
    'policy.adapters.rank': 32,
    'progress': False,
    'stop_after_empty_steps': 0,
}
_SAMPLE_SECONDS = 0.2
_TICKS = os.sysconf('SC_CLK_TCK')
_PAGE = os.sysconf('SC_PAGE_SIZE')


class Sample(NamedTuple):
    """A process at a moment.

    Attributes:
      time: of time.monotonic.
      cpu: seconds of user and kernel.
      resident: bytes.
      reads: whether the weights' file is mapped.
      lines: of the log of metrics; -1 without a log.
    """

    time: float
    cpu: float
    resident: int
    reads: bool
    lines: int


class Stage(NamedTuple):
    """A part of a process: seconds, CPU seconds, and the most bytes that were resident."""

    name: str
    wall: float
    cpu: float
    resident: int


class Watched:
    """A command that is sampled while it runs.

    Attributes:
      process: the command.
      samples: so far.

    Args:
      words: arguments of Python.
      log: file that gets its output.
      metrics: log of metrics that the command writes; None if it writes none.
    """

    def __init__(
        self, words: Sequence[str], log: pathlib.Path, metrics: pathlib.Path | None = None
    ):
        self.samples: list[Sample] = []
        self._metrics = metrics
        self._log = log
        with log.open('a') as output:
            self.process = subprocess.Popen([sys.executable, *words], stdout=output, stderr=output)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while self.process.poll() is None:
            # A process that has just ended has no such files, or empty ones.
            with contextlib.suppress(OSError, IndexError):
                self.samples.append(self._sample())
            time.sleep(_SAMPLE_SECONDS)

    def _sample(self) -> Sample:
        folder = pathlib.Path(f'/proc/{self.process.pid}')
        fields = (folder / 'stat').read_text().rpartition(')')[2].split()
        cpu = (int(fields[11]) + int(fields[12])) / _TICKS
        resident = int((folder / 'statm').read_text().split()[1]) * _PAGE
        reads = 'model.safetensors' in (folder / 'maps').read_text()
        lines = -1
        if self._metrics is not None and self._metrics.is_file():
            lines = self._metrics.read_bytes().count(b'\n')
        return Sample(time.monotonic(), cpu, resident, reads, lines)

    def wait(self) -> list[Sample]:
        """Waits for the end; returns the samples.

        Raises:
          UserError: the command failed; with the end of its output.
        """
        status = self.process.wait()
        self._thread.join()
        if status:
            end = self._log.read_text(errors='replace')[-2000:]
            raise UserError(f'exit status {status} of a command, whose output ends with\n{end}')
        return self.samples


def stage(samples: Sequence[Sample], name: str, start: float = 0.0, end: float = math.inf) -> Stage:
    """Returns the part of a process between two times."""
    inside = [sample for sample in samples if start <= sample.time <= end]
    # A part that is shorter than the time between samples.
    inside = inside or [min(samples, key=lambda sample: abs(sample.time - start))]
    first, last = inside[0], inside[-1]
    peak = max(sample.resident for sample in inside)
    return Stage(name, last.time - first.time, last.cpu - first.cpu, peak)


def before_weights(samples: Sequence[Sample]) -> int:
    """Returns the bytes that were resident before the weights were read."""
    for before, first, second in zip(samples, samples[1:], samples[2:]):
        # Twice in a row: the header alone is read earlier.
        if first.reads and second.reads:
            return before.resident
    raise ValueError('no weights were read')


def stages_of_run(samples: Sequence[Sample], records: Sequence[dict[str, Any]]) -> list[Stage]:
    """Returns the stages of a run by the times in its log, whose lines are `records`."""

    def reached(lines: int) -> float:
        return next(sample.time for sample in samples if sample.lines >= lines)

    began = reached(0)
    stages = [stage(samples, 'load', samples[0].time, began)]
    for number, record in enumerate(records):
        ended = reached(number + 1)
        # A step begins with what is saved of the one before, and ends with the update.
        saved = began + record['seconds/save']
        if number:
            stages.append(stage(samples, f'save after step {number - 1}', began, saved))
        updated = ended - record.get('seconds/update', 0.0)
        name = f'step {number}, {record["phase"]}'
        stages.append(stage(samples, f'{name}: rollouts', saved, updated))
        if record['phase'] in ('proposer', 'solver'):
            stages.append(stage(samples, f'{name}: update', updated, ended))
        began = ended
    stages.append(stage(samples, 'last save, export, report', began))
    return stages


def planned(flags: Sequence[str]) -> tuple[list[str], dict[str, float]]:
    """Returns what `zeroplay_jax.extras.plan` says: flags, and GiB of a device in 'rollouts' and 'updates'."""
    words = [sys.executable, '-m', 'zeroplay_jax.extras.plan', *flags, '--machine=cpu:1']
    result = subprocess.run(words, capture_output=True, text=True)
    if result.returncode:
        raise UserError(result.stderr.strip())
    sums = re.search(r'^together +(\S+) +(\S+)', result.stderr, re.MULTILINE)
    assert sums, result.stderr
    return result.stdout.split(), {'rollouts': float(sums[1]), 'update': float(sums[2])}


def table(stages: Sequence[Stage], plan: dict[str, float], before: int) -> list[list[str]]:
    """Returns the rows of the table.

    Args:
      plan: result of `planned`.
      before: bytes that were resident before the weights were read.
    """
    rows = []
    for stage in stages:
        beyond = (stage.resident - before) / GIB
        part = plan.get(stage.name.rpartition(': ')[2])
        figures = [f'{stage.wall:.0f}', f'{stage.cpu:.0f}', f'{stage.resident / GIB:.2f}']
        compared = ['', '', '']
        if part is not None:
            compared = [f'{beyond:.2f}', f'{part:.2f}', f'{beyond / part - 1:+.0%}']
        rows.append([stage.name, *figures, *compared])
    return rows


def notes(chosen: Sequence[str]) -> str:
    """Returns the lines before the table: flags of the plan, machine and load."""
    cpus = pathlib.Path('/proc/cpuinfo').read_text()
    (name, *_) = re.findall(r'^model name\s*: (.*)', cpus, re.MULTILINE)
    load = os.getloadavg()[1]
    versions = f'JAX {importlib.metadata.version("jax")}, {time.strftime("%Y-%m-%d")}'
    machine = f'{os.cpu_count()} cores of {name}, load {load:.0f}; {versions}'
    return f'# {" ".join(chosen)}\n# {machine}\n'


COLUMNS = ('stage', 'wall s', 'CPU s', 'most resident GiB', 'beyond', 'planned GiB', 'difference')


def _parser() -> argparse.ArgumentParser:
    parser = command.parser('machines.true_shapes', __doc__)
    path = pathlib.Path
    parser.add_argument('--policy', type=path, required=True, help='folder of Qwen2.5-0.5B')
    parser.add_argument('--corpus', type=path, required=True, help='JSON lines of passages')
    parser.add_argument('--questions', type=path, required=True, help='JSON lines with answers')
    parser.add_argument('--work', type=path, required=True, help='folder of the run: 8 GB')
    return parser


def main(argv: list[str] | None = None) -> None:
    """Runs everything and writes the table."""
    arguments = _parser().parse_args(argv)
    work = arguments.work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    index = work / 'index'
    if not index.exists():
        words = ['-m', 'zeroplay_jax.retrieval.build', '--encoder', 'lexical']
        words += ['--corpus', str(arguments.corpus), '--out', str(index)]
        Watched(words, work / 'index.log').wait()
    values = (
        SMALLER
        | FURTHER
        | {'compilation.cache': work / 'cache', 'eval.file': arguments.questions.resolve()}
    )
    flags = [
        '--config=configs/drzero.py',
        f'--policy={arguments.policy.resolve()}',
        f'--index={index}',
    ]
    flags += [f'--config.{name}={value}' for name, value in values.items()]
    chosen, plan = planned(flags)
    flags += chosen
    whole = work / 'whole'
    # Of a call that was interrupted.
    shutil.rmtree(whole, ignore_errors=True)
    words = ['-m', 'zeroplay_jax.main', *flags, f'--workdir={whole}']
    samples = Watched(words, work / 'whole.log', whole / 'metrics.jsonl').wait()
    stages = stages_of_run(samples, command.read_lines(whole / 'metrics.jsonl'))
    rows = table(stages, plan, before_weights(samples))
    text = notes(chosen) + command.tab_separated(COLUMNS, rows)
    write_text(work / 'true_shapes.tsv', text)
    print(text, end='')


if __name__ == '__main__':
    with command.one_line_errors('true_shapes'):
        main()
