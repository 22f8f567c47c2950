"""The simulator of a plan's time: what it conserves, and what its steps cost beside the compiled ones."""

import dataclasses

import numpy as np
import pytest

from benchmarks.machines import costs, plan_time
from benchmarks.machines import workload as workloads
from benchmarks.machines.costs import Settings
from benchmarks.machines.engines import Device, Engine, Episode, Group, Tools
from benchmarks.machines.workload import Part, Workload
from zeroplay_jax.extras.plan.planning import SHAPES

pytestmark = pytest.mark.results

SMALL = Workload(groups=8, samples=3)
SETTINGS = {
    'slots': Settings(slots=7, context=4096),
    'pages': Settings(context=4096, token_budget=64, page=16, pages=256, slots=9),
}


def machine(hosts=1):
    return costs.machine_costs('v5e', costs.published_model('qwen2.5-7b'), 4, hosts)


def played(name, hosts=1, **changes):
    """The engines of a play, its groups and its seconds."""
    engines = []

    class Spy(Engine):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            engines.append(self)

    groups = SMALL.draw(0)
    settings = dataclasses.replace(SETTINGS[name], **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_time, 'Engine', Spy)
        seconds = plan_time.play(machine(hosts), settings, groups, SMALL)
    return engines, groups, seconds


@pytest.mark.parametrize('name', SETTINGS)
@pytest.mark.parametrize('hosts', [1, 3])
def test_every_token_is_generated_once_and_every_rollout_ends_once(name, hosts):
    engines, groups, seconds = played(name, hosts)
    assert sum(engine.generated for engine in engines) == workloads.tokens(groups)[1]
    assert len(engines) == hosts and sum(engine.ended for engine in engines) == 24
    # A rollout alone computes a token per step, and the hosts have work of their own.
    longest = max(episode.written for group in groups for episode in group.episodes)
    assert longest * machine().step(1, 1) < seconds < played(name, 1)[2] + 1e-9


def test_a_run_takes_the_seconds_of_its_parts():
    part = Part(groups=2, samples=3, trained=True, scored=2.0, repeat=5)
    other = dataclasses.replace(part, trained=False, turns=1, repeat=1)
    host_costs, settings = machine(hosts=2), SETTINGS['pages']

    def seconds(*parts):
        return plan_time.run_seconds(host_costs, settings, SMALL, parts)

    workload = dataclasses.replace(SMALL, groups=2, samples=3)
    groups = workload.draw(plan_time.SEED)
    rollouts = plan_time.play(host_costs, settings, groups, workload)
    tokens = 5 * sum(workloads.tokens(groups))
    # A scored token takes one of the four passes of a trained one.
    update = 1.5 * tokens / costs.UPDATE_TOKENS / costs.PACKED * host_costs.update
    exchange = 5 * 6 * costs.EXCHANGE_SECONDS
    assert seconds(part) == pytest.approx(5 * rollouts + update + exchange)
    assert seconds(part, other) == pytest.approx(seconds(part) + seconds(other))


MODEL = costs.published_model(costs.MODEL)


@pytest.mark.parametrize('kind', costs.COMPILED_SLOTS)
def test_compiled_steps_take_no_less_than_their_least_time(kind):
    host = costs.machine_costs(kind, MODEL, 4, 1)
    assert set(host.slowdown) == {SHAPES[kind].budget, *SHAPES[kind].buckets}
    for tokens in host.slowdown:
        step = costs.stored()[kind]['steps'][str(tokens)]
        sampled = min(tokens, costs.COMPILED_SLOTS[kind])
        least = max(host.read, tokens * host.token + sampled * host.logits)
        assert host.step(tokens, sampled) == pytest.approx(max(least, step['seconds']))
        assert 0 < host.kernel.seconds(1, sampled, 2 * sampled, 'decode') < 1
    # Elsewhere peak rates: twice the chips take half the time.
    one, two = (costs.machine_costs('h100', MODEL, chips, 1) for chips in (1, 2))
    assert set(one.slowdown.values()) == {1.0}
    assert one.step(8, 8) == pytest.approx(2 * two.step(8, 8))


class CountedCosts:
    """Costs 1 per token of a step's program, and notes the programs."""

    host = 0.0

    def __init__(self):
        self.programs = []

    def mixed(self, tokens, last, fed):
        self.programs.append((tokens, int(np.sum(fed))))
        return float(tokens)


def test_a_step_without_prefill_takes_the_smallest_program_that_suffices():
    settings = Settings(
        slots=6, context=200, page=16, pages=99, token_budget=32, decode_buckets=(2, 4), burst=4
    )
    counted = CountedCosts()
    engine = Engine(Device(settings, counted), Tools(lambda: 1.0, 1))
    episodes = tuple(Episode(((length, 0),), end_token=True) for length in (3, 9, 17, 26, 30))
    engine.add(Group(20, episodes))
    for number in range(60):
        engine.round(float(number))
    assert engine.generated == sum(episode.written for episode in episodes)
    for tokens, fed in counted.programs:
        assert fed <= tokens
        if tokens < 32:
            assert tokens == (2 if fed <= 2 else 4)
    used = [tokens for tokens, _ in counted.programs]
    assert set(used) == {2, 4, 32}
    # Five rows are more than the largest bucket, fewer never take the whole step again.
    assert all(fed >= 5 for tokens, fed in counted.programs if tokens == 32)
