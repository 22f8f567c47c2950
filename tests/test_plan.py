"""Plans of runs: memory beside the compiled tables, what is chosen, applied, kept and refused, and what is printed."""

import ast
import dataclasses
import itertools
import json
import re

import pytest
from python_process import ROOT, config_flags, run_python
from run_files import lines, summary_of
from run_records import stored_config, write_record

from benchmarks.machines import aot, models, plan_time
from zeroplay_jax.configuration import fields, planning, rules
from zeroplay_jax.configuration.fields import config as packaged_config
from zeroplay_jax.configuration.machines import CHIPS, GIB, GPUS, catalog, machine, machine_of
from zeroplay_jax.configuration.memory import ERROR, Roles, memory_of, roles_of
from zeroplay_jax.configuration.planning import (
    PLANNED,
    Kept,
    apply,
    choose,
    given_by_hand,
    keep,
    shrink,
)
from zeroplay_jax.learner.checkpoint import saved_steps
from zeroplay_jax.policy.sizes import KNOWN, sizes_of
from zeroplay_jax.runtime import record
from zeroplay_jax.settings.kinds import ConfigError
from zeroplay_jax.training.policy_settings import settings
from zeroplay_jax.types import UserError

TYPES = {
    'v5e:2x2': 'v5litepod-4',
    'v5e:2x4': 'v5litepod-8',
    'v5e:4x4': 'v5litepod-16',
    'v6e:2x4': 'v6e-8',
    'v5p:2x2x1': 'v5p-8',
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
    machine_name = TYPES[row['machine']]
    target = dataclasses.replace(machine(machine_name), hosts=hosts)
    values = {name.replace('__', '.'): value for name, value in values.items()}
    values |= {'sampler.slots': slots, 'micro.rows': row.get('micro_rows', 8), 'offload': False}
    return memory_of(sizes_of(row['model']), roles, fields.leaves(config) | mesh | values, target)


def whole_weights():
    """(row, GiB by the compiler, GiB by the plan) of the compile table; rollouts count the larger program."""
    rows = [row for row in aot.stored_rows() if not row['rank']]
    config = packaged_config('drzero')
    roles = Roles(trained=2, optimizers=2, references=1, teachers=1, samplers=2)
    for case in cases(rows, 'model', 'machine'):
        by_program = {row['program']: row for row in case}
        rollouts = max(
            (row for row in case if row['program'] != 'update'), key=lambda r: r['hbm_bytes']
        )
        for row in (rollouts, by_program['update']):
            hosts = row['mesh']['replica']
            values = dict(policy__attention='splash', policy__scan=True)
            memory = planned_memory(row, config, roles, rollouts['slots'], hosts, **values)
            programs = [memory.rollouts] if row is rollouts else [memory.batch, memory.step]
            sums = [sum(parts.values()) for parts in programs]
            yield row, row['hbm_bytes'], max(sums) - off_chip(memory, row['offloaded'])


def adapters():
    """The same of runs with adapters."""
    rows = [row for row in aot.stored_rows() if row['rank']]
    for case in cases(rows, 'work', 'machine'):
        work = case[0]['work'].partition(',')[0]
        name = work[8:-3] if work.startswith('configs') else aot.MODEL_CONFIG
        config = packaged_config(name)
        config.policy.adapters.rank = case[0]['rank']
        slots = case[0]['slots']
        is_gpu = case[0]['machine'] in GPUS
        hosts = 1 if is_gpu else machine(TYPES[case[0]['machine']]).devices // 4
        rollouts = max(case[:2], key=lambda row: row['hbm_bytes'])
        for row in (rollouts, *case[2:]):
            roles = roles_of(config)._replace(distills=row['program'] == 'teacher')
            scan = not case[0]['work'].endswith(aot.UNROLLED)
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
        key = (row['model'], row['machine'], row['program'], compiled / GIB)
        errors[key] = planned / compiled - 1
    assert len(errors) >= 40
    # What is above costs slots; what is below costs the run.
    assert -0.05 < min(errors.values()) and max(errors.values()) < 0.08, errors


CONFIGS = tuple(aot.CONFIGS)


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
        assert fields.leaves(chosen) == planned.fields
        planning.resolve_mesh(chosen, target)
        shards = planned.shards
        rules.check_shards(chosen, shards, shards // target.hosts)
        assert not planning.flags_of(chosen, planned)
        assert choose(chosen, target).fields == planned.fields


DEVICES = {
    'v5litepod-4': ('TPU v5 lite', 4, 1),
    'v6e-16': ('TPU v6 lite', 16, 4),
    'v5p-32': ('TPU v5', 16, 4),
    'h100x1': ('NVIDIA H100 80GB HBM3', 1, 1),
    '2*h200x8': ('NVIDIA H200', 16, 2),
    '2*cpu:4': ('cpu', 8, 2),
    '8': ('NVIDIA A100-SXM4-80GB', 8, 1),
}


@pytest.mark.parametrize('name', DEVICES)
def test_the_machine_of_a_run_is_that_of_its_name(name):
    assert machine_of(*DEVICES[name]) == machine(name)


@pytest.mark.parametrize(
    ('name', 'similar'),
    [
        ('h10x1', 'h100x1'),
        ('v5litpod-4', 'v5litepod-4'),
        ('v5e-16', 'v5litepod-16'),
        ('v6e8', 'v6e-8'),
    ],
)
def test_a_misspelt_machine_gets_the_nearest_name(name, similar):
    with pytest.raises(ConfigError, match=f'{name}: no such machine.*; did you mean {similar}'):
        machine(name)


@pytest.mark.parametrize('name', CONFIGS)
@pytest.mark.parametrize('target', ['v5litepod-4', 'v5p-32', 'h100x1'])
def test_every_config_starts_without_a_shape(name, target):
    """With whole weights where they fit, else with adapters, as the line says."""
    config, target = packaged_config(name), machine(target)
    assert not {*PLANNED} & given_by_hand(config) - {'policy.dtype', 'policy.remat'}
    if choose(config, target) is None:
        with pytest.raises(
            ConfigError, match=f'too small.*large enough with .*rank=32: {target.name}'
        ):
            apply(config, target, keep(config, ''))
        config.policy.adapters.rank = 32
    first, second = apply(config, target, keep(config, ''))
    assert first.startswith(f'plan for {target.name} and ') and ' GiB of a device' in second
    assert config.sampler.attention == 'ragged' and config.policy.dtype == 'bfloat16'
    assert choose(config, target).fields == fields.leaves(config)


def test_what_is_set_by_hand_stays():
    config = packaged_config('drzero', changes={'sampler.slots': 64, 'mesh.replica': 4})
    config.mesh.update(fsdp=-1, model=1)
    kept = keep(config, '', ['policy.scan'])
    assert kept.given >= {'sampler.slots', 'policy.scan', 'mesh.model'}
    apply(config, machine('v5p-32'), kept)
    assert config.mesh.to_dict() == {'replica': 4, 'fsdp': 4, 'model': 1}
    assert (config.sampler.slots, config.sampler.pages) == (64, 64 * 4096 // 128)
    assert config.micro.rows == 32 and not config.policy.scan
    config.mesh.update(replica=3, fsdp=1)
    with pytest.raises(ConfigError, match='v5p-32 has 16 on 4 hosts'):
        apply(config, machine('v5p-32'), kept)


def test_on_cpus_and_unknown_devices_nothing_changes():
    config = packaged_config('drzero')
    before = config.to_dict()
    assert not apply(config, machine('cpu:2'), Kept())
    (note,) = apply(config, machine('2*8'), Kept())
    assert 'memory of 2*8 is not known' in note
    config.plan = 'off'
    assert not apply(config, machine('h100x1'), Kept())
    assert config.to_dict() == before | {'plan': 'off'}


def test_a_resumed_run_keeps_its_shapes(tmp_path):
    config, target = packaged_config('drzero'), machine('h100x1')
    apply(config, target, keep(config, ''))
    write_record(tmp_path, config, machine=target.name)
    again = packaged_config('drzero')
    kept = keep(again, tmp_path)
    assert again == config and kept.machine == 'h100x1'
    # On a machine that would get others.
    assert not apply(again, machine('h200x1'), kept) and again == config
    # Asked on any machine.
    asked = settings(tmp_path / 'policy' / 'solver')
    assert asked.sampler == packaged_config('drzero').sampler and asked.policy.dtype == 'bfloat16'
    for other in ('h100x8', 'v5litepod-1', 'cpu:1'):
        with pytest.raises(ConfigError, match=f'planned for h100x1, and this is {other}; resume'):
            apply(again, machine(other), kept)
    with pytest.raises(UserError, match='sampler.slots'):
        changed = packaged_config('drzero', changes={'sampler.slots': 8})
        keep(changed, tmp_path)
        fields.check(tmp_path, changed)
    # The same devices by another name, and by a -1.
    write_record(tmp_path, config, machine='h100x1')
    assert not apply(again, machine('1*h100x1'), kept)
    flags = {'mesh.model': 2, 'mesh.fsdp': -1, 'mesh.replica': 4}
    config, target = packaged_config('drzero', changes=flags), machine('h100x8')
    apply(config, target, keep(config, '', ['mesh.model']))
    assert config.mesh.fsdp == 1
    write_record(tmp_path, config, machine=target.name)
    again = packaged_config('drzero', changes=flags)
    keep(again, tmp_path, ['mesh.model'])
    assert again == config
    # Replicas that the plan chose beside a given size.
    one_axis = {'mesh.model': 2}
    config = packaged_config('drzero', changes=one_axis)
    apply(config, target, keep(config, '', ['mesh.model']))
    write_record(tmp_path, config, machine=target.name)
    again = packaged_config('drzero', changes=one_axis)
    kept = keep(again, tmp_path, ['mesh.model'])
    assert again == config and again.mesh.replica == 4
    assert 'mesh 4 replica · 1 fsdp · 2 model' in shrink(again, target, kept, str(tmp_path))
    # Begun without a plan.
    write_record(tmp_path, packaged_config('drzero', changes={'plan': 'off'}))
    assert keep(again, tmp_path) == Kept() and again.plan == 'off'


def test_too_little_memory_takes_the_next_smaller_choice(tmp_path):
    config, target = packaged_config('drzero'), machine('h100x1')
    kept = keep(config, tmp_path / 'run')
    apply(config, target, kept)
    large = planning.estimate(config, target).peak
    # Of the evaluation before training.
    (tmp_path / 'run/checkpoints/1').mkdir(parents=True)
    line = shrink(config, target, kept, str(tmp_path / 'run'))
    assert line.startswith('h100x1 has too little memory for the plan; the next smaller one: plan')
    again = packaged_config('drzero')
    assert keep(again, tmp_path / 'run').machine == 'h100x1' and again == config
    assert planning.estimate(again, target).peak < (1 - ERROR) * large
    assert stored_config(tmp_path / 'run')['sampler']['pages'] == config.sampler.pages
    assert not shrink(config, machine('cpu:1'), kept, str(tmp_path / 'run'))
    (tmp_path / 'run/checkpoints/2').mkdir(parents=True)
    assert not shrink(config, target, kept, str(tmp_path / 'run'))


def test_a_check_shows_the_plan_of_the_machine_that_is_named():
    words = ['--config=configs/drzero.py', '--workdir=/mnt/run', '--index=/mnt/index', '--nofiles']
    words += ['-m', 'zeroplay_jax.main', '--check']
    words = [*words[4:], *words[:4]]
    # More devices than default rows, whose number the plan changes; hosts that each have some of the slots.
    shape = ('replica=16', 'fsdp=1', 'model=1')
    sound = run_python(
        *words, '--on=2*h100x8', *(f'--config.mesh.{axis}' for axis in shape), cwd=ROOT
    )
    assert sound.returncode == 0 and 'updates of 16 rows' in sound.stdout, sound.stderr
    assert 'the command is sound; memory: about 46.4 GiB of 77.0' in sound.stdout
    result = run_python(*words, '--on=v5litepod-8', '--config.mesh.model=8', cwd=ROOT)
    assert result.returncode == 2 and 'num_key_value_heads=2 is not divisible' in result.stderr


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
    for text in (
        'too small',
        'cheapest per hour that fits',
        'large enough with --config.policy.adapters.rank=32: v5litepod-4',
        'the cheapest with --config.policy.adapters.rank=32: v6e-1',
    ):
        assert text in result.stderr


def test_adapters_of_a_mixture_are_advised_as_a_run_takes_them():
    policy = 'hf://Qwen/Qwen3-30B-A3B'
    config = packaged_config('drzero', changes={'policy.path': policy, 'policy.adapters.rank': 32})
    with pytest.raises(UserError, match='down, gate, up cannot have adapters'):
        planning.check_adapters(config)
    config.policy.adapters.rank = 0
    advised = planning.too_small(config, machine('v5litepod-4'))
    linears = re.search(r'--config\.policy\.adapters\.linears="(.*?)"', advised)
    config.policy.adapters.update(rank=32, linears=ast.literal_eval(linears[1]))
    fields.check_values(config)
    planning.check_adapters(config)


def test_the_flags_are_all_of_standard_output():
    # A small step is played fast.
    result = planned('--config=configs/dspo.py', '--machine=v5p-32', '--config.solver.batch=8')
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    assert all(word.startswith('--config.') for word in line.split())
    for text in ('GiB per device', 'generated tokens/s', 'none from a run', 'cheapest per hour'):
        assert text in result.stderr
    assert re.search(r'[.\d]+ hours \(about .* for 200 solver steps', result.stderr)


def test_hours_are_those_of_the_sizes_in_the_folder(tmp_path):
    """And of the steps; a folder may have the name of another model."""
    folder = tmp_path / 'Qwen2.5-7B-Instruct'
    folder.mkdir()
    changes = {'policy.path': str(folder), 'policy.adapters.rank': 32, 'sampler.slots': 16}
    config = packaged_config('dspo', changes=changes)

    def hours(model):
        (folder / 'config.json').write_text(json.dumps(models.MODELS[model]))
        memory = choose(config, machine('h100x1'), ['sampler.slots'])
        line = plan_time.time_of_plan(config, str(folder), memory)
        return float(re.search(r'([\d.]+) hours .* for \d+ solver steps', line)[1])

    large, small = hours('qwen2.5-7b'), hours('qwen2.5-1.5b')
    assert small < large / 2
    config.solver.steps *= 2
    assert hours('qwen2.5-1.5b') == pytest.approx(2 * small, rel=0.1)
    config.solver.filter_groups = False
    assert hours('qwen2.5-1.5b') < 1.5 * small


REFUSED = {
    '--config.mesh.model=4': 'num_key_value_heads=2 is not divisible',
    '--machine=h100x3 --config.mesh.model=2': 'give a divisor of 3',
    '--config.mesh.replica=-1': 'only one axis can be -1',
    '--config.sampler.pages=1': 'give 64 or more',
    '--config.policy.adapters.quantize=int8': 'neither adapters nor a frozen base',
    '--config.rollout.ahead=1 --machine=h200x8': 'old_logp',
    '--machine=v5litepod-2': 'there is no v5litepod-2; there are v5litepod-1, v5litepod-4',
    '--machine=h100x16': 'give several such as 2*h100x8',
    '--machine=v5p-12': 'no slice of this size',
    '--config.sampler.page=0 --config.sampler.slots=9999': 'with sampler.page, sampler.slots as given; no',
    '--machine=h200x8 --config.eval.file=': 'eval.file',
    '--machine=h100x8 --config.micro.rows=3': 'cannot be split evenly over 8 devices',
}


def test_a_plan_refuses_what_a_run_refuses():
    first = ['--config=configs/drzero.py', '--machine=v5litepod-4']
    for words, problem in REFUSED.items():
        result = planned(*first, *words.split())
        assert result.returncode == 2 and problem in result.stderr, result.stderr


def test_a_run_takes_the_flags_of_a_plan_of_the_quickstart():
    """Its attention reads used positions, which slots alone have."""
    config = packaged_config('quickstart')
    target = machine('h100x1')
    flags = planning.flags_of(config, choose(config, target, given_by_hand(config)))
    assert '--config.cpu_devices=1' in flags
    words = ['--config=configs/quickstart.py', '--workdir=/mnt/run', '--check', '--nofiles']
    result = run_python('-m', 'zeroplay_jax.main', *words, '--on=h100x1', *flags)
    assert result.returncode == 0, result.stderr


def test_advice_keeps_what_was_given():
    config = packaged_config('dspo', changes={'micro.rows': 3})
    advised = planning.cheapest(
        config, machine('v5litepod-16'), given_by_hand(config, ['micro.rows'])
    )
    assert 'the smallest v5e' not in advised


def test_an_axis_given_by_hand_leaves_the_others_to_the_plan():
    config = packaged_config('dspo', changes={'mesh.model': 2})
    chosen = choose(config, machine('v5p-32'), given_by_hand(config, ['mesh.model'])).fields
    assert [chosen[f'mesh.{axis}'] for axis in ('replica', 'fsdp', 'model')] == [8, 1, 2]
    flags = planning.flags_of(config, choose(config, machine('cpu:4'), ['mesh.model']))
    assert '--config.mesh.replica=2' in flags and not any('mesh.model' in flag for flag in flags)
    config.mesh.model = 1
    problem = planning.too_small(config, machine('v6e-8'), ['mesh.model'])
    assert problem.endswith('leave out mesh.model: then it is large enough')
    # A policy whose sizes are not known is planned where the run starts.
    words = ['--config=configs/dspo.py', '--workdir=/mnt/run', '--check', '--nofiles']
    words += ['--on=v5p-32', '--config.mesh.model=2', '--policy=hf://owner/unknown']
    result = run_python('-m', 'zeroplay_jax.main', *words)
    assert result.returncode == 0, result.stderr


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
    stored = models.MODELS[name]
    (tmp_path / 'config.json').write_text(json.dumps(stored))
    assert sizes_of(str(tmp_path)) == KNOWN[name]
    for other in ('another', f'{name}-Instruct-GPTQ-Int4', f'{name}-awq', f'{name}-bnb-4bit'):
        with pytest.raises(UserError, match='neither a folder'):
            sizes_of(f'hf://owner/{other}')


def test_a_command_that_takes_too_much_memory_is_a_mistake():
    words = [
        '--config=configs/dspo.py',
        '--workdir=/mnt/run',
        '--check',
        '--nofiles',
        '--on=v5litepod-4',
    ]
    words += ['--config.plan=off', '--config.micro.rows=4']
    refused = run_python('-m', 'zeroplay_jax.main', *words, cwd=ROOT)
    assert refused.returncode == 2 and 'plan=auto chooses what fits' in refused.stderr


def test_a_folder_that_no_run_takes_has_no_plan(tmp_path):
    stored = models.MODELS['qwen2.5-3b'] | {'num_attention_heads': 15}
    (tmp_path / 'config.json').write_text(json.dumps(stored))
    words = ['--config=configs/drzero.py', '--machine=h100x1', f'--policy={tmp_path}']
    refused = run_python('-m', 'zeroplay_jax.plan', *words, cwd=ROOT)
    assert refused.returncode == 2 and not refused.stdout
    assert 'num_attention_heads=15 is not a multiple of num_key_value_heads=2' in refused.stderr


def test_what_shards_do_not_divide_is_whole_on_each():
    config = packaged_config('drzero')
    config.mesh.update(replica=24, fsdp=1, model=1)
    sizes = sizes_of('qwen2.5-3b')
    memory = memory_of(sizes, roles_of(config), fields.leaves(config), machine('3*h100x8'))
    assert sizes.hidden_size % 24 and memory.one['masters'] == 4 * sizes.weights


def test_a_context_of_a_page_gets_slots():
    config = packaged_config('drzero', 'mini')
    for context, page in ((128, 0), (256, 128)):
        config.sampler.context = context
        assert choose(config, machine('v5p-8')).fields['sampler.page'] == page


# main where an H100 is said to be, with an update that its memory is too small for.
ON_H100 = """
import runpy, sys
import jax
from zeroplay_jax.configuration import machines
from zeroplay_jax.selfplay.update import RoleUpdates

def run(*_):
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.')

machines.here = lambda: machines.machine('h100x1')
if sys.argv.pop(1) == 'small':
    RoleUpdates.run = run
runpy.run_module('zeroplay_jax.main', run_name='__main__', alter_sys=True)
"""
# Slots, which a CPU has, and an evaluation that is saved before the first update.
TINY = config_flags("""
    plan=auto sampler.page=0 offload=False cpu_devices=1 checkpoint.every=1 checkpoint.keep=9 schedule.iterations=1
    world.train=(0,4) world.evaluation=(0,2) eval.questions=2 eval.every=0 schedule.hop_ratio=(0,0,1) proposer.batch=8
    proposer.steps=1 pool.batch=8 pool.batches=1 solver.batch=4 solver.steps=1 solver.samples=3 reward.solves=2
    stop_after_empty_steps=0 log.writers=()
""")


@pytest.fixture(scope='module')
def shrunk(tmp_path_factory):
    """(the command's words, workdir, errors) of a run that had too little memory for its first update."""
    workdir = tmp_path_factory.mktemp('shrunk')
    words = ['--config=configs/quickstart.py', *TINY, f'--workdir={workdir}']
    small = run_python('-c', ON_H100, 'small', *words)
    assert small.returncode == 75, small.stderr[-2000:]
    return words, workdir, small.stderr


def test_a_run_without_memory_for_its_first_update_ends_with_a_smaller_plan(shrunk):
    _, workdir, errors = shrunk
    *_, line = errors.splitlines()
    assert 'h100x1 has too little memory for the plan; the next smaller one' in line
    assert line.endswith('the same command resumes the run')
    assert saved_steps(workdir / 'checkpoints') == [1]
    first, smaller = map(int, re.findall(r'(\d+) rollouts per host', errors))
    assert stored_config(workdir)['sampler']['slots'] == smaller < first


@pytest.mark.long
def test_it_goes_on_with_the_smaller_plan(shrunk):
    """As any run with a plan of its own does: test_a_resumed_run_keeps_its_shapes, and test_run.py kills runs."""
    words, workdir, _ = shrunk
    config, run = stored_config(workdir), record.read(workdir).run
    again = run_python('-c', ON_H100, 'large', *words)
    assert again.returncode == 0, again.stderr[-2000:]
    assert 'resumes at step 1 of ' in again.stderr
    assert stored_config(workdir) == config
    # The evaluation before the smaller plan stays, of the same run.
    logged = lines(workdir)
    assert [entry['step'] for entry in logged] == list(range(summary_of(workdir)['steps']))
    assert {entry['run'] for entry in logged} == {run}
