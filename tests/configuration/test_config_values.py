"""Every mistake in a value of a config is one line that names it."""

import copy
import math
import re
import typing

import pydantic
import pytest
from config_checks import FILES, ROOT, message
from ml_collections import ConfigDict
from run_records import write_record

from zeroplay_jax.configs import (
    ablations,
    cross,
    drzero,
    dspo,
    piplay,
    quickstart,
    scope,
    ssp,
)
from zeroplay_jax.configuration import command_line, fields, places, rules
from zeroplay_jax.configuration.fields import read_stored_config
from zeroplay_jax.runtime import workdir
from zeroplay_jax.selfplay import recipe as recipes
from zeroplay_jax.settings import renamed, schema
from zeroplay_jax.settings.kinds import ConfigError, Section

PAGES = [(quickstart, ())] + [
    (p, v) for p in (cross, drzero, dspo, piplay, scope, ssp) for v in ((), ('mini',))
]
PAGES += [(ablations, (row + variant,)) for row in ablations.ROWS for variant in ('', ':mini')]


@pytest.mark.parametrize('page,variant', PAGES)
def test_the_pages_that_come_with_the_project_are_sound(page, variant, checkpoint):
    config = page.get_config(*variant)
    for name in {'answers', 'questions', 'documents', 'tasks'} & set(config.inputs):
        config.inputs[name] = ''  # files of the user's
    config.retrieval.kind, config.eval.file = 'world', ''
    config.policy.path = str(checkpoint)
    rules.check(config)


def leaf_fields(section=schema.Run, prefix=''):
    """(dotted name, pydantic's field) of a section and those inside it."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from leaf_fields(field.annotation, f'{prefix}{name}.')
        else:
            yield prefix + name, field


def all_leaf_fields():
    yield from leaf_fields()
    yield from leaf_fields(schema.TrainedRole, 'solver.')
    for name in recipes.BUILT_IN:
        for section_name, section in recipes.recipe_class(name).settings.items():
            yield from leaf_fields(section, f'{section_name}.')


def test_every_field_has_bounds_or_a_check_elsewhere():
    checked_elsewhere = {
        'recipe',
        'policy.path',
        'solver.adapter',
        'inputs.answers',
        'inputs.questions',
        'inputs.tasks',
        'inputs.types',
        'ssp.invalid_reward',
        'judge.url',
        'judge.model',
        'judge.rubric_model',
        'judge.grade_model',
        'second_judge.model',
        'second_judge.url',
        'distributed.coordinator',
        'eval.file',
        'eval.tasks',
        'log.writers',
        'retrieval.path',
        'retrieval.encoder',
        'retrieval.held_out',
        'retrieval.url',
        'tools.names',
        'tools.mcp_servers',
    }
    unbounded = {
        name
        for name, field in all_leaf_fields()
        if not field.metadata
        and field.annotation is not bool
        and typing.get_origin(field.annotation) is not typing.Literal
    }
    assert unbounded == checked_elsewhere


def test_the_config_has_exactly_the_fields_of_the_schema_and_each_is_documented():
    config = fields.fields_of_all()
    names = [name for name, _ in all_leaf_fields()]
    roles = {
        name: f'proposer.{name[7:]}'
        for name in names
        if name.startswith('solver.')
        and name[7:] not in (*schema.FILTER_FIELDS, *schema.DISTILL_FIELDS)
    }
    assert {name for name, _ in fields.leaves(config)} == {*names, *roles.values()}
    assert not [name for name, field in all_leaf_fields() if not field.description]
    for name, value in fields.leaves(config):
        assert not isinstance(value, float) or math.isfinite(value), name


@pytest.mark.parametrize('old', renamed.RENAMED_FIELDS)
def test_a_field_of_an_earlier_version_is_refused_with_its_new_name(sound, old):
    new = renamed.RENAMED_FIELDS[old]
    with pytest.raises(ConfigError, match='renamed') as caught:
        command_line.parse_flags(['main', f'--config.{old}=1'])
    line = str(caught.value)
    assert line == f'config.{old}: renamed; it is config.{new} now'
    names = {name for name, _ in fields.leaves(fields.fields_of_all())}
    assert old not in names and new.split(' ')[0] in names
    section, _, field = old.partition('.')
    with sound.unlocked():
        if section not in sound:
            sound[section] = ConfigDict()
        sound[section][field] = 1
    assert message(sound) == line


WRONG = [  # field, value, what the line must contain beside the field
    ('seed', -1, 'give 0 or more'),
    ('recipe', 'drzreo', 'drzero'),
    ('policy.dtype', 'float16', 'float32, bfloat16'),
    ('distributed.mode', 'ring', 'give one of off, auto, coordinator'),
    ('mesh.model', 0, 'give 1 or more, or -1'),
    ('sampler.slots', 0, 'give 1 or more'),
    ('rollout.tool_timeout', 0.0, 'more than 0'),
    ('tools.syntax', 'json', 'search_r1, r_search, qwen, olmo'),
    ('world.train', (0,), 'first seed'),
    ('world.near_misses', 1.5, 'give 0 to 1'),
    ('schedule.hop_ratio', (0, 0, 0, 0), 'not all 0'),
    ('schedule.hop_ratio', (5, 4, 3, 2, 1), 'up to four'),
    ('drzero.group', 'hops', 'hop, prompt'),
    ('reward.solves', 1, 'give 2 or more'),
    ('pool.window', (0.8, 0.2), 'low ≤ high'),
    ('eval.hops', (1, 1), 'each once'),
    ('solver.learning_rate', 0.0, 'more than 0'),
    ('solver.learning_rate', float('nan'), 'a finite number'),
    ('proposer.beta2', 1.0, 'less than 1'),
    ('proposer.aggregation', 'tokens', 'seq_mean_token_mean'),
    ('solver.dual_clip', 0.5, 'more than 1'),
    ('world.train', (0, 999), 'choose first + count of 63 or less'),
    ('world.evaluation', (20, 5), 'suffice for 24 worlds'),
    ('solver.baseline', 'none', 'solver.scale=none too'),
    ('value_network.learning_rate', 1e-3, 'set baseline=value of one'),
    ('value_network.gae_lambda', 1.5, 'give 0 to 1'),
    # combinations
    ('sampler.context', 400, '96 prompt + 5 · 64 turn tokens = 416'),
    ('sampler.chunk', 2000, 'at most 512'),
    ('sampler.page', 513, 'at most 512'),
    ('sampler.pages', 40, 'set sampler.page, such as 64'),
    ('sampler.token_budget', 64, 'set sampler.page, such as 64'),
    ('sampler.attention', 'ragged', 'set sampler.page, such as 64'),
    ('sampler.decode_buckets', (8,), 'set sampler.page, such as 64'),
    ('micro.tokens', 500, 'give 512 or more'),
    ('rollout.max_turns', 3, '4-hop question takes 3 searches'),
    ('pool.window', (0.2, 0.8), 'give pool.measure'),
    ('solver.samples', 1, 'give 2 or more'),
    ('proposer.batch', 8, 'give 16 or more'),
    ('solver.minibatches', 5, 'a divisor of 32'),
    ('policy.path', 'no/such/folder', 'no such folder'),
]


@pytest.mark.parametrize(
    ('field', 'value', 'contains'), WRONG, ids=lambda x: x if isinstance(x, str) else None
)
def test_an_impossible_value_is_one_line_that_says_how_to_mend_it(sound, field, value, contains):
    rules.check(sound)  # only the one change below is wrong
    sound.update_from_flattened_dict({field: value})
    text = message(sound)
    assert text.startswith(f'config.{field}=')
    assert contains in text


@pytest.mark.parametrize(
    ('changes', 'line'),
    [
        ({'solver.scale': 'std'}, 'config.solver.scale=std: .*give batch'),
        ({'solver.loss': 'sequence_pg'}, 'config.solver.loss=sequence_pg: .*take token_pg'),
        ({'policy.adapters.rank': 4}, 'config.solver.baseline=value: .*policy.adapters.rank=0'),
        ({'solver.filter_groups': True}, 'config.solver.samples=1: .*solver.filter_groups=false'),
        (
            {'rollout.drop_thinking': True, 'value_network.gae_lambda': 0.9},
            'config.value_network.gae_lambda=0.9: .*give 1, or rollout.drop_thinking=false',
        ),
    ],
)
def test_a_value_network_refuses_what_it_cannot_go_with(changes, line):
    config = dspo.get_config('mini')
    config.solver.update(baseline='value', scale='batch', loss='token_pg', aggregation='token')
    # One rollout per question is enough, without a group to compare it with.
    config.solver.update(samples=1, filter_groups=False)
    config.value_network.learning_rate = 1e-3
    rules.check(config)
    config.update_from_flattened_dict(changes)
    assert re.match(line, message(config))


def test_a_wrong_type_names_the_type(sound):
    raw = sound.unlock().to_dict()
    raw['seed'] = True  # Python takes True for a whole number, the check does not
    assert 'must be a whole number' in message(ConfigDict(raw))
    raw['seed'], raw['world']['train'] = 0, ('a', 'b')
    assert 'config.world.train' in message(ConfigDict(raw))


def test_a_field_that_a_config_file_made_up_is_refused(sound):
    with sound.unlocked():
        sound.solver.learning_rte = 1e-4
    assert 'did you mean config.solver.learning_rate?' in message(sound)


def test_a_field_that_a_config_file_left_out_is_refused(sound):
    with sound.unlocked():
        del sound.micro.rows
    assert 'config.micro.rows: missing' in message(sound)


def test_rows_and_slots_divide_over_the_devices(sound):
    sound.mesh.update(replica=2, fsdp=3)
    assert 'give a multiple of 6, such as 12' in message(sound)
    sound.micro.rows = 12
    rules.check(sound)
    sound.sampler.slots = 97
    assert message(sound).startswith('config.sampler.slots=97')
    assert 'over 6 devices (mesh.replica · mesh.fsdp)' in message(sound)
    # Each of two processes has a replica for itself.
    sound.distributed.update(mode='coordinator', coordinator='host:1', processes=2)
    assert 'over 3 devices (mesh.replica · mesh.fsdp of a process)' in message(sound)
    sound.distributed.mode = 'off'
    sound.distributed.update(coordinator='', processes=1)
    sound.mesh.fsdp = -1  # known only with the devices
    rules.check(sound)
    sound.mesh.model = -1
    assert 'only one axis' in message(sound)


def test_processes_must_know_where_they_meet_and_hold_whole_replicas(sound):
    sound.cpu_devices = sound.mesh.replica = 1
    sound.distributed.processes = 2
    assert 'set distributed.mode' in message(sound)
    sound.distributed.mode = 'coordinator'
    assert 'give host:port of process 0' in message(sound)
    sound.distributed.coordinator = 'localhost:1234'
    assert message(sound).startswith('config.mesh.replica=1')
    sound.mesh.replica = 2
    rules.check(sound)
    sound.distributed.process = 2
    assert 'count from 0' in message(sound)


def test_the_kernel_for_tpus_needs_whole_tiles(sound):
    sound.policy.attention = 'splash'
    sound.micro.tokens = 1000
    assert 'steps of 128' in message(sound)
    sound.micro.tokens = 1024
    rules.check(sound)
    sound.solver.update(distill_top_k=8, distill_coef=(0.1,))
    sound.privileged.tokens = 673
    assert message(sound).startswith('config.privileged.tokens=673')


def test_what_is_kept_for_the_backward_pass_needs_one_that_recomputes(sound):
    sound.policy.remat_policy = 'dots_with_no_batch_dims_saveable'
    assert message(sound).startswith('config.policy.remat_policy=')
    sound.policy.remat = True
    rules.check(sound)


def test_a_teacher_reads_one_context_per_rollout(sound):
    sound.rollout.drop_thinking = True
    rules.check(sound)
    sound.solver.distill_top_k = 8
    sound.solver.distill_coef = (0.1,)
    assert message(sound).startswith('config.rollout.drop_thinking=True')


@pytest.mark.parametrize(
    'change', [dict(loss='sequence_pg'), dict(aggregation='seq_mean_token_mean')], ids=str
)
def test_contexts_of_a_rollout_are_not_taken_for_rollouts(sound, change):
    sound.rollout.drop_thinking = True
    sound.solver.update(change)
    assert message(sound).startswith('config.rollout.drop_thinking=True')


@pytest.mark.parametrize('field', ['file', 'tasks'])
def test_what_to_measure_by_needs_a_corpus_of_ones_own(sound, field):
    sound.eval[field] = 'README.md'
    assert message(sound).startswith(f'config.eval.{field}=README.md: the miniature world')


def test_a_corpus_of_ones_own_needs_questions_unless_an_evaluation_brings_some(sound, tmp_path):
    (tmp_path / 'manifest.json').write_text('{}')
    sound.retrieval.update(kind='folder', path=str(tmp_path))
    assert message(sound).startswith("config.eval.file='': a corpus of your own")
    rules.check(sound, has_evaluation=False)
    sound.eval.file = 'nowhere.jsonl'
    assert message(sound).startswith('config.eval.file=nowhere.jsonl: no such file')
    sound.eval.update(file='README.md', tasks='nowhere.jsonl')
    assert message(sound).startswith(
        'config.judge.kind=rule: the rule works in miniature worlds only'
    )
    sound.judge.update(kind='policy', tokens=64)
    assert message(sound).startswith('config.eval.tasks=nowhere.jsonl: no such file')


def test_a_file_that_the_recipe_never_reads_is_refused(sound, tmp_path):
    with sound.unlocked():
        sound.inputs.questions = 'README.md'
    assert message(sound).startswith('config.inputs.questions: recipe drzero does not read it')
    sound.recipe = 'dspo'
    assert message(sound).startswith('config.inputs.questions: README.md, line 1: ')
    questions = tmp_path / 'questions.jsonl'
    questions.write_text('{"question": "who?", "answers": ["one"]}\n')
    sound.inputs.questions = str(questions)
    rules.check(sound)


def test_a_group_by_prompt_needs_several_rollouts(sound):
    sound.drzero.group = 'prompt'
    assert message(sound).startswith('config.proposer.samples=1')
    sound.proposer.update(baseline='none', scale='none')
    rules.check(sound)


def test_updates_on_older_rollouts_need_a_ratio(sound):
    sound.solver.minibatches = 4
    rules.check(sound)
    sound.solver.loss = 'reinforce'
    assert 'set solver.loss to token_pg' in message(sound)


@pytest.mark.parametrize('name', FILES)
def test_a_checkpoint_without_one_of_its_files_is_refused(sound, checkpoint, name):
    (checkpoint / name).unlink()
    assert 'the folder has no' in message(sound)


def test_the_built_in_checkpoint_says_how_it_is_made(sound, monkeypatch, tmp_path):
    monkeypatch.setattr(places, 'BUILT_IN_CHECKPOINT', tmp_path / 'gone')
    sound.policy.path = ''
    assert 'python -m tools.checkpoints.base_model' in message(sound)


@pytest.mark.parametrize(
    ('names', 'contains'),
    [
        (
            ('serach',),
            "'serach' is not a tool; give search, open, calculator, mcp, or package.module",
        ),
        (('search', 'answer'), "'answer' is not a tool"),
        (('search', 3), 'config.tools.names'),
        ((), 'config.tools.names'),
    ],
)
def test_names_of_tools(sound, names, contains):
    sound.tools.names = ('search', 'open', 'calculator', 'their.module:tool')
    rules.check(sound)
    sound = ConfigDict(sound.to_dict())
    sound.tools.names = names
    if names == ():  # a game without tools is possible
        rules.check(sound)
    else:
        assert contains in message(sound)


def test_a_server_of_tools_has_a_web_address(sound):
    sound.tools.update(names=('search', 'mcp'), mcp_servers='localhost:8000')
    assert message(sound).startswith('config.tools.mcp_servers=localhost:8000: no such file')
    sound.tools.mcp_servers = 'http://localhost:8000/mcp'
    rules.check(sound)


@pytest.mark.parametrize('field', ['judge.url', 'second_judge.url', 'tools.mcp_servers'])
@pytest.mark.parametrize('address', ['https://me:secret@host:80/v1', 'http://secret@host'])
def test_a_password_in_an_address_is_refused_and_not_repeated(sound, field, address):
    sound.judge.kind = sound.second_judge.kind = 'endpoint'
    sound.tools.names = ('search', 'mcp')
    section, name = field.split('.')
    sound[section][name] = address
    line = message(sound)
    assert line.startswith(f'config.{field}=http') and 'must hold no password' in line
    assert '***@host' in line and 'secret' not in line


@pytest.mark.parametrize('address', ['http://[::1', 'http://host:99999', 'ftp://host', ''])
def test_the_address_of_a_judge_can_be_read(sound, address):
    sound.judge.update(kind='endpoint', url=address)
    assert 'config.judge.url=' in message(sound) and 'not a web address' in message(sound)


@pytest.mark.parametrize(
    ('field', 'value', 'suggestion'),
    [
        ('solver.loss', 'token_gp', 'token_pg'),
        ('reward.difficulty', 'parabola', 'parabolic'),
        ('tools.names', ('serach',), 'search'),
        ('tools.syntax', 'quen', 'qwen'),
        ('recipe', 'drzreo', 'drzero'),
        ('inputs.documents', 'READM.md', 'README.md'),
        ('policy.path', 'zeroplay_jax/mini/bass', 'zeroplay_jax/mini/base'),
    ],
)
def test_a_similar_name_is_suggested(monkeypatch, field, value, suggestion):
    monkeypatch.chdir(ROOT)
    config = drzero.get_config('mini')
    config.update_from_flattened_dict({field: value})
    assert message(config).endswith(f'; did you mean {suggestion}?')


# ml_collections keeps what a flag's Python literal means: 1e999 is infinite.
NOT_FINITE = ('inf', '-inf', 'nan', '1e999')


def _with_number(value, number):
    """A value of a field with a number in it, in the last place of a list."""
    return (*value[:-1], number) if isinstance(value, tuple) else number


@pytest.mark.fault('D', 'inf, nan, 1e999 in every field that holds numbers, alone or in a list')
@pytest.mark.parametrize('text', NOT_FINITE)
def test_numbers_that_are_not_finite_are_refused_in_every_field(sound, text, user_reads):
    for name, value in list(fields.leaves(sound)):
        numbers = value if isinstance(value, tuple) else (value,)
        if not any(type(number) is float for number in numbers):
            continue
        config = sound.copy_and_resolve_references().unlock()
        config.update_from_flattened_dict({name: _with_number(value, float(text))})
        with pytest.raises(ConfigError, match=f'config.{name}=.*(finite|must be)') as refusal:
            fields.check_values(config)
    user_reads(refusal.value)


@pytest.mark.fault('D', 'finite shares whose sum is infinite')
def test_shares_with_an_infinite_sum_are_refused(sound, user_reads):
    sound.schedule.hop_ratio = (1e308, 1e308)
    with pytest.raises(ConfigError, match='schedule.hop_ratio=.*not possible') as refusal:
        fields.check_values(sound)
    user_reads(refusal.value)


@pytest.mark.fault('kin-numbers', 'whole numbers beyond 32 bits in every field')
def test_whole_numbers_that_no_accelerator_holds_are_refused(sound, user_reads):
    for name, value in list(fields.leaves(sound)):
        numbers = value if isinstance(value, tuple) else (value,)
        if not any(type(number) is int for number in numbers):
            continue
        config = sound.copy_and_resolve_references().unlock()
        config.update_from_flattened_dict({name: _with_number(value, 10**30)})
        with pytest.raises(ConfigError, match=f'config.{name}=') as refusal:
            fields.check_values(config)
    user_reads(refusal.value)


@pytest.mark.fault('N', 'the same list given twice on the command line')
def test_the_last_flag_of_a_field_counts(user_reads):
    repeated = command_line.without_repeated_fields
    words = ['x', '--config.eval.hops=(1,)', '--config=c', '--config.eval.hops', '(2,)', '--a=1']
    assert repeated(words) == ['x', '--config=c', '--config.eval.hops', '(2,)', '--a=1']
    words = ['x', '--config.eval.hops', '(1,)', '--config.seed=1', '-config.eval.hops=2']
    assert repeated(words) == ['x', '--config.seed=1', '-config.eval.hops=2']
    words = ['x', '--config.progress', '--config.seed=1', '--config.progress', '--config.seed=2']
    assert repeated(words) == ['x', '--config.progress', '--config.seed=2']
    user_reads('right: the last one counts')


def test_a_run_of_an_earlier_version_goes_on_with_the_values_of_renamed_fields(sound, tmp_path):
    config = sound.to_dict()
    config['tools']['mcp_url'] = config['tools'].pop('mcp_servers')
    write_record(tmp_path, config)
    workdir.check(tmp_path, sound.to_dict())
    stored_config = read_stored_config(tmp_path)
    assert stored_config.tools.mcp_servers == sound.tools.mcp_servers
    config['tools']['mcp_url'] = 'http://elsewhere/mcp'
    write_record(tmp_path, config)
    with pytest.raises(workdir.WorkdirError, match='mcp_servers'):
        workdir.check(tmp_path, sound.to_dict())


@pytest.mark.parametrize('name', renamed.REMOVED_FIELDS)
def test_a_field_that_is_gone_says_what_to_do_instead(sound, tmp_path, name):
    neutral, advice = renamed.REMOVED_FIELDS[name]
    with pytest.raises(ConfigError) as refusal:
        fields.check_name(name, sound)
    assert str(refusal.value) == f'config.{name}: is gone; {advice}'
    # A run of an earlier version goes on where the field did nothing; its policy can be asked and exported anyway.
    section, _, field = name.rpartition('.')
    current = sound.to_dict()
    for value, is_resumed in ((neutral, True), ('another', False)):
        stored = copy.deepcopy(current)
        inner = stored
        for part in section.split('.'):
            inner = inner.setdefault(part, {})
        inner[field] = value
        write_record(tmp_path, stored)
        assert read_stored_config(tmp_path) is not None
        if is_resumed:
            workdir.check(tmp_path, current)
        else:
            with pytest.raises(workdir.WorkdirError, match=f'{name} \\(there another, now None'):
                workdir.check(tmp_path, current)


def test_a_frozen_config_reads_as_the_one_of_the_user():
    config = fields.config('drzero', 'mini')
    frozen = fields.frozen(config)
    assert dict(frozen.rollout) == {**frozen.rollout} == config.rollout.to_dict()
    assert 'solver' in frozen and 'ssp' not in frozen and frozen.get('ssp') is None
    assert list(frozen.mesh) == list(frozen.mesh.keys()) and len(frozen.mesh) == 3
    assert dict(fields.leaves(config)).items() <= dict(fields.leaves(frozen)).items()
    with pytest.raises(KeyError):
        frozen['no_section']
    with pytest.raises(pydantic.ValidationError):
        frozen.seed = 1


def test_a_level_of_an_alarm_says_how_it_is_given(sound):
    with pytest.raises(ConfigError) as refusal:
        fields.check_name('alarms.entropy.stop', sound)
    line = 'config.alarms.entropy.stop: is gone; set config.alarms.entropy=(warn, stop, steps)'
    assert str(refusal.value) == line
