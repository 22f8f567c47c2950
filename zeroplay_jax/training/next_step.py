"""What to do after a run: the command that asks the trained policy a question which training taught it to answer."""

from __future__ import annotations

import json
import pathlib
import shlex
import sys
from collections.abc import Iterable, Iterator

from zeroplay_jax.types import Json


def advice(workdir: pathlib.Path, role: str) -> str:
    """Returns the line about the next step: a command, or why there is no trained policy to ask.

    Args:
      workdir: of a finished run.
      role: the evaluated one.
    """
    policies = workdir / 'policy'
    # Shared weights are not exported under the name of a role.
    policy = next(
        (policies / name for name in (role, 'policy') if (policies / name).is_dir()), None
    )
    if policy is None:
        return f'there is no trained policy to ask: role {role} has the weights of its start'
    question, is_learnt = taught_question(_evaluated(workdir / 'trajectories.jsonl'))
    python = pathlib.Path(sys.executable)
    # A relative path is easier to read if the environment lies in the current folder.
    if python.is_relative_to(pathlib.Path.cwd()):
        python = python.relative_to(pathlib.Path.cwd())
    command = [str(python), '-m', 'zeroplay_jax.ask', '--policy', str(policy)]
    if question:
        command.append(question)
    about = ', which answered this one wrong before' if is_learnt else ''
    return f'ask the trained policy{about}: {shlex.join(command)}'


def taught_question(rows: Iterable[Json]) -> tuple[str, bool]:
    """Returns a question of the logged evaluations, and whether it was answered better after training than before.

    The first one with the greatest gain; without any gain the one with the greatest reward at last; ('', False) if no
    evaluation was logged.

    Args:
      rows: logged rollouts of evaluations.
    """
    rewards: dict[int, dict[str, float]] = {}
    for row in rows:
        question = row['info'].get('question')
        if question and row['reward'] is not None:
            rewards.setdefault(row['step'], {})[question] = row['reward']
    if not rewards:
        return '', False
    before, after = rewards[min(rewards)], rewards[max(rewards)]
    gains = {question: reward - before.get(question, reward) for question, reward in after.items()}
    # `max` takes the first one of equals.
    question = max(after, key=lambda text: (gains[text], after[text]))
    return question, gains[question] > 0


def _evaluated(path: pathlib.Path) -> Iterator[Json]:
    """Yields the logged rollouts of evaluations, one at a time: the file of a long run is large."""
    with path.open(encoding='utf-8') as file:
        for line in file:
            row = json.loads(line)
            if row['phase'] == 'evaluation':
                yield row
