"""A run with adapters on a machine: its programs from shapes, the slots that fit, and the memory of a chip.

A run is a config of a paper, or another model with the settings of one. No array is materialised, as in
`tpu_programs`: the learner, the sampler's programs and the stacking of adapters are those of a run; here are only the
shapes of their arguments. Memory counts every array that is on a chip while a program runs, except those that `settle`
moves to the host.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks import command, tpu_programs, tpu_shapes
from benchmarks.tpu_programs import Compiled, Row, bytes_per_chip
from zeroplay_jax.configuration.fields import frozen
from zeroplay_jax.configuration.machines import GIB
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.learner.weights_view import FrozenBase
from zeroplay_jax.policy import adapters, sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.rollout import sampler
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.selfplay.recipe import trained_roles, weights_of_roles
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.training.build import versions_in_use

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
_SLICES_OF_MODELS = ('v5e:2x4', 'v5e:4x4', 'v6e:2x4', 'v5p:2x2x1')
CASES = {
    'qwen2.5-7b': _SLICES_OF_MODELS,
    **dict.fromkeys(CONFIGS, ('v5e:2x2',)),
    'scope': ('v5e:2x2', 'v5e:2x4', 'v5p:2x2x1'),
    **dict.fromkeys(('qwen2.5-3b', 'qwen3-8b', 'llama-3.1-8b'), _SLICES_OF_MODELS),
    **dict.fromkeys(('qwen3-30b-a3b', 'qwen3.5-9b'), ('v5p:2x2x1',)),
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
    config: Config
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
    model = CONFIGS.get(name, name)
    if tpu_programs.sized(model).experts:
        config.policy.adapters.linears = ('q', 'k', 'v', 'o')
    title = name
    if name in CONFIGS:
        title = f'configs/{name}.py'
    if not scan:
        title += UNROLLED
    return Work(title, model, rank, frozen(config), scan=scan)


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
            # As in `adapters.init`.
            if linear not in modules:
                continue
            fan_in, fan_out = modules[linear]['kernel'].shape
            shapes[layer][linear] = {
                adapters.A: jax.ShapeDtypeStruct((fan_in, rank), jnp.float32),
                adapters.B: jax.ShapeDtypeStruct((rank, fan_out), jnp.float32),
            }
    return shapes


# ---- a run on a machine ----------------------------------------------------------------------------------------------


RESULTS = command.RESULTS / 'adapters_aot.json'
# Slots of a host in the one pool of all roles, in the order in which they are tried.
SLOTS = (512, 384, 320, 256, 192, 160, 128, 96, 80, 64, 48, 32, 24, 16, 8, 4)
# Reserved for temporaries when the first number of slots is chosen.
HEADROOM = 0.6 * GIB
# Arrays that are moved off the chip when memory is short, in this order. Slots are empty during an update and freed.
OFFLOAD = {
    'rollout': ('moments', 'teacher', 'masters'),
    'update': ('slots', 'other masters and moments', 'teacher'),
}


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices without the devices.

    Attributes:
      name: 'v5e:4x4', 'h100'.
      host: name of a host, whose sampler's programs are compiled once.
      memory: bytes of a chip that programs may use.
      devices: all of them, sorted by host.
      host_devices: those of one host as a machine of its own, on which its sampler runs.
      attention: of packed rows, 'splash' or 'blocked'.
      compile: compiles a traced program; raises OutOfMemory.
    """

    name: str
    host: str
    memory: float
    devices: list
    host_devices: list
    attention: str
    compile: Callable[[jax.stages.Lowered], Compiled]


def tpu_machine(topology: str) -> Machine:
    """Returns a slice."""
    devices, _ = tpu_programs.slice_devices(topology)
    description = tpu_shapes.ADAPTER_TOPOLOGIES[topology]
    host_devices, _ = tpu_programs.slice_devices(description.host)
    return Machine(
        name=topology,
        host=description.host,
        memory=description.chip.memory,
        devices=devices,
        host_devices=host_devices,
        attention='splash',
        compile=tpu_programs.compile_program,
    )


class AdapterCase:
    """The arrays and programs of a work on a machine.

    Args:
      work: the run.
      machine: where.
    """

    def __init__(self, work: Work, machine: Machine):
        self.work = work
        self.machine = machine
        fields: dict[str, Any] = {name: work.config.policy[name] for name in _COMPUTATION_FIELDS}
        self.model = tpu_programs.sized(work.model, work.layers, **fields)
        per_host = len(machine.host_devices)
        self.mesh = adapter_mesh(self.model, machine.devices, per_host)
        self.sampler_mesh = adapter_mesh(self.model, machine.host_devices, per_host)
        published = functools.partial(transformer.published, self.model)
        self._base = jax.eval_shape(published, tpu_programs.parameters(self.model))
        self._adapter = adapter_shapes(self._base, work.config.policy.adapters.linears, work.rank)
        # One row of a micro-batch for every data shard.
        self.rows = self.mesh.shape['replica'] * self.mesh.shape['fsdp']
        self.learners = self._learners()

    def _learners(self) -> dict[str, Learner]:
        """Returns name of weights → learner, with micro-batches of `rows` rows."""
        config = self.work.config
        # One device needs no layout constraints, as in `build.build_learners`.
        model = dataclasses.replace(
            self.model,
            attention=self.machine.attention,
            scan=self.work.scan,
            mesh=self.mesh if self.mesh.size > 1 else None,
        )
        roles_of_weights: dict[str, dict[str, Any]] = {}
        for role, weights in self.work.weights.items():
            roles_of_weights.setdefault(weights, {})[role] = config[role]
        learners = {}
        for weights, roles in roles_of_weights.items():
            learners[weights] = Learner(
                model,
                self.mesh,
                roles,
                self._adapter,
                (self.rows, config.micro.tokens),
                shared_optimizer=config.shared_optimizer,
                teacher_tokens=config.privileged.tokens,
                weights=config.micro.weights,
                base=self.base(),
            )
        return learners

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

    def resident(self, weights: str = '') -> dict[str, int]:
        """Returns the bytes per chip of the arrays of a run but the slots, by name.

        Args:
          weights: whose learner is updated; the state of the others has a name of its own. '': in rollouts.
        """
        single, stacked = self.sampler_adapters()
        base = bytes_per_chip(self.base().params)
        views = self.work.places * bytes_per_chip(single) + bytes_per_chip(stacked)
        sizes = {'base': base, 'adapters of the sampler': views}
        for name, learner in self.learners.items():
            for part, stored_as in (('params', 'masters'), ('opt', 'moments')):
                key = stored_as if name == weights or not weights else 'other masters and moments'
                size = bytes_per_chip(learner.state[part])
                sizes[key] = sizes.get(key, 0) + size
            if 'teacher' in learner.state:
                sizes['teacher'] = bytes_per_chip(learner.state['teacher'])
        return sizes

    def slot_bytes(self, slots: int) -> int:
        """Returns the bytes per chip of the pool of rollouts."""
        _, state = self.slots(slots)
        return bytes_per_chip(state)

    def rollout(self) -> list[Row]:
        """Returns the rows of 'extend' and 'decode', with the most slots that fit."""
        sizes = self.resident()
        free = self.machine.memory - sum(sizes.values())
        # The slots that are possible with everything on the chip, and failing that with all that can leave it.
        headroom = HEADROOM
        rows: list[Row] = []
        shards = self.sampler_mesh.shape['replica']
        possible_slots = [slots for slots in SLOTS if slots % shards == 0]
        for slots in possible_slots:
            slot_bytes = self.slot_bytes(slots)
            if slot_bytes + headroom > free and slots != possible_slots[-1]:
                continue
            rows = self._sampler_rows(slots, slot_bytes, sizes)
            if all(row['fits'] and not row['offloaded'] for row in rows):
                break
            # The temporaries of this number of slots are no less than those of a smaller number by more than in
            # proportion, so the next number that is tried leaves room for their share.
            temporaries = max(row.get('temporaries', 0) for row in rows)
            headroom = max(headroom, temporaries / 2)
        return rows

    def _sampler_rows(self, slots: int, slot_bytes: int, sizes: dict[str, int]) -> list[Row]:
        # The base and the adapters side by side are arguments of the programs, like the slots.
        beside = {name: size for name, size in sizes.items() if name != 'base'}
        _, stacked = self.sampler_adapters()
        beside['adapters of the sampler'] -= bytes_per_chip(stacked)
        programs = self.lower_sampler(slots)
        return tpu_programs.sampler_rows(
            self._fitted, self.machine.host, programs, slots, slot_bytes, beside
        )

    def updates(self, slots: int) -> list[Row]:
        """Returns the rows of 'update' and, where a role distils, 'teacher'.

        Args:
          slots: of the pool, from `rollout`.
        """
        rows = []
        for program, role in self.work.programs().items():
            weights = self.work.weights[role]
            lowered = self.learners[weights].lower(role)
            sizes = self.resident(weights) | {'slots': self.slot_bytes(slots)}
            parts = {}
            for part, names in self._arguments(program).items():
                beside = {name: size for name, size in sizes.items() if name not in names}
                key = (self.machine.name, f'{self.rows} rows', role, part)
                parts[part] = self._fitted(key, lowered[part], beside, 'update')
            columns = tpu_programs.update_columns(parts, [x['hbm_bytes'] for x in parts.values()])
            rows.append(dict(program=program, role=role, micro_rows=self.rows) | columns)
        return rows

    def _arguments(self, program: str) -> dict[str, list[str]]:
        """Returns, by part of an update, the names in `resident` of its arguments, which count in its peak already."""
        accumulate = ['base']
        # Otherwise a micro-batch reads a copy, which is an argument beside the masters.
        if self.work.config.micro.weights == 'masters':
            accumulate.append('masters')
        if program == 'teacher':
            accumulate.append('teacher')
        apply = ['masters']
        # With shared weights every role has moments of its own, and only one of them is an argument. All are counted
        # then, and those of the argument twice.
        if len(self.work.weights) == len(set(self.work.weights.values())):
            apply.append('moments')
        return dict(accumulate=accumulate, apply=apply)

    def _fitted(self, key: tuple, lowered: Any, beside: dict[str, int], kind: str) -> Row:
        """Returns the columns of a program of the 'rollout' or 'update', see `tpu_programs.fitted`."""
        key = (self.work.name, self.work.rank, *key)
        compile_it = functools.partial(self.machine.compile, lowered)
        return tpu_programs.fitted(key, compile_it, beside, OFFLOAD[kind], self.machine.memory)

    def rows_of_all(self) -> list[Row]:
        """Returns all rows of the case."""
        rollout = self.rollout()
        rows = rollout + self.updates(rollout[-1]['slots'])
        base = bytes_per_chip(self.base().params)
        sampler = self.work.config.sampler
        case = dict(
            work=self.work.name,
            model=self.work.model,
            rank=self.work.rank,
            machine=self.machine.name,
            mesh=dict(self.mesh.shape),
            context=sampler.context,
            row_tokens=self.work.config.micro.tokens,
            base_bytes=base,
        )
        return [case | row for row in rows]


def key(row: Row) -> tuple:
    """Returns what identifies the case of a row."""
    return row['work'], row['machine'], row['rank']


def stored_rows(path: pathlib.Path = RESULTS) -> list[Row]:
    """Returns the stored rows."""
    if not path.exists():
        return []
    return json.loads(path.read_text())['rows']


def store(path: pathlib.Path, rows: list[Row]) -> None:
    """Adds the rows of a case to the stored ones, in place of earlier ones of the same case."""
    replaced = {key(row) for row in rows}
    others = [row for row in stored_rows(path) if key(row) not in replaced]
    path.parent.mkdir(parents=True, exist_ok=True)
    # One row per line.
    lines = ',\n'.join(json.dumps(row) for row in others + rows)
    write_text(path, f'{{"jax": "{jax.__version__}", "rows": [\n{lines}\n]}}\n')


def measure(
    cases: list[tuple[str, Machine]],
    rank: int,
    path: pathlib.Path,
    again: bool,
    scan: bool = True,
) -> list[Row]:
    """Returns the rows of the cases, from the stored results or compiled now.

    Args:
      cases: names of `work_of`, with machines.
      rank: of the adapters.
      path: file of the stored results, which is updated after every case.
      again: whether stored results are compiled again.
      scan: `policy.scan`.
    """
    rows = []
    for name, machine in cases:
        work = work_of(name, rank, scan)
        identity = (work.name, machine.name, rank)
        rows_of_case = [row for row in stored_rows(path) if key(row) == identity]
        if again or not rows_of_case:
            rows_of_case = AdapterCase(work, machine).rows_of_all()
            store(path, rows_of_case)
        rows += rows_of_case
    return rows
