"""A run on one GPU, three times: its speed and memory beside the plan, whether a seed repeats it, kill and resume.

    git show 21656cfd:benchmarks/scripted_policy.py > benchmarks/scripted_policy.py
    python -c "import pathlib; from benchmarks import scripted_policy
    scripted_policy.make(pathlib.Path('own/policy'), pathlib.Path('TOKENIZER'))"
    python -m benchmarks.gpu_run --out runs/gpu --machine h200 --config=configs/drzero.py:small --policy=own/policy \\
        --index=own/index --config.eval.file=own/questions.jsonl --config.inputs.documents=own/documents.jsonl \\
        --config.eval.questions=8 --config.proposer.steps=4 --config.solver.steps=4

The first two commands write a policy whose turns end, with the folder TOKENIZER of Qwen2.5's; docs/texts-to-tpu.md
makes the other inputs. The last one takes the flags of `zeroplay train`, but for --workdir. Its runs are:

- plain: as the flags say;
- repeatable: with XLA_FLAGS=--xla_gpu_deterministic_ops=true;
- killed: the same, ended with kill -9 after the first step that follows a checkpoint, and resumed.

Prints a row per step, and a JSON object: the most memory beside that of a plan for --machine, both in GiB; which runs
were finished; whether the third was killed before its end; and what is not the same, bit for bit, in it and in the
second. A run that takes more than a third of --seconds is ended; steps per role and --config.eval.questions decide how
long it takes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from benchmarks import command, kills
from zeroplay_jax.configuration import command_line, fields
from zeroplay_jax.extras.plan import planning
from zeroplay_jax.extras.plan.machines import GIB, machine
from zeroplay_jax.extras.plan.memory import memory_of, roles_of
from zeroplay_jax.extras.plan.sizes import sizes_of
from zeroplay_jax.types import UserError

DETERMINISTIC = '--xla_gpu_deterministic_ops=true'
COLUMNS = ('run', 'step', 'phase', 'rollouts s', 'tokens/s', 'update s', 'trained tokens/s', 'GiB')


@dataclasses.dataclass
class Training(kills.Run):
    """A run of `zeroplay train` with `flags`; `recipe` is its name in the table.

    Attributes:
      xla: further XLA_FLAGS.
      until: time.monotonic() at which it is ended.
    """

    xla: str = ''
    until: float = 0.0

    def start(self) -> list[subprocess.Popen]:
        """Starts it; its output goes to WORKDIR.0.log."""
        words = [sys.executable, '-m', 'zeroplay_jax.main', *self.flags]
        words.append(f'--workdir={self.workdir}')
        xla = f'{os.environ.get("XLA_FLAGS", "")} {self.xla}'.strip()
        with self.log_path(0).open('a') as log:
            return [
                subprocess.Popen(words, env=os.environ | {'XLA_FLAGS': xla}, stdout=log, stderr=log)
            ]

    def finish(self) -> None:
        """Runs it to its end, or until its time is over.

        Raises:
          UserError: the run failed.
        """
        started = self.start()
        try:
            (status,) = kills.wait(started, max(self.until - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            started[0].kill()
            started[0].wait()
            return
        if status:
            raise UserError(f'{self.log_path(0)}: the run ended with status {status}')

    def kill(self) -> int:
        """Starts it and ends it with kill -9 after the first step that follows a checkpoint; returns logged steps."""
        (process,) = self.start()
        saved = 0
        while process.poll() is None and time.monotonic() < self.until:
            saved = saved or self.checkpoint()
            if saved and self.logged_steps() > saved:
                break
            time.sleep(0.02)
        process.kill()
        process.wait()
        return self.logged_steps()

    @property
    def is_finished(self) -> bool:
        return (self.workdir / 'summary.json').is_file()


def rows_of(run: Training, config: Any) -> list[list[Any]]:
    """Returns the rows of the table of a run."""
    rows = []
    log = run.workdir / 'metrics.jsonl'
    lines = log.read_text().splitlines(keepends=True) if log.is_file() else []
    # Without a line that was being written when the run was killed.
    for record in [json.loads(line) for line in lines if line.endswith('\n')]:
        phase = record['phase']
        row = [run.recipe, record['step'], phase, record.get('seconds/rollout', '')]
        row += [record.get('tokens_per_second', ''), '', '']
        if f'{phase}/gradient_norm' in record:
            row[-2] = record['seconds/update']
            role = config[phase]
            tokens = sum(record[f'{phase}/{part}_tokens'] for part in ('prompt', 'response'))
            # Groups without variance are left out of an update.
            trained = role.batch * role.samples * record[f'{phase}/informative_share']
            row[-1] = trained * tokens / row[-2]
        row.append(record.get('memory/peak_gib', ''))
        rows.append([round(x, 2) if isinstance(x, float) else x for x in row])
    return rows


def equal_steps(one: Training, other: Training) -> int:
    """Returns how many of the first records of two logs are equal."""
    pairs = zip(one.records('metrics.jsonl'), other.records('metrics.jsonl'))
    for number, (record, other_record) in enumerate(pairs):
        if record != other_record:
            return number
    return min(one.logged_steps(), other.logged_steps())


def planned_gib(config: Any, name: str) -> float:
    """Returns the memory that a plan counts for a machine and the fields of a config, in GiB."""
    config = config.copy_and_resolve_references()
    target = machine(name, '--machine')
    planning.fit_to(config, target)
    sizes = sizes_of(planning.policy_of(config))
    memory = memory_of(sizes, roles_of(config), fields.leaves(config), target)
    return round(memory.peak / GIB, 2)


def main(argv: list[str] | None = None) -> None:
    """Makes the runs, prints their rows and what they show."""
    parser = command.parser('gpu_run', __doc__)
    parser.add_argument('--out', required=True, type=pathlib.Path, help='new folder of the runs')
    parser.add_argument('--machine', default='h200', help='as of zeroplay plan (h200)')
    parser.add_argument('--seconds', default=480.0, type=float, help='of everything (480)')
    parser.add_argument('--config', required=True, help='of the run')
    options, words = parser.parse_known_args(argv)
    with command.one_line_errors('benchmarks.gpu_run'):
        config = command_line.load(options.config, words)
        measure(config, options, words)


def measure(config: Any, options: Any, words: list[str]) -> None:
    """Makes the runs of `main`."""
    figures: dict[str, Any] = {'planned_gib': planned_gib(config, options.machine)}
    options.out.mkdir(parents=True)
    flags = [f'--config={options.config}', *words, '--config.progress=False']
    # All starts after the first read what it compiled.
    flags += ['--config.checkpoint.every=1', f'--config.compilation.cache={options.out}/programs']
    print(*COLUMNS, sep='\t')
    runs, peaks = {}, []
    for name, xla in (('plain', ''), ('repeatable', DETERMINISTIC), ('killed', DETERMINISTIC)):
        until = time.monotonic() + options.seconds / 3
        run = Training(name, options.out / name, 1, '', tuple(flags), xla, until)
        if name == 'killed':
            figures['killed after steps'] = run.kill()
            figures['killed'] = not run.is_finished
        run.finish()
        rows = rows_of(run, config)
        if not rows:
            raise UserError(
                f'{run.log_path(0)}: no step ended in {options.seconds / 3:.0f} seconds; raise --seconds'
            )
        for row in rows:
            print(*row, sep='\t', flush=True)
        peaks += [row[-1] for row in rows if row[-1]]
        runs[name] = run
    figures['most_gib'] = max(peaks, default=None)
    figures['finished'] = [name for name, run in runs.items() if run.is_finished]
    figures['equal steps'] = equal_steps(runs['repeatable'], runs['killed'])
    figures['equal steps without the flag'] = equal_steps(runs['plain'], runs['repeatable'])
    if len(figures['finished']) == len(runs):
        figures['differences'] = kills.differences(runs['repeatable'], runs['killed'])
    print(json.dumps(figures))


if __name__ == '__main__':
    main()
