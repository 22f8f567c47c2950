"""The programs of a run with adapters, built from shapes: a config of a paper, or another model with its settings.

No array is materialised, as in `tpu_programs`. The learner, the sampler's programs and the stacking of adapters are
those of a run; here are only the shapes of their arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from benchmarks import tpu_programs
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.learner.weights_view import FrozenBase
from zeroplay_jax.policy import adapters, sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.rollout import sampler
from zeroplay_jax.selfplay.recipe import trained_roles
from zeroplay_jax.training.build import versions_in_use, weights_of_roles

# A row of the compile tables.
Row: TypeAlias = dict[str, Any]

# Config → model of its `policy.path`.
CONFIGS = {
    'drzero': 'qwen2.5-3b',
    'piplay': 'qwen3-4b',
    'ssp': 'qwen2.5-7b',
    'dspo': 'qwen2.5-7b',
    'scope': 'qwen2.5-7b',
}
# Added to the name of a work without `policy.scan`.
UNROLLED = ', unrolled'
# The config that gives a model without one its settings: two trained roles with weights of their own and a teacher,
# rollouts and rows of 4,096 tokens, teacher rows of 8,192.
MODEL_CONFIG = 'piplay'
# Runs and slices of `benchmarks.tpu_aot --adapters` without further arguments.
CASES = {
    'qwen2.5-7b': ('v5e:2x4', 'v5e:4x4', 'v6e:2x4', 'v5p:2x2x1'),
    'drzero': ('v5e:2x2',),
    'piplay': ('v5e:2x2',),
    'ssp': ('v5e:2x2',),
    'dspo': ('v5e:2x2',),
    'scope': ('v5e:2x2', 'v5e:2x4', 'v5p:2x2x1'),
    'qwen2.5-3b': ('v5e:2x4', 'v5e:4x4', 'v6e:2x4', 'v5p:2x2x1'),
    'qwen3-8b': ('v5e:2x4', 'v5e:4x4', 'v6e:2x4', 'v5p:2x2x1'),
    'llama-3.1-8b': ('v5e:2x4', 'v5e:4x4', 'v6e:2x4', 'v5p:2x2x1'),
}
# Fields of config.policy that change a program.
_COMPUTATION_FIELDS = ('dtype', 'remat', 'remat_policy', 'logits', 'logit_chunk')
_SAMPLER_FIELDS = ('context', 'chunk', 'fill_rows', 'burst')


@dataclasses.dataclass(frozen=True)
class Work:
    """A run with adapters.

    Attributes:
      name: 'configs/<name>.py', or the model.
      model: key of `tpu_shapes.MODELS` or `tpu_shapes.FURTHER_MODELS`.
      rank: of the adapters.
      config: of the run.
      layers: layers of the model that are kept; 0: all.
      scan: `policy.scan`.
    """

    name: str
    model: str
    rank: int
    config: ConfigDict
    layers: int = 0
    scan: bool = True

    @functools.cached_property
    def weights(self) -> dict[str, str]:
        """Trained role → name of its weights."""
        return weights_of_roles(self.config)

    @property
    def places(self) -> int:
        """Adapters side by side in the pool of rollouts."""
        return sum(versions_in_use(self.config, self.weights).values())

    def programs(self) -> dict[str, str]:
        """Returns 'update' and 'teacher' → a role with this program; a role that distils has the second one."""
        roles = {}
        for role in trained_roles(self.config):
            distils = self.config[role].distill_top_k > 0
            roles['teacher' if distils else 'update'] = role
        return roles


def work_of(name: str, rank: int, scan: bool = True) -> Work:
    """Returns the work of a config ('drzero') or of a model ('qwen2.5-7b').

    Args:
      name: of the config or model.
      rank: of the adapters.
      scan: `policy.scan`; without it the name of the work says so.
    """
    config_name = name if name in CONFIGS else MODEL_CONFIG
    module = importlib.import_module(f'zeroplay_jax.configs.{config_name}')
    config = module.get_config()
    config.policy.adapters.rank = rank
    title = name
    if name in CONFIGS:
        title = f'configs/{name}.py'
    if not scan:
        title += UNROLLED
    return Work(title, CONFIGS.get(name, name), rank, config, scan=scan)


def adapter_mesh(model: ModelConfig, devices: list, per_host: int) -> Mesh:
    """Returns the mesh of a run with adapters: 'model' as in `tpu_programs.mesh_of`, all other devices on 'replica'.

    The base is whole in every replica. With 'fsdp' in place of 'replica' a run would hold a second copy of it, whole on
    every data shard, for the samplers.

    Args:
      model: its key/value heads and vocabulary limit 'model'.
      devices: all of them, sorted by host.
      per_host: devices of a host.
    """
    split = math.gcd(per_host, model.kv_heads, model.vocab_size)
    return sharding.make_mesh(len(devices) // split, 1, split, devices=devices)


def adapter_shapes(base: Params, linears: tuple[str, ...], rank: int) -> Params:
    """Returns the shapes of `adapters.init`."""
    shapes: Params = {}
    for layer, modules in base.items():
        if not layer.startswith('layer_'):
            continue
        shapes[layer] = {}
        for linear in linears:
            fan_in, fan_out = modules[linear]['kernel'].shape
            shapes[layer][linear] = {
                adapters.A: jax.ShapeDtypeStruct((fan_in, rank), jnp.float32),
                adapters.B: jax.ShapeDtypeStruct((rank, fan_out), jnp.float32),
            }
    return shapes


class Shapes:
    """The arrays and programs of a work on a mesh.

    Args:
      work: the run.
      mesh: of the learners.
      sampler_mesh: devices of one host.
      attention: of packed rows, 'splash' or 'blocked'.
    """

    def __init__(self, work: Work, mesh: Mesh, sampler_mesh: Mesh, attention: str):
        self.work = work
        self.mesh = mesh
        self.sampler_mesh = sampler_mesh
        fields: dict[str, Any] = {name: work.config.policy[name] for name in _COMPUTATION_FIELDS}
        self.model = tpu_programs.sized(work.model, work.layers, **fields)
        # One device needs no layout constraints, as in `build.build_learners`.
        self.learner_model = dataclasses.replace(
            self.model,
            attention=attention,
            scan=work.scan,
            mesh=mesh if mesh.size > 1 else None,
        )
        published = functools.partial(transformer.published, self.model)
        self._base = jax.eval_shape(published, tpu_programs.parameters(self.model))
        self._adapter = adapter_shapes(self._base, work.config.policy.adapters.linears, work.rank)

    def base(self) -> FrozenBase:
        """Returns the base with the layout of the learners."""
        scale = jax.ShapeDtypeStruct((1,), jnp.float32)
        params = self._base | {adapters.SCALE: scale}
        shardings = sharding.parameter_shardings(params, self.mesh)
        settings = self.work.config.policy.adapters
        return FrozenBase(
            tpu_programs.with_shardings(params, shardings),
            self.mesh,
            weight_decay=settings.weight_decay,
        )

    def learners(self, rows: int) -> dict[str, Learner]:
        """Returns name of weights → learner, with micro-batches of so many rows."""
        config = self.work.config
        roles_of_weights: dict[str, dict[str, Any]] = {}
        for role, weights in self.work.weights.items():
            roles_of_weights.setdefault(weights, {})[role] = config[role]
        learners = {}
        for weights, roles in roles_of_weights.items():
            learners[weights] = Learner(
                self.learner_model,
                self.mesh,
                roles,
                self._adapter,
                (rows, config.micro.tokens),
                shared_optimizer=config.shared_optimizer,
                teacher_tokens=config.privileged.tokens,
                weights=config.micro.weights,
                base=self.base(),
            )
        return learners

    def sampler_adapters(self) -> tuple[Params, Params]:
        """Returns one adapter and all adapters side by side, as a pool of rollouts holds them."""
        published = functools.partial(transformer.published, self.model)
        single = jax.eval_shape(published, self._adapter)
        stacked = jax.eval_shape(adapters.stack, [single] * self.work.places)
        return self._of_sampler(single), self._of_sampler(stacked)

    def sampler_params(self) -> Params:
        """Returns the weights that the sampler's programs read: the base with all adapters."""
        scale = jax.ShapeDtypeStruct((self.work.places,), jnp.float32)
        base = self._of_sampler(self._base | {adapters.SCALE: scale})
        _, stacked = self.sampler_adapters()
        return adapters.join(base, stacked)

    def _of_sampler(self, params: Params) -> Params:
        shardings = sharding.sampler_shardings(params, self.sampler_mesh)
        return tpu_programs.with_shardings(params, shardings)

    def slots(self, count: int) -> tuple[dict, Any]:
        """Returns (programs, shapes of the slots) of a sampler with `count` slots on its host."""
        settings = {name: self.work.config.sampler[name] for name in _SAMPLER_FIELDS}
        config = sampler.SamplerConfig(**settings, slots=count, eos=(0, 1))
        return tpu_programs.slot_state(self.model, config, self.sampler_mesh)

    def lower_sampler(self, count: int) -> dict[str, jax.stages.Lowered]:
        """Returns the traced programs 'extend' and 'decode', whose rows use different adapters."""
        programs, state = self.slots(count)
        params = self.sampler_params()
        adapter = np.zeros(count, np.int32)
        fill_rows = np.zeros(self.work.config.sampler.fill_rows, np.int32)
        extend = programs['extend'].lower(params, state, fill_rows, adapter)
        decode = programs['decode'].lower(params, state, None, None, None, adapter)
        return dict(extend=extend, decode=decode)
