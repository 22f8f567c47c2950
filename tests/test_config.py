"""Every mistake in a config or a command line is one line that names it, before anything heavy is loaded."""

import math
import os
import pathlib
import subprocess
import sys
import typing

import pytest
from ml_collections import ConfigDict

from zeroplay_jax.configs import (
    ablations,
    common,
    cross,
    drzero,
    dspo,
    piplay,
    quickstart,
    scope,
    ssp,
)
from zeroplay_jax.configuration import command_line, fields, rules
from zeroplay_jax.selfplay import recipe as recipes
from zeroplay_jax.settings import renamed, schema
from zeroplay_jax.settings.bounds import Section
from zeroplay_jax.settings.errors import ConfigError
from zeroplay_jax.types import UserError

ROOT = pathlib.Path(__file__).parents[1]
FILES = ('config.json', 'tokenizer.json', 'model.safetensors')


@pytest.fixture
def checkpoint(tmp_path):
    """A folder that looks like a checkpoint to a check that loads nothing."""
    folder = tmp_path / 'checkpoint'
    folder.mkdir()
    for name in FILES:
        (folder / name).touch()
    return folder


@pytest.fixture
def sound(checkpoint):
    """A config without a mistake, locked as the command line hands it over."""
    config = quickstart.get_config()
    config.policy.path = str(checkpoint)
    return config.lock()


def message(config):
    with pytest.raises(UserError) as caught:
        rules.check(config)
    text = str(caught.value)
    assert '\n' not in text
    return text


PAGES = [(quickstart, ())] + [
    (p, v) for p in (cross, drzero, dspo, piplay, scope, ssp) for v in ((), ('mini',))
]
PAGES += [(ablations, (row + variant,)) for row in ablations.ROWS for variant in ('', ':mini')]


@pytest.mark.parametrize('page,variant', PAGES)
def test_the_pages_that_come_with_the_project_are_sound(page, variant, checkpoint):
    config = page.get_config(*variant)
    config.inputs.update(answers='', questions='', documents='', tasks='')  # files of the user's
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
        'inputs.answers',
        'inputs.questions',
        'inputs.tasks',
        'inputs.types',
        'judge.url',
        'judge.model',
        'judge.rubric_model',
        'judge.grade_model',
        'distributed.coordinator',
        'eval.file',
        'eval.tasks',
        'retrieval.path',
        'retrieval.encoder',
        'retrieval.url',
        'tools.names',
        'tools.mcp_url',
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
    config = fields.default_config()
    names = [name for name, _ in all_leaf_fields()]
    roles = {name: f'proposer.{name[7:]}' for name in names if name.startswith('solver.')}
    assert {name for name, _ in fields.leaves(config)} == {*names, *roles.values()}
    assert not [name for name, field in all_leaf_fields() if not field.description]
    for name, value in fields.leaves(config):
        assert not isinstance(value, float) or math.isfinite(value), name
    rules.fields.check_values(config)


@pytest.mark.parametrize('old', renamed.RENAMED_FIELDS)
def test_a_field_of_an_earlier_version_is_refused_with_its_new_name(sound, old):
    new = renamed.RENAMED_FIELDS[old]
    with pytest.raises(ConfigError, match='renamed') as caught:
        command_line.parse_flags(['main', f'--config.{old}=1'])
    line = str(caught.value)
    assert line == f'config.{old}: renamed; it is config.{new} now'
    names = {name for name, _ in fields.leaves(fields.default_config())}
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
    ('solver.learning_rate', float('nan'), 'more than 0'),
    ('proposer.beta2', 1.0, 'less than 1'),
    ('proposer.aggregation', 'tokens', 'seq_mean_token_mean'),
    ('solver.dual_clip', 0.5, 'more than 1'),
    ('world.train', (0, 999), 'choose first + count of 63 or less'),
    ('world.evaluation', (20, 5), 'suffice for 24 worlds'),
    ('solver.baseline', 'none', 'solver.scale=none too'),
    # combinations
    ('sampler.context', 400, '96 prompt + 5 · 64 turn tokens = 416'),
    ('sampler.chunk', 2000, 'at most 512'),
    ('micro.tokens', 500, 'give 512 or more'),
    ('rollout.max_turns', 3, '4-hop question takes 3 searches'),
    ('retrieval.overfetch', 2, 'give 3 or more'),
    ('pool.window', (0.2, 0.8), 'give pool.measure'),
    ('solver.samples', 1, 'give 2 or more'),
    ('proposer.batch', 8, 'give 16 or more'),
    ('solver.minibatches', 7, 'a divisor of 160'),
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
    sound.mesh.fsdp = -1  # known only with the devices
    rules.check(sound)
    sound.mesh.model = -1
    assert 'one axis at most' in message(sound)


def test_processes_must_know_where_they_meet_and_hold_whole_replicas(sound):
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


def test_a_file_that_the_recipe_never_reads_is_refused(sound):
    sound.inputs.questions = 'README.md'
    assert message(sound).startswith('config.inputs.questions=README.md: recipe drzero takes none')
    sound.recipe = 'dspo'
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
    monkeypatch.setattr(rules, 'BUILT_IN_CHECKPOINT', tmp_path / 'gone')
    sound.policy.path = ''
    assert 'python -m zeroplay_jax.mini.base_model' in message(sound)


# ---- what one recipe knows -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('page', 'change', 'begins', 'contains'),
    [
        (drzero, {'pool.window': (0.2, 0.8)}, 'pool.window=', 'give pool.measure'),
        (drzero, {'proposer.batch': 8}, 'proposer.batch=8', 'give 16 or more'),
        (drzero, {'proposer.filter_groups': True}, 'proposer.filter_groups=True', 'set it to'),
        (piplay, {'proposer.batch': 8}, 'proposer.batch=8', 'give 16 or more'),
        (ssp, {'solver.filter_groups': True}, 'solver.filter_groups=True', ''),
        (ssp, {'ssp.fill': 'more'}, 'ssp.fill=more', 'pad, resample, replay_full, replay_reset'),
        (ssp, {'ssp.invalid_reward': float('inf')}, 'ssp.invalid_reward=inf', 'a number'),
        (ssp, {'ssp.noise': -1}, 'ssp.noise=-1', 'give 0 or more'),
        (ssp, {'solver.distill_top_k': 8}, 'solver.distill_top_k=8', 'drzero or piplay'),
        (scope, {'scope.soft_length': 4096}, 'scope.soft_length=4096', 'give less'),
        (scope, {'scope.searches_below_hops': 2}, 'scope.searches_below_hops=2', 'give 0 or 1'),
        (dspo, {'inputs.answers': 'README.md'}, 'inputs.answers=README.md', 'recipe dspo takes'),
    ],
)
def test_the_checks_of_a_recipe(checkpoint, page, change, begins, contains):
    config = page.get_config('mini')
    config.policy.path = str(checkpoint)
    rules.check(config)
    config.update_from_flattened_dict(change)
    text = message(config)
    assert text.startswith(f'config.{begins}') and contains in text


@pytest.mark.parametrize(('page', 'field'), [(ssp, 'inputs.answers'), (dspo, 'inputs.questions')])
def test_a_recipe_that_is_given_data_needs_some_with_a_corpus_of_ones_own(
    checkpoint, tmp_path, page, field
):
    (tmp_path / 'manifest.json').write_text('{}')
    config = page.get_config('mini')
    config.policy.path = str(checkpoint)
    config.retrieval.update(kind='folder', path=str(tmp_path))
    config.judge.update(kind='policy', tokens=64)
    config.eval.file = 'README.md'
    assert message(config).startswith(f"config.{field}=''")
    config.update_from_flattened_dict({field: 'README.md'})
    rules.check(config)


@pytest.mark.parametrize(
    ('names', 'contains'),
    [
        (('serach',), "'serach' is no tool; give search, open, calculator, mcp, or package.module"),
        (('search', 'answer'), "'answer' is no tool"),
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
    sound.tools.update(names=('search', 'mcp'), mcp_url='localhost:8000')
    assert message(sound).startswith('config.tools.mcp_url=localhost:8000: not a web address')
    sound.tools.mcp_url = 'http://localhost:8000/mcp'
    rules.check(sound)


# ---- a recipe from elsewhere -----------------------------------------------------------------------

RECIPE = """
from typing import Annotated, Literal

from pydantic import Field

from zeroplay_jax.selfplay.recipe import Recipe as Base
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.settings.bounds import PositiveInt, Section
from zeroplay_jax.settings.errors import fail


class Settings(Section):
    uncertainty: Annotated[float, Field(ge=0)] = 0.5
    votes: PositiveInt = 3
    kind: Literal['majority', 'mean'] = 'majority'


class Recipe(Base):
    settings = {'rzero': Settings}
    prompts = {'challenger': 'Challenge: {document}'}
    evaluated_role = 'answerer'

    @classmethod
    def roles(cls, config):
        return RoleSpec('challenger', 'challenger'), RoleSpec('answerer', 'solver')

    @classmethod
    def check(cls, config):
        if config.rzero.votes > config.answerer.samples:
            fail('rzero.votes', config.rzero.votes, 'more than there are answers', 'give less')
"""
RECIPE_CONFIG = """
from zeroplay_jax.configs import common


def get_config():
    config = common.get_config('their_package.rzero')
    config.rzero.votes = 4
    config.challenger.update(baseline='none', scale='none')
    config.answerer.samples = 5
    return config
"""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    package = tmp_path / 'their_package'
    package.mkdir()
    (package / '__init__.py').touch()
    (package / 'rzero.py').write_text(RECIPE)
    (package / 'empty.py').write_text('from zeroplay_jax.selfplay.recipe import Recipe\n')
    (package / 'broken.py').write_text('import a_package_that_is_not_there\n')
    (tmp_path / 'rzero_config.py').write_text(RECIPE_CONFIG)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition('.')[0] == 'their_package']:
        del sys.modules[name]


def test_a_recipe_from_elsewhere_has_a_section_roles_and_checks_of_its_own(elsewhere, checkpoint):
    config = common.get_config('their_package.rzero')
    assert config.rzero.to_dict() == {'uncertainty': 0.5, 'votes': 3, 'kind': 'majority'}
    assert recipes.trained_roles(config) == ('challenger', 'answerer')
    assert set(config.challenger) == set(schema.TrainedRole.model_fields)
    config.policy.path = str(checkpoint)
    config.challenger.update(baseline='none', scale='none')
    config.answerer.samples = 5
    config = config.lock()
    rules.check(config)
    for change, line in (
        ({'rzero.votes': 6}, 'config.rzero.votes=6: more than there are answers; give less'),
        ({'rzero.votes': 0}, 'config.rzero.votes=0: not possible; give 1 or more'),
        ({'rzero.uncertainty': -1.0}, 'config.rzero.uncertainty=-1.0: not possible; give 0'),
        ({'rzero.kind': 'max'}, 'config.rzero.kind=max: not possible; give one of majority, mean'),
        ({'answerer.learning_rate': 0.0}, 'config.answerer.learning_rate=0.0: not possible'),
        ({'answerer.filter_groups': True}, 'config.answerer.filter_groups=True: recipe their_'),
    ):
        wrong = ConfigDict(config.to_dict())
        wrong.update_from_flattened_dict(change)
        assert message(wrong).startswith(line)
    with config.unlocked():
        config.rzero.vots = 3
    assert 'did you mean config.rzero.votes?' in message(config)


@pytest.mark.parametrize(
    ('name', 'contains'),
    [
        ('their_package.gone', 'no such recipe; give one of drzero, piplay, ssp, dspo, scope, or'),
        ('their_package.empty', 'has no class Recipe of its own'),
        ('their_package.broken', 'it imports a_package_that_is_not_there, which is not installed'),
        ('drzreo', 'no such recipe'),
    ],
)
def test_a_recipe_that_cannot_be_used_is_one_line(elsewhere, name, contains):
    with pytest.raises(ConfigError) as caught:
        recipes.recipe_class(name)
    assert str(caught.value).startswith(f'config.recipe={name}: ') and contains in str(caught.value)
    assert '\n' not in str(caught.value)


def test_flags_reach_the_section_of_a_recipe_from_elsewhere(elsewhere, checkpoint):
    arguments = [f'--config={elsewhere}/rzero_config.py', f'--config.policy.path={checkpoint}']
    for flag, contains in (
        ('--config.rzero.votes=6', 'config.rzero.votes=6: more than there are answers'),
        ('--config.rzero.vots=4', 'did you mean config.rzero.votes?'),
        ('--config.rzero.votes=many', 'config.rzero.votes=many'),
        ('--config.answerer.steps=-1', 'config.answerer.steps=-1: not possible; give 0 or more'),
    ):
        result = run(*arguments, f'--workdir={elsewhere}/run', flag, path=elsewhere)
        said = [line for line in result.stderr.splitlines() if not line.startswith('import time:')]
        assert result.returncode == 2 and len(said) == 1 and contains in said[0], said
    # Everything is in order but the folder of the run: the flags themselves were accepted.
    result = run(*arguments, '--config.rzero.votes=5', path=elsewhere)
    assert 'give --workdir=FOLDER' in result.stderr


def test_the_flag_of_a_recipe_from_elsewhere_brings_its_sections(elsewhere, checkpoint):
    """Over a config file of another recipe, wherever the flag stands."""
    recipe = ['--config.recipe=their_package.rzero', f'--config.policy.path={checkpoint}']
    recipe += ['--config.challenger.baseline=none', '--config.challenger.scale=none']
    page = ['--config=configs/drzero.py:mini', '--config.answerer.samples=5']
    for flag, contains in (
        ('--config.rzero.votes=6', 'config.rzero.votes=6: more than there are answers'),
        ('--config.rzero.vots=4', 'did you mean config.rzero.votes?'),
        ('--config.rzero.votes=many', 'config.rzero.votes=many: must be a whole number'),
        ('--config.answerer.steps=-1', 'config.answerer.steps=-1: not possible; give 0 or more'),
        ('--config.recipe=their_package.gone', 'config.recipe=their_package.gone: no such recipe'),
    ):
        result = run(*page, *recipe, flag, f'--workdir={elsewhere}/run', path=elsewhere)
        said = [line for line in result.stderr.splitlines() if not line.startswith('import time:')]
        assert result.returncode == 2 and len(said) == 1 and contains in said[0], said
    result = run(*page, '--config.rzero.votes=5', *recipe, path=elsewhere)
    assert 'give --workdir=FOLDER' in result.stderr


def test_what_a_check_knows_of_losses_is_what_they_say():
    from zeroplay_jax.objectives.losses import POLICY_LOSSES

    for name, loss in POLICY_LOSSES.items():
        assert loss.uses_ratio == (name not in rules.LOSSES_WITHOUT_RATIO)
        assert loss.per_token == (name not in rules.LOSSES_PER_SEQUENCE)


HEAVY = ('jax', 'jaxlib', 'tensorflow', 'transformers', 'tokenizers', 'openai', 'flax', 'scann')
LIGHT = """
import sys
from zeroplay_jax.configuration import rules
from zeroplay_jax.configs import ablations, cross, drzero, dspo, piplay, quickstart, scope, ssp
from zeroplay_jax.selfplay import recipe
for name in recipe.BUILT_IN:
    recipe.recipe_class(name)
pages = [quickstart.get_config(), *(page.get_config('mini') for page in (cross, drzero, dspo, piplay, scope, ssp))]
for config in pages:
    config.policy.path = sys.argv[1]
    rules.check(config)
print(sorted(name for name in {heavy} if name in sys.modules))
""".replace('{heavy}', repr(HEAVY))


def test_recipes_and_checks_of_configs_load_nothing_heavy(checkpoint):
    result = subprocess.run(
        [sys.executable, '-c', LIGHT, str(checkpoint)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == '[]'


def run(*arguments, path=''):
    command = [sys.executable, '-X', 'importtime', '-m', 'zeroplay_jax.main', *arguments]
    environment = {**os.environ, 'PYTHONPATH': f'{ROOT}:{path}'}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )


PAGE = '--config=configs/quickstart.py'


@pytest.mark.parametrize(
    ('arguments', 'contains'),
    [
        ([PAGE, '--config.solvr.lr=1'], 'did you mean config.solver.learning_rate?'),
        ([PAGE, '--config.seed=1.5'], 'config.seed=1.5: must be a whole number'),
        ([PAGE, '--workdir={tmp}/run', '--config.sampler.context=300'], '= 416'),
        ([PAGE, '--workdir={tmp}/run', '--config.policy.path={tmp}/none'], 'no such folder'),
        (['--config=configs/drzero.py:tiny', '--workdir={tmp}/run'], "no variant 'tiny'"),
        (['--config=configs/quick.py'], 'no such file'),
        (['--config={tmp}/broken.py'], 'could not be loaded: SyntaxError'),
        (['--confg=configs/quickstart.py'], 'Did you mean: config'),
        ([PAGE], 'give --workdir=FOLDER'),
        ([PAGE, '--workdir={tmp}/broken.py/run'], 'there is a file in this place'),
        ([], 'no config; give one of --config=configs/ablations.py'),
    ],
)
def test_a_wrong_command_ends_with_one_line_and_nothing_heavy_loaded(tmp_path, arguments, contains):
    (tmp_path / 'broken.py').write_text('def get_config(:\n')
    result = run(*(argument.format(tmp=tmp_path) for argument in arguments))
    trace, said = [], []
    for line in result.stderr.splitlines():
        (trace if line.startswith('import time:') else said).append(line)
    assert result.returncode == 2
    assert len(said) == 1 and contains in said[0]
    modules = {line.rpartition('|')[2].strip().partition('.')[0] for line in trace}
    assert 'ml_collections' in modules  # the trace is one of imports
    assert not modules & {'jax', 'tensorflow', 'transformers', 'flax', 'scann', 'clu'}
    assert not (tmp_path / 'run').exists()


def test_help_shows_a_command():
    result = run('--help')
    assert 'python -m zeroplay_jax.main --config=configs/quickstart.py --workdir=' in result.stdout
    assert '--workdir' in result.stdout
