"""Memory of a run with adapters on a TPU slice: its programs, compiled ahead of time, with the slots and rows that fit.

    python -m benchmarks.machines.aot --run ssp --machine v5e:2x2

A run is a paper's config with its lengths, or a model with the settings of one. No array is materialised, as in
`programs`: the learner, the sampler's programs and the stacking of adapters are those of a run; here are only the
shapes of their arguments. Memory counts every array that is on a chip while a program runs, except those that `settle`
moves to the host.

Results are stored in benchmarks/results/aot.json (columns: benchmarks/README.md) and compiled again only with --again.
Rows of whole weights, of GPUs and without `policy.scan`, and the tables results/aot*.tsv, are from commit 21656cfd.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks import command
from benchmarks.machines import models, programs
from benchmarks.machines.programs import Machine, OutOfMemory, bytes_per_chip
from zeroplay_jax.configuration.fields import frozen
from zeroplay_jax.extras.plan.machines import GIB
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.learner.weights_view import FrozenBase
from zeroplay_jax.policy import adapters, sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.rollout import sampler
from zeroplay_jax.run.build import versions_in_use
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.selfplay.recipe import trained_roles, weights_of_roles
from zeroplay_jax.settings.schema import Config

# A row of the compile table.
Row: TypeAlias = dict[str, Any]

RESULTS = command.RESULTS / 'aot.json'


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


def update_columns(parts: dict[str, Row]) -> Row:
    """Returns the columns of an update from those of its two programs."""
    errors = [part['error'] for part in parts.values() if 'error' in part]
    columns: Row = dict(error=errors[0]) if errors else {}
    columns['fits'] = all(part['fits'] for part in parts.values())
    columns['hbm_bytes'] = 0 if errors else max(part['hbm_bytes'] for part in parts.values())
    columns['offloaded'] = max((part['offloaded'] for part in parts.values()), key=len)
    for name in ('arguments', 'temporaries'):
        columns[name] = max(part.get(name, 0) for part in parts.values())
    return columns


# Config → model of its `policy.path`.
CONFIGS = {
    'drzero': 'qwen2.5-3b',
    'piplay': 'qwen3-4b',
    'ssp': 'qwen2.5-7b',
    'dspo': 'qwen2.5-7b',
    'scope': 'qwen2.5-7b',
}
# Added to the name of a stored run without `policy.scan`.
UNROLLED = ', unrolled'
# The config that gives a model without one its settings: two trained roles with weights of their own and a teacher,
# rollouts and rows of 4,096 tokens, teacher rows of 8,192.
MODEL_CONFIG = 'piplay'
# Fields of config.policy that change a program.
_COMPUTATION_FIELDS = ('dtype', 'remat', 'logits', 'logit_chunk')
_SAMPLER_FIELDS = ('context', 'chunk', 'fill_rows', 'burst')


def config_of(name: str, rank: int) -> Config:
    """Returns the config of a run with adapters: that of a config ('drzero'), or of a model ('qwen2.5-7b')."""
    config_name = name if name in CONFIGS else MODEL_CONFIG
    config = importlib.import_module(f'zeroplay_jax.configs.{config_name}').get_config()
    config.policy.adapters.rank = rank
    if programs.sized(CONFIGS.get(name, name)).experts:
        config.policy.adapters.linears = ('q', 'k', 'v', 'o')
    return frozen(config)


def title_of(name: str) -> str:
    """Returns the name of a run in the tables."""
    return f'configs/{name}.py' if name in CONFIGS else name


def adapter_mesh(model: ModelConfig, devices: list, per_host: int) -> Mesh:
    """Returns the mesh of a run with adapters: 'model' as in `programs`, all other devices on 'replica'.

    The base is whole in every replica. With 'fsdp' in place of 'replica' a run would hold a second copy of it, whole on
    every data shard, for the samplers.

    Args:
      model: its key/value heads and vocabulary limit 'model'.
      devices: all of them, sorted by host.
      per_host: devices of a host.
    """
    split = programs.split_of(model, per_host)
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


class AdapterCase:
    """The arrays and programs of a run with adapters on a machine.

    Args:
      name: of a config or a model.
      rank: of the adapters.
      machine: where.
      layers: layers of the model that are kept; 0: all.

    Attributes:
      model_name: key of `models.MODELS`.
      config: of the run.
      weights: trained role → name of its weights.
      places: adapters side by side in the pool of rollouts.
    """

    def __init__(self, name: str, rank: int, machine: Machine, layers: int = 0):
        self.title = title_of(name)
        self.machine = machine
        self.rank = rank
        self.model_name = CONFIGS.get(name, name)
        self.config = config_of(name, rank)
        self.weights = weights_of_roles(self.config)
        self.places = sum(versions_in_use(self.config, self.weights).values())
        fields: dict[str, Any] = {field: self.config.policy[field] for field in _COMPUTATION_FIELDS}
        self.model = programs.sized(self.model_name, layers, **fields)
        per_host = len(machine.host_devices)
        self.mesh = adapter_mesh(self.model, machine.devices, per_host)
        self.sampler_mesh = adapter_mesh(self.model, machine.host_devices, per_host)
        published = functools.partial(transformer.published, self.model)
        self._base = jax.eval_shape(published, programs.parameters(self.model))
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
            scan=True,
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
        return FrozenBase(
            programs.with_shardings(params, shardings),
            self.mesh,
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
        return programs.with_shardings(params, shardings)

    def slots(self, count: int) -> tuple[dict, Any]:
        """Returns (programs, shapes of the slots) of a sampler with `count` slots on its host."""
        settings = {name: self.config.sampler[name] for name in _SAMPLER_FIELDS}
        config = sampler.SamplerConfig(**settings, slots=count, eos=(0, 1))
        return programs.slot_state(self.model, config, self.sampler_mesh)

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
            columns |= settle(program.peak, beside, OFFLOAD[kind], self.machine.memory)
        programs.log(self.title, *key, columns)
        return columns

    def _pool_rows(self, slots: int, sizes: dict[str, int]) -> list[Row]:
        """Returns the rows of the sampler's programs, up to the first that does not fit."""
        # The base and the adapters side by side are arguments of the programs, like the slots.
        beside = {name: size for name, size in sizes.items() if name != 'base'}
        _, stacked = self.sampler_adapters()
        beside['adapters of the sampler'] -= bytes_per_chip(stacked)
        rows = []
        for program, lowered in self.lower_sampler(slots).items():
            columns = self.fitted((f'{slots} slots', program), lowered, beside, 'rollout')
            rows.append(dict(program=program, slots=slots, **columns))
            if not columns['fits']:
                break
        return rows

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
                key = (f'{self.rows} rows', role, part)
                parts[part] = self.fitted(key, lowered[part], beside, 'update')
            case = dict(program=program, role=role, micro_rows=self.rows)
            rows.append(case | update_columns(parts))
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


def identity_of(work: str, machine: Machine, rank: int) -> Row:
    """Returns the columns that identify a case; `rank` is 0 for whole weights, compiled from commit 21656cfd."""
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


def measure(name: str, machine: Machine, rank: int, again: bool) -> list[Row]:
    """Returns the rows of a case, from the stored results or compiled now.

    Args:
      name: of a model or a config.
      machine: where.
      rank: of the adapters.
      again: whether stored results are compiled again.
    """
    identity = identity_of(title_of(name), machine, rank)
    rows = [row for row in stored_rows() if identity.items() <= row.items()]
    if again or not rows:
        rows = AdapterCase(name, rank, machine).rows_of_all()
        store(rows)
    return rows


def main(argv: list[str] | None = None) -> None:
    """Compiles the programs of a run that are not stored, and prints their rows."""
    parser = command.parser('machines.aot', __doc__)
    parser.add_argument(
        '--run', choices=(*models.MODELS, *CONFIGS), required=True, help='config or model'
    )
    parser.add_argument('--machine', choices=models.SLICES, required=True, help='slice')
    parser.add_argument('--rank', type=int, default=32, help='of the adapters (32)')
    parser.add_argument('--again', action='store_true', help='compile stored results again')
    args = parser.parse_args(argv)
    if args.rank < 1:
        parser.error(f'--rank {args.rank}: give 1 or more')
    with command.one_line_errors('aot'):
        programs.prepare_tpu()
        machine = programs.machine_of(args.machine)
        for row in measure(args.run, machine, args.rank, args.again):
            print(json.dumps(row))


if __name__ == '__main__':
    main()
