"""Every mistake in a config or a command line is one line that names it, before anything heavy is loaded."""

import os
import pathlib
import subprocess
import sys

import pytest

from zeroplay_jax import config as configuration
from zeroplay_jax import rules
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
    with pytest.raises(configuration.ConfigError) as caught:
        configuration.check(config)
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
    configuration.check(config)


def test_every_field_of_the_list_has_a_check():
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
    }
    checked_elsewhere |= {
        'eval.file',
        'eval.tasks',
        'retrieval.path',
        'retrieval.encoder',
        'retrieval.url',
    }
    names = {
        name
        for name, value in configuration.fields(common.get_config())
        if not isinstance(value, bool)
    }
    assert names == set(configuration.RULES) | checked_elsewhere


WRONG = [  # field, value, what the line must contain beside the field
    ('seed', -1, 'give 0 or more'),
    ('recipe', 'drzreo', 'drzero'),
    ('policy.dtype', 'float16', 'float32, bfloat16'),
    ('distributed.mode', 'ring', 'give one of off, auto, coordinator'),
    ('mesh.model', 0, 'give 1 or more, or -1'),
    ('sampler.slots', 0, 'give 1 or more'),
    ('rollout.tool_timeout', 0.0, 'more than 0'),
    ('tools.family', 'json', 'search_r1, r_search, qwen, olmo'),
    ('world.train', (0,), 'first seed'),
    ('world.near_misses', 1.5, 'give 0 to 1'),
    ('schedule.hop_ratio', (0, 0, 0, 0), 'not all 0'),
    ('schedule.hop_ratio', (5, 4, 3, 2, 1), 'up to four'),
    ('schedule.group', 'hops', 'hop, prompt'),
    ('reward.solves', 1, 'give 2 or more'),
    ('pool.window', (0.8, 0.2), 'low ≤ high'),
    ('eval.hops', (1, 1), 'each once'),
    ('solver.learning_rate', 0.0, 'more than 0'),
    ('solver.learning_rate', float('nan'), 'more than 0'),
    ('proposer.beta2', 1.0, 'less than 1'),
    ('proposer.aggregation', 'tokens', 'seq_mean_token_mean'),
    ('solver.dual_clip', 0.5, 'more than 1'),
    ('world.train', (0, 999), 'let first + count be 63 or less'),
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
    configuration.check(sound)  # only the one change below is wrong
    sound.update_from_flattened_dict({field: value})
    text = message(sound)
    assert text.startswith(f'config.{field}=')
    assert contains in text


def test_a_wrong_type_names_the_type(sound):
    raw = sound.unlock().to_dict()
    raw['seed'] = True  # Python takes True for a whole number, the check does not
    assert 'must be a whole number' in message(configuration.ConfigDict(raw))
    raw['seed'], raw['world']['train'] = 0, ('a', 'b')
    assert 'config.world.train' in message(configuration.ConfigDict(raw))


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
    configuration.check(sound)
    sound.sampler.slots = 97
    assert message(sound).startswith('config.sampler.slots=97')
    sound.mesh.fsdp = -1  # known only with the devices
    configuration.check(sound)
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
    configuration.check(sound)
    sound.distributed.process = 2
    assert 'count from 0' in message(sound)


def test_the_kernel_for_tpus_needs_whole_tiles(sound):
    sound.policy.attention = 'splash'
    sound.micro.tokens = 1000
    assert 'steps of 128' in message(sound)
    sound.micro.tokens = 1024
    configuration.check(sound)
    sound.solver.update(distill_top_k=8, distill_coef=(0.1,))
    sound.privileged.tokens = 673
    assert message(sound).startswith('config.privileged.tokens=673')


def test_what_is_kept_for_the_backward_pass_needs_one_that_recomputes(sound):
    sound.policy.remat_policy = 'dots_with_no_batch_dims_saveable'
    assert message(sound).startswith('config.policy.remat_policy=')
    sound.policy.remat = True
    configuration.check(sound)


def test_a_teacher_reads_one_context_per_rollout(sound):
    sound.rollout.drop_thinking = True
    configuration.check(sound)
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
    configuration.check(sound, measured=False)
    sound.eval.file = 'nowhere.jsonl'
    assert message(sound).startswith('config.eval.file=nowhere.jsonl: no such file')
    sound.eval.update(file='README.md', tasks='nowhere.jsonl')
    assert message(sound).startswith(
        'config.judge.kind=rule: the rule knows the miniature worlds only'
    )
    sound.judge.update(kind='policy', tokens=64)
    assert message(sound).startswith('config.eval.tasks=nowhere.jsonl: no such file')


def test_a_file_that_the_recipe_never_reads_is_refused(sound):
    sound.inputs.questions = 'README.md'
    assert message(sound).startswith('config.inputs.questions=README.md: recipe drzero takes none')
    sound.recipe = 'dspo'
    configuration.check(sound)


def test_a_group_by_prompt_needs_several_rollouts(sound):
    sound.schedule.group = 'prompt'
    assert message(sound).startswith('config.proposer.samples=1')
    sound.proposer.update(baseline='none', scale='none')
    configuration.check(sound)


def test_updates_on_older_rollouts_need_a_ratio(sound):
    sound.solver.minibatches = 4
    configuration.check(sound)
    sound.solver.loss = 'reinforce'
    assert 'set solver.loss to token_pg' in message(sound)


@pytest.mark.parametrize('name', FILES)
def test_a_checkpoint_without_one_of_its_files_is_refused(sound, checkpoint, name):
    (checkpoint / name).unlink()
    assert 'the folder has no' in message(sound)


def test_the_built_in_checkpoint_says_how_it_is_made(sound, monkeypatch, tmp_path):
    monkeypatch.setattr(rules, 'BUILT_IN', tmp_path / 'gone')
    sound.policy.path = ''
    assert 'python -m zeroplay_jax.mini.base_model' in message(sound)


def run(*arguments):
    command = [sys.executable, '-X', 'importtime', '-m', 'zeroplay_jax.main', *arguments]
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
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
        ([], 'which run?'),
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
