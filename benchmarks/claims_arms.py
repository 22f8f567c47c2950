"""Arms, claims and looks of the claims benchmark: benchmarks/claims.toml, and the config of every arm."""

from __future__ import annotations

import importlib
import pathlib
import tomllib
from typing import Any, NamedTuple

from benchmarks import claims_statistics as statistics
from zeroplay_jax.configs import ablations
from zeroplay_jax.configuration import fields
from zeroplay_jax.settings.kinds import PACKAGE

REGISTRATION = pathlib.Path(__file__).with_name('claims.toml')
_CHECKPOINTS = PACKAGE / 'mini'


class Claim(NamedTuple):
    """The claim that arm `better` beats arm `worse`; an entry of `claims` in benchmarks/claims.toml.

    Attributes:
      system: the system of both arms.
      text: the claim in words.
      better, worse: names of arms; worse is '' where a policy is compared with itself before training.
      measure: what decides, a key of `MEASURES`.
      reason: why that measure.
      differs: config fields in which the arms differ, and no others.
      of: 'exact_match' or 'rubrics'.
      selected: whether the setting was chosen in trials that showed this effect. The result then says that the effect
        can be repeated, not how common it is.
      afterwards: whether the claim was registered when its runs had been made for another claim.
      added: whether the claim was registered when the runs of its arm `better`, and the results of other claims, were
        known, but before any run of its arm `worse` with a seed of the claims.
      plays: how many times the claim was played, each time in another setting; a play that was stopped counts. Its
        p-value and its interval are those of the last play, at a level divided by the number of plays. Because it could
        have been decided in any play, the probability of a wrong verdict is at most LEVEL · (1 + 1/2 + … + 1/plays).
    """

    system: str
    text: str
    better: str
    measure: str
    reason: str
    differs: tuple[str, ...]
    worse: str = ''
    of: statistics.Measured = 'exact_match'
    selected: bool = False
    afterwards: bool = False
    added: bool = False
    plays: int = 1


class Look(NamedTuple):
    """A test of the claims that are still open; an entry of `looks` in benchmarks/claims.toml.

    Attributes:
      seeds: seeds per arm, those of earlier looks included.
      share: share of the error probability that this look may spend; those of all looks sum to 1.
    """

    seeds: int
    share: float


class Arm(NamedTuple):
    """An arm: a system with changes.

    Attributes:
      system: its small config is the beginning.
      row: of configs/ablations.py; '' for none.
      settings: further fields.
      start: checkpoint in zeroplay_jax/mini from which it starts; '' for that of the small config.
    """

    system: str
    row: str = ''
    settings: dict[str, Any] = {}
    start: str = ''


def _registered() -> tuple[
    dict[str, dict[str, str]], dict[str, Arm], tuple[Claim, ...], tuple[Look, ...]
]:
    """Returns measures, arms, claims and looks of benchmarks/claims.toml."""
    data = tomllib.loads(REGISTRATION.read_text(encoding='utf-8'))
    arms = {name: Arm(**entry) for name, entry in data['arms'].items()}
    claims = []
    for entry in data['claims']:
        claims.append(Claim(**entry | {'differs': tuple(entry['differs'])}))
    looks = tuple(Look(**entry) for entry in data['looks'])
    return data['measures'], arms, tuple(claims), looks


MEASURES, ARMS, CLAIMS, LOOKS = _registered()


def config_of(arm: str, seed: int):
    """Returns the config of an arm: its system's small variant, the common setting, the row, the arm's settings."""
    system, row, settings, start = ARMS[arm]
    config = importlib.import_module(f'zeroplay_jax.configs.{system}').get_config('mini')
    iterations = 3 if system in ('drzero', 'piplay', 'scope') else 1
    # 12 solver steps in total. SSP's solver learns a second search late, and with some seeds not in 18 steps either.
    steps = 4 if iterations == 3 else 12
    if system == 'ssp':
        steps = 18
    config.schedule.iterations = iterations
    config.world.update(train=(0, 20), evaluation=(0, 6), near_misses=0.5)
    for role in (config.proposer, config.solver):
        role.update(learning_rate=5e-4, minibatches=4, temperature=1.0)
        if role.loss == 'reinforce':
            role.minibatches = 1
    config.solver.update(steps=steps, batch=16, samples=4)
    config.proposer.update(steps=3, batch=32 if system != 'ssp' else 24)
    if system == 'dspo':
        # The filter needs questions whose answers are often all right or all wrong.
        config.schedule.hop_ratio = (0, 0, 1, 1)
    if system == 'scope':
        # At 1.0 a third of the tasks have the rubrics of another entity.
        config.proposer.temperature = 0.6
        # With as many tasks of one step as of two, some seeds forget to search twice.
        config.schedule.hop_ratio = (0, 1, 2)
        # At 5e-4 two of four seeds fell back.
        for role in (config.proposer, config.solver):
            role.learning_rate = 2.5e-4
    if config.solver.loss == 'sequence_pg':
        # A rollout has about 26 tokens. The mean of 26 log ratios has 1/√26 of the deviation of a single one, so the
        # clip range is DAPO's range divided by √26.
        config.solver.update(clip_low=0.04, clip_high=0.055)
    config.pool.update(batch=64, batches=2, samples=1 if system != 'scope' else 2)
    config.ssp.noise = 4
    # Most correct answers to a task have up to 24 tokens.
    config.scope.update(soft_length=24, hard_length=64)
    config.eval.update(every=3, questions=40, hops=(1, 2, 3, 4))
    # The fastest on CPUs: a minibatch fills about four rows, and most of a slot is not used.
    config.micro.rows = 4
    config.sampler.update(slots=64, attention='used')
    config.checkpoint.every = 1000
    config.update_from_flattened_dict(ablations.ROWS[f'{system}/{row}'] if row else {})
    config.update_from_flattened_dict(settings)
    if start:
        config.policy.path = str(_CHECKPOINTS / start)
    elif system != 'scope':
        # The claims were registered with the default policy, whatever the small configs begin with today.
        config.policy.path = ''
    config.seed = seed
    config.progress = False
    config.log_trajectories = 16
    return config


def arm_differences(better: str, worse: str) -> dict[str, tuple[Any, Any]]:
    """Returns field → (value of `better`, value of `worse`) of all config fields in which two arms differ."""
    if not worse:
        return {}
    better_fields = dict(fields.leaves(config_of(better, seed=0)))
    worse_fields = dict(fields.leaves(config_of(worse, seed=0)))
    different = {}
    for name, value in better_fields.items():
        if value != worse_fields[name]:
            different[name] = (value, worse_fields[name])
    return different
