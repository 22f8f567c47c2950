"""A run on a machine: its programs from shapes, the slots and rows that fit, and the memory of a chip.

A run trains whole weights of a model, or adapters: those of a paper's config, or of a model with the settings of one.
No array is materialised, as in `tpu_programs`: the learner, the sampler's programs and the stacking of adapters are
those of a run; here are only the shapes of their arguments. Memory counts every array that is on a chip while a program
runs, except those that `settle` moves to the host.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks import command, tpu_programs, tpu_shapes
from benchmarks.aot_machines import Machine
from benchmarks.tpu_programs import OutOfMemory, bytes_per_chip
from zeroplay_jax.configuration.fields import frozen
from zeroplay_jax.extras.plan.machines import GIB
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.learner.weights_view import FrozenBase
from zeroplay_jax.policy import adapters, sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.rollout import sampler
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.selfplay.recipe import trained_roles, weights_of_roles
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.training.build import versions_in_use

# A row of the compile table.
Row: TypeAlias = dict[str, Any]

RESULTS = command.RESULTS / 'aot.json'


class Case:
    """A run on a machine, each of whose programs is compiled once.

    Args:
      title: name of the run in the tables.
      machine: where.

    Attributes:
      offload: 'rollout' and 'update' → names of arrays that are moved off the chip when memory is short, in this order.
    """

    offload: Mapping[str, tuple[str, ...]]

    def __init__(self, title: str, machine: Machine):
        self.title = title
        self.machine = machine

    def fitted(self, key: tuple, lowered: Any, beside: dict[str, int], kind: str) -> Row:
        """Returns and logs the columns of a program: memory, what leaves the chip (`settle`) or why it fails.

        Args:
          key: what identifies the program, for the log.
          lowered: the traced program.
          beside: bytes of all other arrays on the chip, by name.
          kind: 'rollout' or 'update'.
        """
        try:
            program = self.machine.compile(lowered)
        except OutOfMemory as error:
            columns: Row = dict(fits=False, hbm_bytes=0, offloaded=[], error=str(error))
        else:
            columns = dict(arguments=program.arguments, temporaries=program.temporaries)
            order = self.offload[kind]
            columns |= settle(program.peak, beside, order, self.machine.memory)
        tpu_programs.log(self.title, *key, columns)
        return columns

    def sampler_rows(
        self, programs: dict[str, jax.stages.Lowered], slots: int, beside: dict[str, int]
    ) -> list[Row]:
        """Returns the rows of a sampler's programs, up to the first that does not fit.

        Args:
          programs: traced, by name.
          slots: of the host.
          beside: see `fitted`.
        """
        rows = []
        for program, lowered in programs.items():
            key = (self.machine.host, f'{slots} slots', program)
            columns = self.fitted(key, lowered, beside, 'rollout')
            rows.append(dict(program=program, slots=slots, **columns))
            if not columns['fits']:
                break
        return rows


def settle(
    peak: int, beside: dict[str, int], order: Sequence[str], memory: float
) -> dict[str, Any]:
    """Chooses the arrays to offload so that a program fits: the first entries of `order`, as few as possible.

    Args:
      peak: bytes of the program.
      beside: bytes of all other arrays on the chip, by name.
      order: names in the order in which they are offloaded.
      memory: bytes of the chip.

    Returns:
      {'fits', 'hbm_bytes': total on the chip, 'offloaded': offloaded names that had any bytes}.
    """
    for count in range(len(order) + 1):
        offloaded = [name for name in order[:count] if beside.get(name)]
        total = peak + sum(beside.values()) - sum(beside[name] for name in offloaded)
        if total <= memory:
            break
    return dict(fits=total <= memory, hbm_bytes=int(total), offloaded=offloaded)


def update_columns(parts: dict[str, Row], totals: list[int]) -> Row:
    """Returns the columns of an update from those of its two programs and their totals on the chip.

    An array that is offloaded for one program is off the chip for both.
    """
    errors = [part['error'] for part in parts.values() if 'error' in part]
    columns: Row = dict(error=errors[0]) if errors else {}
    columns['fits'] = all(part['fits'] for part in parts.values())
    columns['hbm_bytes'] = 0 if errors else max(totals)
    columns['offloaded'] = max((part['offloaded'] for part in parts.values()), key=len)
    for name in ('arguments', 'temporaries'):
        columns[name] = max(part.get(name, 0) for part in parts.values())
    return columns


# ---- whole weights --------------------------------------------------------------------------------------------------


# Rows per data shard of a micro-batch, in the order in which they are tried.
ROWS = {'v5e': (1,), 'v6e': (2, 1), 'v5p': (2, 1)}
# Slots of a host, in the order in which they are tried. FEW_SLOTS are tried only if 64 do not fit.
ENOUGH_SLOTS = (256, 128, 64)
FEW_SLOTS = (32, 16, 8, 4)
OTHER_ROLE = "other role's masters and moments"
OTHER_VIEW = "other role's view"
# Reserved for temporaries when slots are chosen before anything is compiled.
WHOLE_HEADROOM = 1.25 * GIB


class WholeCase(Case):
    """A model on a slice: two trained roles with weights of their own, a reference and a teacher."""

    offload = {
        'rollout': (OTHER_ROLE, 'reference', 'teacher', 'moments', 'masters'),
        # Slots are empty during an update and freed.
        'update': (OTHER_ROLE, 'reference', 'teacher', 'slots', OTHER_VIEW, 'view', 'moments'),
    }

    def __init__(self, name: str, machine: Machine):
        super().__init__(name, machine)
        self.name = name
        self.mesh = tpu_programs.mesh_of(name, machine.name)
        self.host = tpu_programs.host_mesh(name, machine.name)
        self.shards = self.mesh.shape['replica'] * self.mesh.shape['fsdp']
        state = tpu_programs.learner(name, self.mesh, self.shards).state
        masters, moments = bytes_per_chip(state['params']), bytes_per_chip(state['opt'])
        view = bytes_per_chip(tpu_programs.published(name, self.host))
        self.state = {OTHER_ROLE: masters + moments, 'reference': masters, 'teacher': masters}
        self.own_state = {'moments': moments, 'masters': masters}
        self.views = {'view': view, OTHER_VIEW: view}

    def slot_bytes(self, slots: int) -> int:
        """Returns the bytes per chip of one role's slots."""
        _, shapes = tpu_programs.slots(self.name, self.host, slots)
        return bytes_per_chip(shapes)

    def slot_counts(self) -> list[int]:
        """Returns the slot counts to try: the largest that fit, with the least offloading that makes 64 fit."""
        memory = self.machine.memory - WHOLE_HEADROOM
        views = sum(self.views.values())
        need = {}
        for slots in (*ENOUGH_SLOTS, *FEW_SLOTS):
            need[slots] = 2 * self.slot_bytes(slots) + views
        state = self.state | self.own_state
        order = self.offload['rollout']
        for count in range(len(order) + 1):
            on_chip = sum(size for name, size in state.items() if name not in order[:count])
            fitting = [slots for slots in ENOUGH_SLOTS if need[slots] + on_chip <= memory]
            if fitting:
                return [*fitting, *FEW_SLOTS]
        few_fitting = [slots for slots in FEW_SLOTS if need[slots] <= memory]
        return few_fitting or [FEW_SLOTS[-1]]

    def rollout(self) -> list[Row]:
        """Returns the rows of 'extend' and 'decode', with the most slots that fit."""
        rows: list[Row] = []
        for slots in self.slot_counts():
            # The program's own arguments, this role's view and slots, count in its peak.
            beside = self.state | self.own_state | {OTHER_VIEW: self.views['view']}
            beside["other role's slots"] = self.slot_bytes(slots)
            programs = tpu_programs.lower_sampler(self.name, self.host, slots)
            rows = self.sampler_rows(programs, slots, beside)
            if all(row['fits'] for row in rows):
                break
        return rows

    def update(self, slots: int) -> Row:
        """Returns the row of 'update', with the most rows per micro-batch that fit beside the slots of a role."""
        beside = self.state | self.views | {'slots': 2 * self.slot_bytes(slots)}
        # The moments are an argument of 'apply'.
        with_moments = beside | {'moments': self.own_state['moments']}
        row: Row = {}
        for rows_per_shard in ROWS[tpu_shapes.generation(self.machine.name)]:
            rows = rows_per_shard * self.shards
            lowered = tpu_programs.learner(self.name, self.mesh, rows).lower('solver')
            parts = {}
            for part, arrays in {'accumulate': with_moments, 'apply': beside}.items():
                key = (self.machine.name, f'{rows} rows', part)
                parts[part] = self.fitted(key, lowered[part], arrays, 'update')
                if not parts[part]['fits']:
                    break
            totals = []
            offloaded = max((part['offloaded'] for part in parts.values()), key=len)
            for columns in parts.values():
                further = set(offloaded) - set(columns['offloaded'])
                moved = sum(beside.get(name, 0) for name in further)
                totals.append(columns['hbm_bytes'] - moved)
            row = dict(program='update', micro_rows=rows) | update_columns(parts, totals)
            if row['fits']:
                break
        return row

    def rows_of_all(self) -> list[Row]:
        """Returns all rows of the case."""
        rollout = self.rollout()
        identity = identity_of(self.name, self.machine, 0)
        sizes = dict(context=tpu_programs.TOKENS, row_tokens=tpu_programs.TOKENS)
        case = identity | dict(model=self.name, mesh=dict(self.mesh.shape)) | sizes
        return [case | row for row in (*rollout, self.update(rollout[-1]['slots']))]


# ---- runs with adapters ---------------------------------------------------------------------------------------------


# Config → model of its `policy.path`.
CONFIGS = {
    'drzero': 'qwen2.5-3b',
    'piplay': 'qwen3-4b',
    'ssp': 'qwen2.5-7b',
    'dspo': 'qwen2.5-7b',
    'scope': 'qwen2.5-7b',
}
# Added to the name of a run without `policy.scan`.
UNROLLED = ', unrolled'
# The config that gives a model without one its settings: two trained roles with weights of their own and a teacher,
# rollouts and rows of 4,096 tokens, teacher rows of 8,192.
MODEL_CONFIG = 'piplay'
# Fields of config.policy that change a program.
_COMPUTATION_FIELDS = ('dtype', 'remat', 'remat_policy', 'logits', 'logit_chunk')
_SAMPLER_FIELDS = ('context', 'chunk', 'fill_rows', 'burst')


def config_of(name: str, rank: int) -> Config:
    """Returns the config of a run with adapters: that of a config ('drzero'), or of a model ('qwen2.5-7b')."""
    config_name = name if name in CONFIGS else MODEL_CONFIG
    config = importlib.import_module(f'zeroplay_jax.configs.{config_name}').get_config()
    config.policy.adapters.rank = rank
    if tpu_programs.sized(CONFIGS.get(name, name)).experts:
        config.policy.adapters.linears = ('q', 'k', 'v', 'o')
    return frozen(config)


def title_of(name: str, scan: bool = True) -> str:
    """Returns the name of a run in the tables."""
    title = f'configs/{name}.py' if name in CONFIGS else name
    return title if scan else title + UNROLLED


def adapter_mesh(model: ModelConfig, devices: list, per_host: int) -> Mesh:
    """Returns the mesh of a run with adapters: 'model' as in `tpu_programs`, all other devices on 'replica'.

    The base is whole in every replica. With 'fsdp' in place of 'replica' a run would hold a second copy of it, whole on
    every data shard, for the samplers.

    Args:
      model: its key/value heads and vocabulary limit 'model'.
      devices: all of them, sorted by host.
      per_host: devices of a host.
    """
    split = tpu_programs.split_of(model, per_host)
    return sharding.make_mesh(len(devices) // split, 1, split, devices=devices)


# Slots of a host in the one pool of all roles, in the order in which they are tried.
SLOTS = (512, 384, 320, 256, 192, 160, 128, 96, 80, 64, 48, 32, 24, 16, 8, 4)
# Reserved for temporaries when the first number of slots is chosen.
HEADROOM = 0.6 * GIB
# Arrays that are moved off the chip when memory is short, in this order. Slots are empty during an update and freed.
OFFLOAD = {
    'rollout': ('moments', 'teacher', 'masters'),
    'update': ('slots', 'other masters and moments', 'teacher'),
}


class AdapterCase(Case):
    """The arrays and programs of a run with adapters on a machine.

    Args:
      name: of a config or a model.
      rank: of the adapters.
      machine: where.
      scan: `policy.scan`.
      layers: layers of the model that are kept; 0: all.

    Attributes:
      model_name: key of `tpu_shapes.MODELS`.
      config: of the run.
      weights: trained role → name of its weights.
      places: adapters side by side in the pool of rollouts.
    """

    offload = OFFLOAD

    def __init__(self, name: str, rank: int, machine: Machine, scan: bool = True, layers: int = 0):
        super().__init__(title_of(name, scan), machine)
        self.rank = rank
        self.scan = scan
        self.model_name = CONFIGS.get(name, name)
        self.config = config_of(name, rank)
        self.weights = weights_of_roles(self.config)
        self.places = sum(versions_in_use(self.config, self.weights).values())
        fields: dict[str, Any] = {field: self.config.policy[field] for field in _COMPUTATION_FIELDS}
        self.model = tpu_programs.sized(self.model_name, layers, **fields)
        per_host = len(machine.host_devices)
        self.mesh = adapter_mesh(self.model, machine.devices, per_host)
        self.sampler_mesh = adapter_mesh(self.model, machine.host_devices, per_host)
        published = functools.partial(transformer.published, self.model)
        self._base = jax.eval_shape(published, tpu_programs.parameters(self.model))
        linears = self.config.policy.adapters.linears
        self._adapter = jax.eval_shape(lambda: adapters.init(self._base, linears, rank, 0, ''))
        # One row of a micro-batch for every data shard.
        self.rows = self.mesh.shape['replica'] * self.mesh.shape['fsdp']
        self.learners = self._learners()

    def _learners(self) -> dict[str, Learner]:
        """Returns name of weights → learner, with micro-batches of `rows` rows."""
        config = self.config
        # One device needs no layout constraints, as in `build.build_learners`.
        model = dataclasses.replace(
            self.model,
            attention=self.machine.attention,
            scan=self.scan,
            mesh=self.mesh if self.mesh.size > 1 else None,
        )
        roles_of_weights: dict[str, dict[str, Any]] = {}
        for role, weights in self.weights.items():
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

    def roles_of_programs(self) -> dict[str, str]:
        """Returns 'update' and 'teacher' → a role with this program; a role that distils has the second one."""
        roles = {}
        for role in trained_roles(self.config):
            distils = self.config[role].distill_top_k > 0
            roles['teacher' if distils else 'update'] = role
        return roles

    def base(self) -> FrozenBase:
        """Returns the base with the layout of the learners."""
        scale = jax.ShapeDtypeStruct((1,), jnp.float32)
        params = self._base | {adapters.SCALE: scale}
        shardings = sharding.parameter_shardings(params, self.mesh)
        settings = self.config.policy.adapters
        return FrozenBase(
            tpu_programs.with_shardings(params, shardings),
            self.mesh,
            weight_decay=settings.weight_decay,
        )

    def sampler_adapters(self) -> tuple[Params, Params]:
        """Returns one adapter and all adapters side by side, as a pool of rollouts holds them."""
        published = functools.partial(transformer.published, self.model)
        single = jax.eval_shape(published, self._adapter)
        stacked = jax.eval_shape(adapters.stack, [single] * self.places)
        return self._of_sampler(single), self._of_sampler(stacked)

    def sampler_params(self) -> Params:
        """Returns the weights that the sampler's programs read: the base with all adapters."""
        scale = jax.ShapeDtypeStruct((self.places,), jnp.float32)
        base = self._of_sampler(self._base | {adapters.SCALE: scale})
        _, stacked = self.sampler_adapters()
        return adapters.join(base, stacked)

    def _of_sampler(self, params: Params) -> Params:
        shardings = sharding.sampler_shardings(params, self.sampler_mesh)
        return tpu_programs.with_shardings(params, shardings)

    def slots(self, count: int) -> tuple[dict, Any]:
        """Returns (programs, shapes of the slots) of a sampler with `count` slots on its host."""
        settings = {name: self.config.sampler[name] for name in _SAMPLER_FIELDS}
        config = sampler.SamplerConfig(**settings, slots=count, eos=(0, 1))
        return tpu_programs.slot_state(self.model, config, self.sampler_mesh)

    def lower_sampler(self, count: int) -> dict[str, jax.stages.Lowered]:
        """Returns the traced programs 'extend' and 'decode', whose rows use different adapters."""
        programs, state = self.slots(count)
        params = self.sampler_params()
        adapter = np.zeros(count, np.int32)
        fill_rows = np.zeros(self.config.sampler.fill_rows, np.int32)
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
        views = self.places * bytes_per_chip(single) + bytes_per_chip(stacked)
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
            rows = self._pool_rows(slots, sizes)
            if all(row['fits'] and not row['offloaded'] for row in rows):
                break
            # The temporaries of this number of slots are no less than those of a smaller number by more than in
            # proportion, so the next number that is tried leaves room for their share.
            temporaries = max(row.get('temporaries', 0) for row in rows)
            headroom = max(headroom, temporaries / 2)
        return rows

    def _pool_rows(self, slots: int, sizes: dict[str, int]) -> list[Row]:
        # The base and the adapters side by side are arguments of the programs, like the slots.
        beside = {name: size for name, size in sizes.items() if name != 'base'}
        _, stacked = self.sampler_adapters()
        beside['adapters of the sampler'] -= bytes_per_chip(stacked)
        programs = self.lower_sampler(slots)
        return self.sampler_rows(programs, slots, beside)

    def updates(self, slots: int) -> list[Row]:
        """Returns the rows of 'update' and, where a role distils, 'teacher'.

        Args:
          slots: of the pool, from `rollout`.
        """
        rows = []
        for program, role in self.roles_of_programs().items():
            weights = self.weights[role]
            lowered = self.learners[weights].lower(role)
            sizes = self.resident(weights) | {'slots': self.slot_bytes(slots)}
            parts = {}
            for part, names in self._arguments(program).items():
                beside = {name: size for name, size in sizes.items() if name not in names}
                key = (self.machine.name, f'{self.rows} rows', role, part)
                parts[part] = self.fitted(key, lowered[part], beside, 'update')
            columns = update_columns(parts, [part['hbm_bytes'] for part in parts.values()])
            rows.append(dict(program=program, role=role, micro_rows=self.rows) | columns)
        return rows

    def _arguments(self, program: str) -> dict[str, list[str]]:
        """Returns, by part of an update, the names in `resident` of its arguments, which count in its peak already."""
        accumulate = ['base']
        # Otherwise a micro-batch reads a copy, which is an argument beside the masters.
        if self.config.micro.weights == 'masters':
            accumulate.append('masters')
        if program == 'teacher':
            accumulate.append('teacher')
        apply = ['masters']
        # With shared weights every role has moments of its own, and only one of them is an argument. All are counted
        # then, and those of the argument twice.
        if len(self.weights) == len(set(self.weights.values())):
            apply.append('moments')
        return dict(accumulate=accumulate, apply=apply)

    def rows_of_all(self) -> list[Row]:
        """Returns all rows of the case."""
        rollout = self.rollout()
        rows = rollout + self.updates(rollout[-1]['slots'])
        identity = identity_of(self.title, self.machine, self.rank)
        config = self.config
        sizes = dict(context=config.sampler.context, row_tokens=config.micro.tokens)
        case = identity | dict(model=self.model_name, mesh=dict(self.mesh.shape)) | sizes
        return [case | row for row in rows]


# ---- stored results -------------------------------------------------------------------------------------------------


def identity_of(work: str, machine: Machine, rank: int) -> Row:
    """Returns the columns that identify a case; `rank` is 0 for whole weights."""
    return dict(work=work, machine=machine.name, rank=rank)


def stored_rows() -> list[Row]:
    """Returns the stored rows."""
    return json.loads(RESULTS.read_text())['rows']


def store(rows: list[Row]) -> None:
    """Adds the rows of a case to the stored ones, in place of earlier ones of the same case."""
    case = [rows[0][name] for name in ('work', 'machine', 'rank')]
    others = []
    for row in stored_rows():
        if [row['work'], row['machine'], row['rank']] != case:
            others.append(row)
    # One row per line.
    lines = ',\n'.join(json.dumps(row) for row in others + rows)
    write_text(RESULTS, f'{{"jax": "{jax.__version__}", "rows": [\n{lines}\n]}}\n')


def measure(name: str, machine: Machine, rank: int, again: bool, scan: bool = True) -> list[Row]:
    """Returns the rows of a case, from the stored results or compiled now.

    Args:
      name: of a model or, with adapters, of a config.
      machine: where.
      rank: of the adapters; 0: whole weights.
      again: whether stored results are compiled again.
      scan: `policy.scan`.
    """
    identity = identity_of(title_of(name, scan), machine, rank)
    rows = [row for row in stored_rows() if identity.items() <= row.items()]
    if again or not rows:
        case = AdapterCase(name, rank, machine, scan) if rank else WholeCase(name, machine)
        rows = case.rows_of_all()
        store(rows)
    return rows
