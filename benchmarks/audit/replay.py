"""Repeats every update of a run, and compares weights, losses and gradients with the run's.

The weights are never set to the run's: errors add up from step to step.
"""

import json
import math
import pathlib
import tomllib
from collections.abc import Iterator

import numpy as np

from benchmarks.audit.files import read_lines, read_updates, read_weights
from benchmarks.audit.policy import Policy
from benchmarks.audit.rewards import largest_error
from benchmarks.audit.role import Role

TABLE = tomllib.loads(pathlib.Path(__file__).with_name('audit.toml').read_text())


def audit(run: pathlib.Path, mistake: str = '') -> Iterator[dict]:
    """Repeats all updates in the log of a run; yields a record per role of a step.

    'distance' is that of the weights from the run's, as a share of how far those have moved.

    Args:
      run: workdir of a run with `log.rows`.
      mistake: of audit.toml, made on purpose; '': none.

    Raises:
      ValueError: one line; updates before those in the log are missing, or a setting is not known here.
    """
    config = json.loads((run / 'run.json').read_text())['config']
    if config['shared_optimizer']:
        raise ValueError('shared_optimizer=True: only an optimiser per role can be audited')
    metrics = {line['step']: line for line in read_lines(run / 'metrics.jsonl')}
    policies, roles = {}, {}
    logged = read_updates(run)
    lines: dict[int, list[dict]] = {}
    for line in read_lines(run / 'rows.jsonl'):
        lines.setdefault(line['step'], []).append(line)
    for step, updates in logged.items():
        records: list[dict] = []
        rewards = largest_error(lines[step], config)
        for name, minibatches in updates.items():
            weights = name if config['weights'] == 'separate' else 'policy'
            _check(
                config[name],
                name,
                [metrics[each] for each in metrics.keys() - logged if each < step],
            )
            if name not in roles:
                if weights not in policies:
                    policies[weights] = Policy(run / f'step{step}' / weights)
                settings = _changed(config[name], mistake)
                roles[name] = Role(policies[weights], settings, config['value_network'])
            repeated = roles[name].repeat([*minibatches.values()])
            for key in ('loss', 'gradient_norm'):
                repeated[f'run_{key}'] = metrics[step].get(f'{name}/{key}', math.nan)
            records.append(
                {'step': step, 'role': name, 'weights': weights, 'rewards': rewards, **repeated}
            )
        # Roles may share weights: the run has those after all of them.
        for record in records:
            weights = record['weights']
            after = read_weights(run / f'step{step + 1}' / weights)
            yield record | {'distance': _distance(policies[weights], after)}


def _changed(settings, mistake):
    """Returns the settings of a role with a mistake."""
    changes = dict(TABLE['mistakes'].get(mistake, {}))
    for name, value in changes.items():
        if isinstance(value, dict):
            changes[name] = value.get(settings[name], settings[name])
    return settings | changes


def _distance(policy, after):
    """Returns the distance from the run's weights, the larger one of matrices and of vectors, which are few.

    Raises:
      ValueError: the run has other tensors.
    """
    if after.keys() != policy.trained.keys():
        raise ValueError(f'other tensors: {sorted(after.keys() ^ policy.trained.keys())}')
    squares = {True: np.zeros(2), False: np.zeros(2)}
    for name, tensor in after.items():
        error = policy.trained[name].detach() - tensor
        moved = policy.start[name] - tensor
        squares[tensor.ndim == 1] += [float(each.square().sum()) for each in (error, moved)]
    return max(math.sqrt(error / max(moved, 1e-30)) for error, moved in squares.values())


def _check(settings, role, metrics):
    """Raises ValueError if a role cannot be audited; `metrics`: of the steps before that are not in the log."""
    comparison = f'{settings["baseline"]} {settings["scale"]}'
    for name, values in TABLE['known'].items():
        value = comparison if name == 'comparison' else settings.get(name, values[0])
        if value not in values:
            raise ValueError(f'{role}.{name}={value}: only {values} can be audited')
    missing = [line['step'] for line in metrics if f'{role}/gradient_norm' in line]
    if missing:
        raise ValueError(f'{role} was trained in steps {missing}, which log.rows lacks')
