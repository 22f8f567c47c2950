"""Repeats the training of a run with a trainer of its own, in PyTorch, and compares the weights after every step.

    zeroplay train --config=configs/dspo.py:mini --workdir=runs/dspo --config.log.rows='(1,2,3)'
    python -m benchmarks.audit runs/dspo
    python -m benchmarks.audit runs/dspo --wrong denominator
    python -m benchmarks.audit --all runs/audits --out audit.tsv     # plays and audits the runs of audit.toml

The steps in `log.rows` include all updates of a role from the first one on. Nothing of zeroplay_jax is imported:
rollouts and weights are read from rows.jsonl and safetensors, and all else is computed again in float64, the rewards of
the five systems from the texts. Exit status 1 if a reward or an advantage differs, or the weights at the end by more
than 0.0003 of how far they have moved; with a mistake if they do not by 0.003.
"""

import argparse
import json
import pathlib
import subprocess
import sys

import numpy as np
import torch

from benchmarks.audit.replay import TABLE, audit

BAR = 3e-4
_FLAGS = """
    --config.progress=False --config.stop_after_empty_steps=0 --config.eval.questions=1
    --config.log.rows=(0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20)
""".split()


def totals(run: pathlib.Path, mistake: str) -> tuple[int, float, float, float]:
    """Audits a run and prints every step; returns updates, largest errors of rewards and advantages, and the distance.

    Raises:
      ValueError: as of `audit`, or the run has no update to repeat.
    """
    updates, unpaid, rewards, advantages, distances = 0, 0, 0.0, 0.0, {}
    for record in audit(run, mistake):
        print(json.dumps(record), flush=True)
        updates += record['updates']
        unpaid += record['without_advantage']
        # NaN stays: these rewards are not known here, and the table says so.
        rewards = float(np.maximum(rewards, record['rewards']))
        advantages = float(np.maximum(advantages, record['advantages']))
        distances[record['weights']] = record['distance']
    if not updates:
        raise ValueError('the steps of log.rows trained nothing')
    distance = max(distances.values())
    if unpaid and distance > BAR and not mistake:
        print(
            f'{unpaid} of {updates} updates had no advantage other than 0: the gradient of such an update may be '
            'rounding alone, which Adam enlarges, so that the weights differ; a warm-up and larger batches lessen this',
            file=sys.stderr,
        )
    return updates, rewards, advantages, distance


def play(name: str, workdir: pathlib.Path) -> None:
    """Plays a run of audit.toml, or what is left of it."""
    run = TABLE['runs'][name]
    start = ['.venv/bin/python', '-m', 'zeroplay_jax.main']
    if name == 'processes':
        start = ['launch/local_2proc.sh', '--']
    command = [*start, f'--config=configs/{run["config"]}:mini', f'--workdir={workdir}', *_FLAGS]
    subprocess.run([*command, *(f'--config.{field}' for field in run['fields'])], check=True)


def main() -> int:
    """Audits a run, or all; returns the exit status."""
    parser = argparse.ArgumentParser(
        'python -m benchmarks.audit',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('run', type=pathlib.Path, nargs='?', help='workdir')
    parser.add_argument('--wrong', default='', choices=TABLE['mistakes'], help='on purpose')
    parser.add_argument('--all', type=pathlib.Path, metavar='FOLDER', help='of the runs to play')
    parser.add_argument('--out', type=pathlib.Path, help='file of the table (.tsv)')
    options = parser.parse_args()
    if not options.run and not options.all:
        parser.error('name the workdir of a run with log.rows, or --all')
    torch.set_num_threads(1)
    audits = [(options.run, options.wrong)]
    if options.all:
        audits = []
        for name, run in TABLE['runs'].items():
            play(name, options.all / name)
            audits += [(options.all / name, mistake) for mistake in ('', *run['mistakes'])]
    lines, failed = ['run\twrong\tupdates\trewards\tadvantages\tdistance'], False
    for run, mistake in audits:
        try:
            updates, rewards, advantages, distance = totals(run, mistake)
        except (OSError, ValueError) as error:
            parser.error(f'{run} cannot be audited: {error}')
        is_right = not rewards > 1e-9 and not advantages and distance <= BAR
        failed |= distance < 10 * BAR if mistake else not is_right
        errors = f'{rewards:.1e}\t{advantages:.1e}\t{distance:.1e}'
        lines.append(f'{run.name}\t{mistake}\t{updates}\t{errors}')
        print(lines[-1])
    if options.out:
        options.out.write_text('\n'.join(lines) + '\n')
    return int(failed)


if __name__ == '__main__':
    sys.exit(main())
