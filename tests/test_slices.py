"""The simulator of `benchmarks.slices`: what it conserves, what it says, and its stored figures."""

import collections
import dataclasses
import itertools

import pytest

from benchmarks import slices, slices_costs, slices_play, slices_workload, tpu_pages
from benchmarks.slices_costs import Settings
from benchmarks.slices_engines import Engine, Episode, Group
from benchmarks.slices_workload import Part, Workload
from benchmarks.tpu_estimates import Program

SMALL = Workload(groups=8, samples=3)
SETTINGS = {
    'slots': Settings(slots=7, context=4096),
    'pages': Settings(context=4096, token_budget=64, page=16, pages=256, slots=9),
}


def machine(hosts=1):
    return slices_costs.machine_costs('v5e', slices_costs.published_model('qwen2.5-7b'), 4, hosts)


def play(name, hosts, ahead, groups, **changes):
    settings = dataclasses.replace(SETTINGS[name], **changes)
    return slices_play.play(machine(hosts), settings, groups, SMALL, ahead)


def played(name, hosts=1, ahead=0, steps=1):
    """The engines of a play, its groups and the seconds of a step."""
    engines = []

    class Spy(Engine):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.all_ended = collections.Counter()
            engines.append(self)

        def round(self, now):
            seconds = super().round(now)
            self.all_ended.update(self.ended)
            return seconds

    groups = [SMALL.draw(step, step) for step in range(steps)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices_play, 'Engine', Spy)
        seconds = play(name, hosts, ahead, groups)
    return engines, groups, seconds


@pytest.mark.parametrize('name', SETTINGS)
@pytest.mark.parametrize(('hosts', 'ahead', 'steps'), [(1, 0, 1), (3, 0, 2), (2, 1, 4)])
def test_every_token_is_generated_once_and_every_rollout_ends_once(name, hosts, ahead, steps):
    engines, groups, seconds = played(name, hosts, ahead, steps)
    written = sum(slices_workload.tokens(step)[1] for step in groups)
    assert sum(engine.generated for engine in engines) == written
    ended = sum((engine.all_ended for engine in engines), collections.Counter())
    assert ended == {step: 24 for step in range(steps)}
    if name == 'pages':
        assert seconds >= slices_play.bound(machine(hosts), SETTINGS[name], groups, SMALL, ahead)


class TwoSizes:
    """Steps of 4 tokens take 2 seconds and those of 16, which prefill, 5; attention takes none."""

    def mixed(self, tokens, *_):
        return {4: 2.0, 16: 5.0}[int(tokens)]

    def attention(self, *_):
        return 0.0


# Groups of (prompt, turns of every sample), slots, training steps ahead → the bound, by hand.
BOUNDS = [
    # Alone: 5 tokens are prefilled in a large step and sample the first token, two small ones the others.
    ([(5, [[(3, 0)]])], 8, 0, 5 + 2 * 2),
    # A search of one second; the last token of the turn is prefilled with the observation.
    ([(5, [[(3, 6), (2, 0)]])], 8, 0, 5 + 2 * 2 + 1 + 5 + 2),
    # 16 prompts fill 16 large steps.
    ([(16, [[(1, 0)]])] * 16, 8, 0, 16 * 5),
    # Two samples: the prompt is prefilled once, its last token computed twice.
    ([(16, [[(1, 0)]] * 2)], 8, 0, 17 / 16 * 5),
    # 32 tokens in four steps or more: n small and m large ones with n + m = 4 and 4 n + 16 m = 32.
    ([(1, [[(4, 0)]])] * 8, 8, 0, 8 / 3 * 2 + 4 / 3 * 5),
    # A single slot: 32 steps.
    ([(1, [[(4, 0)]])] * 8, 1, 0, 32 * 2),
    # 42 tokens in ten steps: 4 n + 16 m = 42.
    ([(1, [[(10, 0)]])] + [(1, [[(4, 0)]])] * 8, 8, 0, (10 - 1 / 6) * 2 + 1 / 6 * 5),
    # Two periods for the ten steps: 4 n + 16 m = 42, n + m = 42 / 8.
    ([(1, [[(10, 0)]])] + [(1, [[(4, 0)]])] * 8, 8, 1, 3.5 * 2 + 1.75 * 5),
]


@pytest.mark.parametrize(('groups', 'slots', 'ahead', 'seconds'), BOUNDS)
def test_the_bound_of_few_rollouts_is_the_one_by_hand(groups, slots, ahead, seconds):
    settings = Settings(slots=slots, token_budget=16, decode_buckets=(4,), pages=64)
    drawn = []
    for prompt, samples in groups:
        drawn.append(Group(prompt, tuple(Episode(tuple(turns)) for turns in samples)))
    bound = slices_play.bound_seconds(TwoSizes(), settings, drawn, 1.0, ahead)
    assert bound == pytest.approx(seconds)


def test_a_rollout_alone_takes_its_bound():
    """But for the host between two calls."""
    steps = [[Group(250, (Episode(((320, 0),), end_token=True),))]]
    sizes = dict(token_budget=256, decode_buckets=(32,), turn_tokens=512, burst=64)
    seconds = play('pages', 1, 0, steps, **sizes)
    without_host = seconds - 320 / 64 * slices_costs.ROUND_SECONDS
    settings = dataclasses.replace(SETTINGS['pages'], **sizes)
    assert 1 < without_host / slices_play.bound(machine(), settings, steps, SMALL) < 1.01


def test_pages_come_back_and_some_rollouts_are_evicted():
    engines, _, _ = played('pages')
    (engine,) = engines
    (shard,) = engine.pool.placement.shards
    assert len(shard.allocator.free) == SETTINGS['pages'].pages and shard.allocator.promised == 0
    assert engine.pool.placement.stats['evictions'] > 0 and engine.pool.active == 0


def test_a_cache_that_no_rollout_fits_is_refused():
    with pytest.raises(RuntimeError, match='too small'):
        play('pages', 1, 0, [SMALL.draw(0)], pages=3)


@pytest.mark.parametrize('ahead', [0, 1])
def test_a_step_begins_when_the_one_before_the_last_has_ended(ahead):
    begun, ended = {}, collections.defaultdict(float)

    class Spy(Engine):
        def round(self, now):
            for _, _, prefix in self.pool.queue:
                begun.setdefault(prefix.request.version, now)
            seconds = super().round(now)
            for step in self.ended:
                ended[step] = max(ended[step], now + seconds)
            return seconds

    groups = [SMALL.draw(step, step) for step in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices_play, 'Engine', Spy)
        play('slots', 2, ahead, groups)
    for step in range(1 + ahead, 4):
        assert begun[step] >= ended[step - 1 - ahead]
    if ahead:
        assert all(begun[step] < ended[step - 1] for step in range(1, 4))


def test_lengths_of_the_workload_are_those_of_the_measured_one():
    prompts, written, read = slices_workload.tokens(Workload().draw(slices.SEED))
    assert (prompts + written + read) / 1280 == pytest.approx(1487, abs=5)
    assert slices_workload.tokens([Group(10, (Episode(((3, 4), (5, 9))),) * 2)]) == (20, 16, 8)


def test_a_run_takes_the_seconds_of_its_parts():
    part = Part('answers', groups=2, samples=3, trained=True, scored=2.0, repeat=5)
    other = dataclasses.replace(part, trained=False, turns=1, repeat=1)
    costs, settings = machine(hosts=2), SETTINGS['pages']

    def seconds(*parts):
        return slices.run_seconds(costs, settings, SMALL, parts)

    workload = dataclasses.replace(SMALL, groups=2, samples=3)
    steps = [workload.draw(slices.SEED)]
    rollouts = slices_play.play(costs, settings, steps, workload, 0, slices.SEED)
    tokens = 5 * sum(slices_workload.tokens(steps[0]))
    # A scored token takes one of the four passes of a trained one.
    update = 1.5 * tokens / slices_costs.UPDATE_TOKENS / slices_costs.PACKED * costs.update
    exchange = 5 * 6 * slices_costs.EXCHANGE_SECONDS
    assert seconds(part) == pytest.approx(5 * rollouts + update + exchange)
    assert seconds(part, other) == pytest.approx(seconds(part) + seconds(other))


@pytest.mark.parametrize('kind', tpu_pages.SLOTS)
@pytest.mark.parametrize('model', ['qwen2.5-3b', tpu_pages.MODEL, 'qwen3-30b-a3b'])
def test_a_step_of_more_tokens_is_no_faster(kind, model):
    costs = slices_costs.machine_costs(kind, slices_costs.published_model(model), 4, 1)
    seconds = [costs.step(tokens, min(tokens, 256)) for tokens in range(8, 2048, 8)]
    # Between compiled steps their ratio to peak rates is interpolated.
    for fewer, more in itertools.pairwise(seconds):
        assert more > 0.99 * fewer


# The compiler's estimates


HLO = """
%condition (p: (s32[])) -> pred[] {
  %bound = s32[]{:T(128)} constant(5)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}
%body (p: (s32[])) -> (s32[]) {
  %x = f32[8,320]{1,0} fusion(%p), backend_config={"estimated_cycles":"10"}
  ROOT %k = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call"
}
%open (p: (s32[])) -> pred[] {
  ROOT %and = pred[] and(%a, %b)
}
%step (p: (s32[])) -> (s32[]) {
  %cache = bf16[4,320]{1,0} get-tuple-element(%p), index=1
  %y = f32[8]{0} fusion(%cache), backend_config={"estimated_cycles":"100"}
  %z = f32[8]{0} add(%y, %y), backend_config={"estimated_cycles":"7"}
  ROOT %r = f32[8]{0} all-reduce(%z), to_apply=%sum
}
%long (p: ()) -> f32[8] {
  ROOT %b = f32[8]{0} add(%p, %p), backend_config={"estimated_cycles":"3"}
}
%short (p: ()) -> f32[8] {
  ROOT %b = f32[8]{0} add(%p, %p), backend_config={"estimated_cycles":"2"}
}
ENTRY %main (p: (s32[])) -> (s32[]) {
  %a = (s32[]) while(%p), condition=%condition, body=%body
  %b = (s32[]) while(%a), condition=%open, body=%step
  %d = f32[8]{0} conditional(%a, %b, %b), branch_computations={%short, %long}
  ROOT %c = f32[8]{0} add(%b, %b), backend_config={"estimated_cycles":"1000"}
}
"""


def test_estimated_cycles_are_added_up_along_the_control_flow():
    outside, step = Program(HLO).estimate()
    assert (outside.cycles, outside.moved) == (1053, 0)
    # The open loop counts once; the sum of 8 float32 values has no estimate.
    assert (step.cycles, step.moved) == (107, 32)


def test_bundles_of_a_kernel_are_counted_by_the_depth_of_their_loop():
    lines = ['     0   :  { a }', '   0x1 LB: > { b }', '   0x2   : > { c }', '   0x3 LB: >> { d }']
    lines += ['   0x4 LB: >>> { e }', '   0x5   : >>> { f }', '   0x6 PF: > { g }', 'second line }']
    assert tpu_pages.loop_bundles('\n'.join(lines)) == dict(block=2, row=1, grid=3)


# The command


def test_stored_figures_are_those_of_the_code():
    lines = slices.RESULTS.read_text().splitlines()
    assert [line.split('\t')[0] for line in lines[1:]] == list(slices.MACHINES)
    assert '\t'.join(slices.row('v5e:4x4')) in lines
