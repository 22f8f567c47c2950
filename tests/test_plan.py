"""Plans of runs: memory beside the compiled tables, what is chosen and refused, and the flags that are printed."""

import dataclasses
import itertools
import json

import pytest
from python_process import ROOT, run_python

from benchmarks import adapter_cases, adapter_tables, tpu_aot, tpu_shapes
from zeroplay_jax.configuration import check, fields, planning, rules
from zeroplay_jax.configuration.fields import config as packaged_config
from zeroplay_jax.configuration.machines import CHIPS, GIB, GPUS, catalog, machine
from zeroplay_jax.configuration.memory import ERROR, Roles, memory_of, roles_of
from zeroplay_jax.configuration.planning import choose
from zeroplay_jax.policy.sizes import KNOWN, sizes_of
from zeroplay_jax.types import UserError

TYPES = adapter_tables.TYPES | {
    'v5e:8x8': 'v5litepod-64',
    'v5p:2x2x4': 'v5p-32',
    'v6e:4x4': 'v6e-16',
    'h100': 'h100x1',
    'h200': 'h200x1',
}
# What the tables move off a chip → the part of a plan, and its share of it.
WHOLE = {
    "other role's masters and moments": lambda m: 3 * m.one['masters'],
    'reference': lambda m: m.one['masters'],
    'teacher': lambda m: m.one['teacher'],
    'moments': lambda m: 2 * m.one['masters'],
    'masters': lambda m: m.one['masters'],
    'view': lambda m: m.one['view'],
    "other role's view": lambda m: m.one['view'],
    'slots': lambda m: m.roles.samplers * m.one['cache'],
    'other masters and moments': lambda m: 3 * m.one['masters'] * (m.roles.trained - 1),
}


def off_chip(memory, names):
    return sum(WHOLE[name](memory) for name in names)


def cases(rows, *keys):
    """Rows of the same keys."""
    return [list(group) for _, group in itertools.groupby(rows, lambda row: [row[k] for k in keys])]


def planned_memory(row, config, roles, slots, hosts, **values):
    mesh = {f'mesh.{axis}': size for axis, size in row['mesh'].items()}
    machine_name = TYPES[row.get('topology') or row['machine']]
    target = dataclasses.replace(machine(machine_name), hosts=hosts)
    values = {name.replace('__', '.'): value for name, value in values.items()}
    values |= {'sampler.slots': slots, 'micro.rows': row.get('micro_rows', 8), 'offload': False}
    return memory_of(
        sizes_of(row['model']), roles, dict(fields.leaves(config)) | mesh | values, target
    )


def whole_weights():
    """(row, GiB by the compiler, GiB by the plan) of the compile table; rollouts count the larger program."""
    rows = json.loads(tpu_aot.RESULTS.read_text())['rows']
    config = packaged_config('drzero')
    roles = Roles(trained=2, optimizers=2, references=1, teachers=1, samplers=2)
    for case in cases(rows, 'model', 'topology'):
        by_program = {row['program']: row for row in case}
        rollouts = max(
            (by_program[name] for name in ('extend', 'decode')), key=lambda r: r['hbm_bytes']
        )
        for row in (rollouts, by_program['update']):
            hosts = row['mesh']['replica']
            values = dict(policy__attention='splash', policy__scan=True)
            memory = planned_memory(row, config, roles, rollouts['slots'], hosts, **values)
            compiled = row['hbm_bytes']
            if not any('view' in name for name in row['offloaded']):
                # The table's samplers read weights that are split over 'fsdp'; those of a run have them whole.
                compiled += 2 * memory.one['view'] * (1 - 1 / row['mesh']['fsdp'])
            programs = [memory.rollouts] if row is rollouts else [memory.batch, memory.step]
            sums = [sum(parts.values()) for parts in programs]
            yield row, compiled, max(sums) - off_chip(memory, row['offloaded'])


def adapters():
    """The same of runs with adapters."""
    for case in cases(adapter_cases.stored_rows(), 'work', 'machine'):
        work = case[0]['work'].partition(',')[0]
        name = work[8:-3] if work.startswith('configs') else adapter_cases.MODEL_CONFIG
        config = packaged_config(name)
        config.policy.adapters.rank = case[0]['rank']
        slots = case[0]['slots']
        is_gpu = case[0]['machine'] in GPUS
        hosts = 1 if is_gpu else machine(TYPES[case[0]['machine']]).devices // 4
        rollouts = max(case[:2], key=lambda row: row['hbm_bytes'])
        for row in (rollouts, *case[2:]):
            roles = roles_of(config)._replace(distills=row['program'] == 'teacher')
            scan = not case[0]['work'].endswith(adapter_cases.UNROLLED)
            attention = 'blocked' if is_gpu else 'splash'
            values = dict(policy__attention=attention, policy__scan=scan)
            memory = planned_memory(row, config, roles, slots, hosts, **values)
            if row is rollouts:
                yield row, row['hbm_bytes'], sum(memory.rollouts.values())
                continue
            batch, step = (sum(parts.values()) for parts in (memory.batch, memory.step))
            # The table has the same arrays on the chip in the step, as long as they fit.
            for name in row['offloaded']:
                is_over = step > CHIPS[memory.machine.kind].memory
                step -= is_over * off_chip(memory, [name])
            yield row, row['hbm_bytes'], max(step, batch - off_chip(memory, row['offloaded']))


@pytest.mark.parametrize('rows', [whole_weights, adapters])
def test_memory_is_that_of_the_compiled_programs(rows):
    errors = {}
    for row, compiled, planned in rows():
        key = (row['model'], row.get('topology') or row['machine'], row['program'], compiled / GIB)
        errors[key] = planned / compiled - 1
    assert len(errors) >= 40
    assert max(map(abs, errors.values())) < ERROR, max(errors.items(), key=lambda x: abs(x[1]))


CONFIGS = tuple(adapter_cases.CONFIGS)


@pytest.mark.parametrize('name', CONFIGS)
@pytest.mark.parametrize('rank', [0, 32])
def test_what_is_chosen_fits_and_is_accepted_by_a_run(name, rank):
    config = packaged_config(name)
    config.policy.adapters.rank = rank
    fitting = [choice for choice in catalog() if choose(config, choice)]
    assert fitting
    for target in (fitting[0], fitting[-1], machine('2*h100x8')):
        planned = choose(config, target)
        assert planned.peak < CHIPS[target.kind].memory
        chosen = config.copy_and_resolve_references()
        fields.set_fields(chosen, planning.flags_of(config, planned))
        assert dict(fields.leaves(chosen)) == planned.fields
        check.resolve_mesh(chosen, target)
        shards = planned.shards
        rules.check_shards(chosen, shards, shards // target.hosts)
        assert not planning.flags_of(chosen, planned)
        assert choose(chosen, target).fields == planned.fields


def test_adapters_of_every_config_fit_where_they_were_compiled():
    for name in CONFIGS:
        config = packaged_config(name)
        config.policy.adapters.rank = 32
        assert choose(config, machine('v5litepod-4')), name
        assert choose(config, machine('h100x1')), name


def planned(*words):
    return run_python('-m', 'zeroplay_jax.plan', *words, cwd=ROOT)


def test_a_machine_that_is_too_small_is_refused_with_those_that_fit():
    result = planned('--config=configs/ssp.py', '--machine=v5litepod-4')
    assert result.returncode == 2 and not result.stdout and len(result.stderr.splitlines()) == 1
    for text in ('too small', 'cheapest machine that fits', 'policy.adapters.rank=32: v5litepod-4'):
        assert text in result.stderr


def test_the_flags_are_all_of_standard_output():
    # A small step is played fast; the hours are those of the paper's batches.
    result = planned('--config=configs/dspo.py', '--machine=v5p-32', '--config.solver.batch=8')
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    assert all(word.startswith('--config.') for word in line.split())
    for text in ('GiB per device', 'generated tokens/s', 'cheapest'):
        assert text in result.stderr
    assert ' hours for ' not in result.stderr


def test_on_a_cpu_every_core_is_a_device():
    config = packaged_config('drzero', 'mini')
    flags = planning.flags_of(config, choose(config, machine('cpu:2')))
    assert flags == [
        '--config.cpu_devices=2',
        '--config.mesh.replica=2',
        '--config.sampler.attention=used',
    ]


def test_on_a_cpu_a_large_policy_gets_shapes_that_take_little_memory():
    config = packaged_config('drzero')
    flags = planning.flags_of(config, choose(config, machine('cpu:1')))
    for flag in ('dtype=float32', 'attention=blocked', 'scan=True', 'fill_rows=2'):
        assert any(word.endswith(f'.{flag}') for word in flags)


@pytest.mark.parametrize('name', KNOWN)
def test_every_model_is_split_evenly(name):
    config = packaged_config('drzero')
    config.policy.path = name
    # Whole weights of the largest one fit on none of them.
    config.policy.adapters.rank = 32 if KNOWN[name].experts else 0
    for target in ('v5p-16', 'v6e-16', 'h200x8'):
        split = choose(config, machine(target)).split
        assert not KNOWN[name].kv_heads % split and not KNOWN[name].vocab_size % split


@pytest.mark.parametrize('name', KNOWN)
def test_known_sizes_are_those_of_the_config(name, tmp_path):
    assert sizes_of(f'hf://owner/{name.title()}-Instruct') == KNOWN[name]
    stored = (tpu_shapes.MODELS | tpu_shapes.FURTHER_MODELS)[name]
    (tmp_path / 'config.json').write_text(json.dumps(stored))
    assert sizes_of(str(tmp_path)) == KNOWN[name]
    with pytest.raises(UserError, match='neither a folder'):
        sizes_of('hf://owner/another')


def test_a_command_that_takes_too_much_memory_is_a_mistake():
    words = [
        '--config=configs/dspo.py',
        '--workdir=/mnt/run',
        '--check',
        '--nofiles',
        '--on=v5litepod-4',
    ]
    words += ['--config.mesh.fsdp=-1', '--config.micro.rows=4']
    refused = run_python('-m', 'zeroplay_jax.main', *words, cwd=ROOT)
    assert refused.returncode == 2 and 'zeroplay_jax.plan chooses what fits' in refused.stderr


def test_what_shards_do_not_divide_is_whole_on_each():
    config = packaged_config('drzero')
    config.mesh.update(replica=24, fsdp=1, model=1)
    sizes = sizes_of('qwen2.5-3b')
    memory = memory_of(sizes, roles_of(config), dict(fields.leaves(config)), machine('3*h100x8'))
    assert sizes.hidden_size % 24 and memory.one['masters'] == 4 * sizes.weights


def test_a_context_of_a_page_gets_slots():
    config = packaged_config('drzero', 'mini')
    for context, page in ((128, 0), (256, 128)):
        config.sampler.context = context
        assert choose(config, machine('v5p-8')).fields['sampler.page'] == page
