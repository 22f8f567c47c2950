"""Training steps of the miniature with `rollout.ahead`, in this process."""

import itertools
import json

import jax
import numpy as np
from run_files import without_clock

from zeroplay_jax.configs import dspo
from zeroplay_jax.run import build
from zeroplay_jax.selfplay.schedule import all_steps


def make_config(ahead=1, **fields):
    """Questions of the worlds, a filter that needs further rounds, and updates large enough to change samples."""
    config = dspo.get_config('mini')
    config.solver.update(
        steps=4, batch=3, samples=4, minibatches=1, learning_rate=3e-4, fill_rounds=2
    )
    config.solver.update(surplus='drop', old_logp='trainer', tis_cap=2.0, tis_level='sequence')
    config.rollout.ahead = ahead
    config.sampler.slots = 8
    config.progress = False
    for name, value in fields.items():
        section, field = name.split('__')
        config[section][field] = value
    return config


def make_engine(config):
    run = build.build(config, for_training=True)
    return build.build_engine(config, run)


def pairs(engine, first=0):
    steps = all_steps(engine.recipe.phases())
    return itertools.zip_longest(steps[first:], steps[first + 1 :])


def play(engine, first=0, last=None):
    """What each step leaves: metrics without clocks, rows, task log, versions."""
    records = []
    for step, next_step in itertools.islice(pairs(engine, first), 0, last):
        metrics, rows = engine.run_step(step, lambda: None, next_step)
        records.append(record(engine, metrics, rows))
    return records


def record(engine, metrics, rows):
    (kept,) = without_clock([metrics])
    rollouts = []
    for row in rows:
        t = row.trajectory
        rollouts.append((t.identity, t.version, t.tokens.tolist(), t.logp.tolist(), row.reward))
    return dict(metrics=kept, rollouts=rollouts, log=json.dumps(engine.task_log))


def weights(engine):
    learners = engine.learners.items()
    return {name: jax.tree.map(np.array, learner.params) for name, learner in learners}


def same_weights(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
