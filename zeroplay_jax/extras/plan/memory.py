"""Memory of a device in rollouts and in updates, from sizes and settings alone: nothing is compiled or loaded.

Arrays are counted. Temporaries of programs are multiples of the arrays that they are made of, fitted to the programs
that were compiled ahead of time (benchmarks/results); tests/extras/plan/test_plan.py compares the sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from zeroplay_jax.extras.plan.machines import GPUS, Machine
from zeroplay_jax.extras.plan.sizes import Sizes
from zeroplay_jax.selfplay.recipe import INITIAL_WEIGHTS, recipe_class, weights_of_roles
from zeroplay_jax.settings.rollouts import Sampler, SamplerConfig, most_kept


class Roles(NamedTuple):
    """What a run holds of weights.

    Attributes:
      trained: sets of trained weights, value networks included.
      optimizers: sets of moments.
      references, teachers: sets of further float32 weights.
      samplers: sets of weights with a cache of their own.
      rank, places: rank of adapters (0: whole weights), and the adapters that are side by side in rollouts.
      distills: whether an update reads a teacher.
      kept: most ids that a token is drawn from (top_p, top_k of a role); 0: all.
    """

    trained: int
    optimizers: int
    references: int
    teachers: int
    samplers: int
    rank: int = 0
    places: int = 0
    distills: bool = False
    kept: int = 0


def roles_of(config: Any) -> Roles:
    """Returns what the run of a config holds."""
    sets = weights_of_roles(config)
    trained = tuple(sets)
    count = len({*sets.values()})
    values = sum(config[role].baseline == 'value' for role in trained)
    rank = config.policy.adapters.rank
    frozen = {role.weights_from for role in recipe_class(config.recipe).roles(config)}
    if config.judge.kind == 'policy':
        frozen.add(INITIAL_WEIGHTS)
    # With `rollout.ahead` rollouts of two versions are in progress.
    versions = count * (1 + config.rollout.ahead)
    teachers = len({sets[role] for role in trained if config[role].get('distill_top_k')})
    references = len({sets[role] for role in trained if config[role].kl_coef})
    return Roles(
        count + values,
        (count if config.shared_optimizer else len(trained)) + values,
        0 if rank else references,
        teachers,
        1 if rank else versions + len(frozen - {'', *trained}),
        rank,
        versions,
        teachers > 0,
        max((most_kept(config[role].top_p, config[role].top_k) for role in trained), default=0),
    )


# Device and whether the trained weights are adapters → an update's temporaries as multiples of: layers' weights,
# masters, logits, activations, and logits again for a teacher. Fitted by least squares to the compiled updates; whole
# weights on GPUs to one measured update (results/gpu.tsv). The layers' inputs, which remat keeps, come in addition.
_UPDATE = {
    ('tpu', False): (0.43, 1.52, 0.41, 19.2, 5.1),
    ('tpu', True): (2.08, 0.0, 0.0, 10.1, 5.1),
    ('gpu', False): (0.98, 0.43, 1.57, 5.3, 2.2),
    ('gpu', True): (0.98, 0.0, 1.57, 5.3, 2.2),
}
# Device → multiples for a prefill: scores, activations and inputs of a call; and for a decode call: scores, logits.
_ROLLOUT = {'tpu': (2.07, 2.4, 4.05, 5.3, 2.97), 'gpu': (1.36, 0.0, 38.4, 12.4, 0.0)}
# Rows of a prefill call whose scores exist at the same time (policy/attention.py).
_PREFILL_ROWS = 4
# On CPUs, bytes per layer of compiled programs and of what their compiler leaves (benchmarks/results/true_shapes.tsv).
_PROGRAMS = 42 * 2**20
# Float32 scores that dense attention keeps of a layer for the backward pass, as multiples of heads · tokens². Like the
# activations of kept layers they are fitted to updates of Qwen2.5-0.5B that were compiled for a CPU.
_DENSE_SCORES = 3
# Share of a chip by which the sums differ from compiled programs at most.
ERROR = 0.06


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device, by part.

    Attributes:
      fields: name → value of the fields of the config.
      machine: where it runs; its mesh is known.
      roles: what the run holds.
      sampler: shape of the sampler of a data shard.
      one: bytes of one set of 'masters', 'teacher', 'view' (weights of a sampler) and 'cache', and of the 'state' of
        all learners.
      shards, split: parts of rows and slots, and of heads and weights.
      rollouts: while they are in progress.
      batch, step: in the programs of an update, for a micro-batch and the step of the optimiser.
    """

    fields: Mapping[str, Any]
    machine: Machine
    roles: Roles
    sampler: SamplerConfig
    shards: int
    split: int
    one: dict[str, float]
    rollouts: dict[str, float]
    batch: dict[str, float]
    step: dict[str, float]

    @property
    def updates(self) -> dict[str, float]:
        """The larger one of an update's programs."""
        return max(self.batch, self.step, key=_sum)

    @property
    def peak(self) -> float:
        """Most bytes."""
        return max(_sum(self.rollouts), _sum(self.updates))


def _sum(parts: Mapping[str, float]) -> float:
    return sum(parts.values())


def memory_of(sizes: Sizes, roles: Roles, fields: Mapping[str, Any], machine: Machine) -> Memory:
    """Returns the memory of a run with the fields of a config."""
    split, fsdp = fields['mesh.model'], fields['mesh.fsdp']
    shards = fields['mesh.replica'] * fsdp
    item = 2 if fields['policy.dtype'] == 'bfloat16' else 4
    shape = {name: fields[f'sampler.{name}'] for name in Sampler.model_fields}
    sampler = SamplerConfig(**shape).of_shard(shards // machine.hosts)
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    # A row of the activations of a layer that are split over 'model'. Choices of experts lie on all of its devices, and
    # what a gated delta net reads and writes.
    mixer = queries / split
    if sizes.delta_layers:
        mixer = max(mixer, sizes.delta_weights / sizes.hidden_size)
    width = sizes.intermediate_size / split + mixer
    linears, adapted = 7, 2 * queries + 2 * keys + 3 * sizes.intermediate_size
    if sizes.experts:
        width = mixer + sizes.per_token * sizes.expert_size + sizes.shared_size / split
        linears, adapted = 4, 2 * queries + 2 * keys

    def adapter(parts: int) -> float:
        whole = linears * sizes.hidden_size / parts
        return sizes.layers * roles.rank * (whole + adapted / split)

    is_int8 = fields['policy.adapters.quantize'] == 'int8'
    # Gated delta nets are not split over 'model'.
    unsplit = (1 - 1 / split) * sizes.delta_layers * sizes.delta_weights
    layer_weights = sizes.layer_weights / split + unsplit
    weights_held = sizes.weights / split + unsplit
    view = item * weights_held - is_int8 * (item - 1) * layer_weights
    # As policy/sharding.py splits the state: over all shards, or not over replicas.
    parts = fsdp if sizes.hidden_size % shards else shards
    masters = 4 * (adapter(parts) if roles.rank else weights_held / parts)
    # An average of adapters has twice their rank.
    teacher = masters * (2 if roles.rank else 1)
    device = 'gpu' if machine.kind in (*GPUS, 'cpu') else 'tpu'
    # The kernel for TPUs reads whole tiles of heads.
    is_padded = device == 'tpu' and sampler.attention == 'ragged'
    padded = -(-sizes.head_dim // 128) * 128 if is_padded else sizes.head_dim
    attention_layers = sizes.layers - sizes.delta_layers
    place = attention_layers * 2 * sizes.kv_heads * padded * item / split
    cache = sampler.page_count * sampler.page_tokens * place + 4 * sampler.slots * sizes.state
    state = {
        'masters': roles.trained * masters,
        'optimizer': roles.optimizers * 2 * masters,
        'reference, teacher': roles.references * masters + roles.teachers * teacher,
    }
    one = {'masters': masters, 'teacher': teacher, 'view': view, 'cache': cache}
    one['state'] = _sum(state)
    weights = {'weights': roles.samplers * view}
    if roles.rank:
        # Side by side and alone. With 'fsdp' the learners have a copy of the base.
        weights['weights'] = (1 + (fsdp > 1) / fsdp) * view + 2 * item * roles.places * adapter(1)
    caches = {'cache': roles.samplers * cache}
    activations = _rollout(sizes, sampler, device, width, item, split)
    kept = {'kept ids': 4 * sampler.slots * sampler.burst * roles.kept}
    rollouts = weights | caches | {'activations': activations} | kept
    is_cpu = machine.kind == 'cpu'
    temporaries = _update(sizes, roles, fields, device, width, item, masters, layer_weights, is_cpu)
    gradients = {'gradients': masters} | temporaries
    batch = {'masters': masters, 'reference, teacher': roles.distills * teacher}
    step = {'masters': masters, 'optimizer': 2 * masters}
    if not fields['offload']:
        rollouts |= state
        batch = step = state | weights | caches
    elif roles.rank:
        batch, step = batch | weights, step | weights
    elif fields['micro.weights'] == 'published':
        batch |= {'masters': 0, 'weights': view / fsdp}
    step = step | {'gradients': masters}
    batch = batch | gradients
    if machine.kind == 'cpu':
        programs = {'programs': _PROGRAMS * sizes.layers * machine.hosts / machine.devices}
        rollouts, batch, step = rollouts | programs, batch | programs, step | programs
    return Memory(fields, machine, roles, sampler, shards, split, one, rollouts, batch, step)


def _rollout(
    sizes: Sizes, sampler: SamplerConfig, device: str, width: float, item: int, split: int
) -> float:
    """Returns the temporaries of the larger one of a sampler's programs."""
    logits = 4 * sampler.slots * sizes.vocab_size / split
    # Bytes of the scores of one query.
    query = 4 * sizes.heads * sampler.positions / split
    scores, activations, inputs, decode_scores, decode_logits = _ROLLOUT[device]
    if sampler.is_paged:
        step = item * (4 * sizes.hidden_size + 2 * width)
        return 4 * logits + sampler.token_budget * (step + 2 * query * (sampler.attention == 'xla'))
    prefill = scores * _PREFILL_ROWS * sampler.chunk * query
    row = activations * width + inputs * sizes.hidden_size
    prefill += item * sampler.fill_rows * sampler.chunk * row
    # A decode step copies the states of one gated delta net.
    state = 4 * sizes.state / max(sizes.delta_layers, 1)
    return max(prefill, sampler.slots * (decode_scores * query + state) + decode_logits * logits)


def _update(
    sizes: Sizes,
    roles: Roles,
    fields: Mapping[str, Any],
    device: str,
    width: float,
    item: int,
    masters: float,
    layer_weights: float,
    is_cpu: bool,
) -> dict[str, float]:
    """Returns the temporaries of a micro-batch."""
    split, adapts = fields['mesh.model'], roles.rank > 0
    copies, of_masters, logits, of_width, teacher = _UPDATE[device, adapts]
    if fields['micro.weights'] == 'published':
        copies = _UPDATE[device, True][0]
    # A loop over the layers reads a stack of their weights.
    copies *= fields['policy.scan'] or not adapts
    # So does that of a teacher, where XLA does not merge both stacks.
    if is_cpu:
        copies *= 1 + roles.distills
    shards = fields['mesh.replica'] * fields['mesh.fsdp']
    tokens = fields['micro.rows'] / shards * fields['micro.tokens']
    row = sizes.layers * sizes.hidden_size + of_width * width
    # XLA's CPU backend recomputes layers in a loop only.
    recomputes = fields['policy.remat'] and (fields['policy.scan'] or not is_cpu)
    kept_layers = 1 if recomputes else sizes.layers
    if not recomputes:
        row += sizes.layers * (8 * sizes.hidden_size + 6 * width)
    scores = 0.0
    if fields['policy.attention'] == 'dense':
        scores = 4 * tokens * fields['micro.tokens'] * sizes.heads / split
    chunk = min(fields['policy.logit_chunk'], fields['micro.tokens'])
    bytes_per_logit = 4 * (logits + teacher * roles.distills)
    if roles.kept:
        # Whether its id is kept.
        bytes_per_logit += 1
    return {
        'copies of weights': copies * item * layer_weights + of_masters * masters,
        'activations': item * tokens * row + _DENSE_SCORES * kept_layers * scores,
        'head': bytes_per_logit * chunk * sizes.vocab_size / split,
        'kept ids': 4 * tokens * roles.kept,
    }
