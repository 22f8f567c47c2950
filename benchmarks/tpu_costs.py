"""Operations and collectives of the programs of a run, from compiled programs of few unrolled layers."""

from __future__ import annotations

from benchmarks import roofline, tpu_programs

# Slots of a host in the programs that are measured.
SLOTS = 64


def costs(name: str) -> dict[str, dict]:
    """Returns the operations and the collectives of one chip, per program and call.

    They are measured on unrolled programs of few layers with dense attention and no inner loop, because
    `cost_analysis` counts the body of a loop once, and extrapolated to all layers. The slice is v5p, whose memory holds
    the dense scores. A call is a micro-batch of one row per data shard, an `extend` of FILL_ROWS × CHUNK tokens, or a
    step of `decode`.

    Args:
      name: the model, a key of `tpu_shapes.MODELS`.

    Returns:
      'update', 'extend' or 'decode' → {'flops': operations of the compiled program, 'least_flops': operations that its
      result needs (`roofline.forward`), 'collectives': kind → bytes}.
    """
    topology = 'v5p:2x2x4'
    mesh = tpu_programs.mesh_of(name, topology)
    host = tpu_programs.host_mesh(name, topology)
    update = [_unrolled_update(name, mesh, layers) for layers in (1, 2)]
    decode = [_unrolled_sampler(name, host, 'decode', layers) for layers in (1, 2)]
    # `extend` computes only keys and values in the last layer. A program of two layers is the smallest with a complete
    # one, and the difference to three layers is the cost of a complete layer.
    extend = [_unrolled_sampler(name, host, 'extend', layers) for layers in (2, 3)]

    model = tpu_programs.sized(name)
    shapes = tpu_programs.parameters(model)
    length = tpu_programs.TOKENS
    chips = host.size
    extend_tokens = tpu_programs.FILL_ROWS * tpu_programs.CHUNK
    update_forward = roofline.forward(model, shapes, length, length, True)
    least_update = roofline.UPDATE_PASSES * update_forward / mesh.shape['model']
    least_extend = roofline.forward(model, shapes, extend_tokens, length, False) / chips
    least_decode = roofline.forward(model, shapes, SLOTS, length, True) / chips
    return dict(
        update=_extrapolated(update, model.layers - 1) | dict(least_flops=least_update),
        extend=_extrapolated(extend, model.layers - 2) | dict(least_flops=least_extend),
        decode=_extrapolated(decode, model.layers - 1) | dict(least_flops=least_decode),
    )


def _unrolled_update(name: str, mesh, layers: int) -> dict:
    """Returns operations and collectives of `accumulate` with one row per data shard."""
    shards = mesh.shape['replica'] * mesh.shape['fsdp']
    learner = tpu_programs.learner(
        name,
        mesh,
        shards,
        layers=layers,
        attention='dense',
        scan=False,
        # One chunk of logits is as long as a chip's row, so that the head has no loop.
        logit_chunk=tpu_programs.TOKENS,
    )
    return _compiled_cost(name, 'update', learner.lower('solver')['accumulate'], layers)


def _unrolled_sampler(name: str, host, program: str, layers: int) -> dict:
    """Returns operations and collectives of 'extend' or 'decode'."""
    lowered = tpu_programs.lower_sampler(name, host, SLOTS, layers)
    return _compiled_cost(name, program, lowered[program], layers)


def _compiled_cost(name: str, program: str, lowered, layers: int) -> dict:
    """Compiles a traced program; returns its operations and the bytes of its collectives."""
    compiled = tpu_programs.compile_program(lowered, plain=True)
    tpu_programs.log(name, program, f'{layers} layers unrolled: {compiled.flops:.3e} operations')
    return dict(flops=compiled.flops, moved=roofline.collectives(compiled.text))


def _extrapolated(pair: list[dict], layers: int) -> dict:
    """Returns the cost of a program with `layers` more layers than the first one.

    Args:
      pair: costs of two programs that differ by one layer.
      layers: further layers.
    """
    first, second = pair

    def extrapolate(cost, cost_with_one_more):
        return cost + (cost_with_one_more - cost) * layers

    collectives = {}
    for kind in sorted({*first['moved'], *second['moved']}):
        size = extrapolate(first['moved'].get(kind, 0), second['moved'].get(kind, 0))
        collectives[kind] = int(size)
    return dict(flops=extrapolate(first['flops'], second['flops']), collectives=collectives)
