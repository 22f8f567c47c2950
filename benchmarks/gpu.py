"""Parts of a run at the shapes of Qwen2.5-3B on one GPU: rollouts over slots and pages, update.

    python -m benchmarks.gpu slots      # 128 rollouts of benchmarks/peers/workload.py, workload large
    python -m benchmarks.gpu pages
    python -m benchmarks.gpu update     # 16 rows of 256 tokens, AdamW, all weights trained

Weights are random. Prints a JSON object per measurement; the first call of a program, which compiles, is not timed. The
parts are separate processes, because rollouts and update together need more than 80 GB.

The attention kernel alone is timed from commit 21656cfd. Its tests:
PYTHONPATH=.:tests python -m pytest --noconftest -k gpu tests/policy/test_paged_kernels.py
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable

import jax

from benchmarks import command, rollout
from benchmarks.machines.models import model_config
from benchmarks.peers import workload
from benchmarks.rollout import Engine
from zeroplay_jax.policy import sharding
from zeroplay_jax.policy.transformer import ModelConfig
from zeroplay_jax.rollout.sampler import Sampler
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.rollout.slots import SlotPool
from zeroplay_jax.runtime import devices
from zeroplay_jax.types import UserError


def gpu_model() -> ModelConfig:
    """Returns Qwen2.5-3B: bfloat16, rematerialised layers.

    Raises:
      UserError: there is no GPU.
    """
    # 95 % of the memory instead of XLA's default of 75 %, read when the backend starts.
    os.environ.setdefault('XLA_CLIENT_MEM_FRACTION', '0.95')
    platform = jax.devices()[0].platform
    if platform != 'gpu':
        raise UserError(f'JAX finds no GPU, only {platform}: install jax[cuda13]')
    return model_config('qwen2.5-3b', dtype='bfloat16', remat=True, logit_chunk=512)


def seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Returns the wall-clock times of `repeats` calls in ascending order, after one call that is not timed."""
    call()
    measured = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        measured.append(round(time.perf_counter() - start, 5))
    return sorted(measured)


def peak_gib() -> float:
    """Returns the most memory that this process has used on the device, in GiB; 0 where the device does not tell."""
    return round(devices.memory().get('memory/peak_gib', 0.0), 1)


class RolloutEngine(Engine):
    """The engine without its learner: bfloat16 weights, slots, scheduler."""

    def __init__(self, model: ModelConfig, rollouts: workload.Rollouts, attention: str):
        self.model = model
        self.rollouts = rollouts
        mesh = sharding.make_mesh()

        def cast(weights):
            return jax.tree.map(lambda x: x.astype(model.dtype), weights)

        weights = jax.jit(cast, donate_argnums=0)(rollout.random_weights(model))
        sampler = Sampler(model, rollout.sampler_config(rollouts, attention), mesh)
        self.scheduler = Scheduler({'policy': SlotPool(sampler, seed=0)})
        view = sharding.sampler_view(weights, mesh)
        self.scheduler.weights.publish('policy', view, 1)


def measure_rollouts(model: ModelConfig, rollouts: workload.Rollouts, attention: str) -> None:
    """Prints the times of a batch of rollouts."""
    engine = RolloutEngine(model, rollouts, attention)
    measured = seconds(engine.rollout, 3)
    figures = {
        'seconds': measured,
        'generated_tokens_per_second': round(rollouts.generated / statistics.median(measured)),
        'peak_gib': peak_gib(),
    }
    print(json.dumps(figures))


def measure_update(model: ModelConfig, rollouts: workload.Rollouts) -> None:
    """Prints the times of an update."""
    engine = Engine(model, rollouts)

    def update() -> None:
        engine.update()
        jax.block_until_ready(engine.learner.sampler_weights(engine.learner.view()))

    measured = seconds(update, 5)
    tokens = workload.TRAIN_BATCH * workload.TRAIN_LEN
    figures = {
        'seconds': measured,
        'tokens_per_second': round(tokens / statistics.median(measured)),
        'peak_gib': peak_gib(),
    }
    print(json.dumps(figures))


def main(argv=None) -> None:
    """Measures one part."""
    parser = command.parser('gpu', __doc__)
    parts = ('slots', 'pages', 'update')
    parser.add_argument('part', choices=parts, help='what is measured')
    part = parser.parse_args(argv).part
    # To try out Triton's products for 36 layers takes minutes; cuBLAS computes them instead.
    os.environ.setdefault('XLA_FLAGS', '--xla_gpu_enable_triton_gemm=false')
    with command.one_line_errors('benchmarks.gpu'):
        model = gpu_model()
        if part == 'update':
            measure_update(model, workload.LARGE)
        else:
            attention = {'slots': 'xla', 'pages': 'ragged'}[part]
            measure_rollouts(model, workload.LARGE, attention)


if __name__ == '__main__':
    main()
