"""Another run's checkpoint: which one is taken while that run goes on, and which adapters are refused."""

import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refused_calls import refused
from run_records import write_record

from zeroplay_jax.configs import drzero
from zeroplay_jax.configuration import fields
from zeroplay_jax.learner.checkpoint import Checkpointer, saved_steps
from zeroplay_jax.policy import adapters
from zeroplay_jax.runtime import remote_workdir
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.remote_workdir import StepRemoved
from zeroplay_jax.selfplay import recipe as recipes
from zeroplay_jax.selfplay.recipe import recipe_class
from zeroplay_jax.settings.kinds import InputPath, Section
from zeroplay_jax.training import branch, run_folder
from zeroplay_jax.training.loop import Saver
from zeroplay_jax.types import UserError

FACTORS = {'layer_0': {'q': {adapters.A: jnp.ones((4, 2)), adapters.B: jnp.ones((2, 4))}}}


def multiple(factor):
    return jax.tree.map(lambda x: x * factor, FACTORS)


def save(workdir, *steps, keep=2, **parts):
    checkpoints = Checkpointer(workdir, keep)
    for step in steps:
        checkpoints.save(step, {'solver': {'params': multiple(step)} | parts}, {'cursor': step})
    checkpoints.close()


class Learner:
    """The parts of a learner that loading needs."""

    def __init__(self):
        self.mesh = jax.make_mesh((1,), ('data',))
        self.initial_teacher = adapters.widened
        self.state = {'params': FACTORS, 'opt': {}, 'teacher': adapters.widened(FACTORS)}
        whole = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        self.shardings = jax.tree.map(lambda _: whole, self.state)

    def restore(self, state):
        self.state = state


@pytest.fixture
def engine():
    published = []
    return types.SimpleNamespace(
        learners={'solver': Learner()},
        value_networks={},
        publish=lambda name, version: published.append(name),
        take_snapshots=lambda: None,
        published=published,
    )


def test_a_half_removed_step_is_not_taken(tmp_path):
    save(tmp_path, 2, 4)
    (tmp_path / 'checkpoints' / '4' / 'checksums.sha256').unlink()
    assert branch.newest_checkpoint(tmp_path).step == 2


def test_a_run_that_removes_the_checkpoint_meanwhile_gives_its_next_one(
    tmp_path, engine, monkeypatch
):
    save(tmp_path, 2)
    origin = branch.find(Hosts(), tmp_path / 'new', str(tmp_path), is_resumed=False)
    assert origin.step == 2
    # The other run goes on while this one is built, and again while it reads.
    save(tmp_path, 4, keep=1)
    read = branch._read

    def read_late(source, *args):
        if source.step == 4:
            save(tmp_path, 6, keep=1)
        return read(source, *args)

    monkeypatch.setattr(branch, '_read', read_late)
    loaded = branch.load(Hosts(), origin, engine)
    assert loaded.step == 6 and engine.published == ['solver']
    for array in jax.tree.leaves(engine.learners['solver'].state['params']):
        np.testing.assert_array_equal(array, 6)


class SecondHost:
    """The second process of two; `replies` are the values of the first one."""

    index = 1
    is_first = False

    def __init__(self, *replies):
        self.replies = list(replies)

    def gather(self, value):
        return [self.replies.pop(0), value]

    def run_on_all_and_gather(self, call):
        return self.gather(call())

    def run_on_first(self, call, *arguments):
        return self.replies.pop(0)


@pytest.fixture
def find_copy(tmp_path, monkeypatch):
    """Finds a run in a bucket in the second of two processes; `steps` gives what each copying does to its folder."""
    copied = []

    def find(steps, *replies):
        def local_source(address, step):
            copied.append((address, step))
            steps.pop(0)()
            return str(tmp_path / 'copy')

        monkeypatch.setattr(remote_workdir, 'local_source', local_source)
        hosts = SecondHost('gs://bucket/old', *replies)
        return branch.find(hosts, tmp_path / 'new', 'gs://bucket/old', is_resumed=False)

    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    return types.SimpleNamespace(find=find, copied=copied, folder=tmp_path / 'copy')


def identity_of(workdir):
    """What the first process says of a checkpoint that is equal to the one in a folder."""
    return branch._content(branch.newest_checkpoint(workdir))


def raise_removed():
    raise StepRemoved('step 6 was removed')


def test_hosts_take_the_step_that_the_first_one_chooses_each_from_its_copy(find_copy):
    copy = find_copy.folder
    save(copy, 8)
    same = ['/copy', identity_of(copy)]
    # The run removes step 6 after the first process has copied it.
    steps = [raise_removed, lambda: None]
    source = find_copy.find(steps, 6, ['/copy', [6, 'a']], 8, same)
    assert source == branch.Source(copy, 8, copy / 'checkpoints' / '8', is_copy=True)
    assert find_copy.copied == [('gs://bucket/old', 6), ('gs://bucket/old', 8)]
    with pytest.raises(UserError, match='--from=gs://bucket/old: removes steps faster than all'):
        find_copy.find([raise_removed] * 5, *[6, same] * 5)


def test_another_step_of_the_same_number_is_refused(find_copy):
    save(find_copy.folder, 8)
    with pytest.raises(UserError, match='process 1 has another copy of checkpoint 8'):
        find_copy.find([lambda: None], 8, ['/copy', [8, '0' * 64]])


def test_a_copy_that_another_command_has_replaced_is_refused_before_it_is_read(tmp_path):
    save(tmp_path, 8)
    first = identity_of(tmp_path)
    save(tmp_path, 10, keep=1)
    with pytest.raises(UserError, match='process 1 has another copy of checkpoint 10'):
        branch.newest_on_all(SecondHost(first), tmp_path, is_copy=True)


def test_a_checkpoint_without_a_policy_or_removed_meanwhile_is_one_line(tmp_path):
    save(tmp_path, 8)
    source = branch.newest_checkpoint(tmp_path)
    branch.check_policies(source, ['solver'])
    with pytest.raises(UserError, match='has the policies solver and not proposer'):
        branch.check_policies(source, ['proposer'])
    shutil.rmtree(source.folder)
    with pytest.raises(UserError, match='checkpoint 8 was removed meanwhile; run the command'):
        branch.check_policies(source, ['solver'])


def test_what_cannot_be_read_is_an_error_if_there_is_no_other_checkpoint(
    tmp_path, engine, monkeypatch
):
    save(tmp_path, 2)
    origin = branch.newest_checkpoint(tmp_path)

    def fail(*_):
        raise FileNotFoundError

    monkeypatch.setattr(branch, '_read', fail)
    with pytest.raises(FileNotFoundError):
        branch.load(Hosts(), origin, engine)


BASE = {'policy.path': {'model.safetensors': {'bytes': 1, 'sha256': 'a'}}}


def make_config():
    config = drzero.get_config('mini')
    config.policy.adapters.rank = 4
    return config


@pytest.fixture
def check_against(tmp_path):
    """Returns a function that checks configs and files against a run of this config."""
    (tmp_path / 'checkpoints').mkdir()
    (tmp_path / 'best').mkdir()

    def begin(config, folder=tmp_path):
        write_record(tmp_path, config, inputs=BASE)
        source = branch.Source(folder, 1, tmp_path)
        return lambda config, files=BASE: branch.check_adapters(source, config, files)

    return begin


@pytest.mark.parametrize(
    ('field', 'value'),
    [('rank', 8), ('rank', 0), ('alpha', 8.0), ('linears', ('q', 'v')), ('quantize', 'int8')],
)
@pytest.mark.parametrize('folder', ['', 'best'])
def test_adapters_that_mean_something_else_are_refused(
    tmp_path, check_against, field, value, folder
):
    config = make_config()
    check = check_against(config, tmp_path / folder)
    check(config)
    config.policy.adapters.update({field: value})
    assert f'policy.adapters.{field}=' in refused(check, config)


def test_adapters_of_another_base_are_refused_whatever_it_is_called(check_against):
    config = make_config()
    check = check_against(config)
    other = {'policy.path': {'model.safetensors': {'bytes': 1, 'sha256': 'b'}}}
    config.policy.path = 'moved'
    check(config)
    with pytest.raises(UserError, match='another base .*model.safetensors has other bytes'):
        check(config, other)


def test_after_a_step_back_the_best_evaluation_is_saved_again(tmp_path):
    """Its checkpoint had replaced the best one before, and is later than the run."""
    engine = types.SimpleNamespace(
        device_state=lambda: {'w': jnp.ones(3)},
        host_state=dict,
        recipe=recipes.Recipe({}, None),
        take_snapshots=lambda moment: None,
    )
    first = {'cursor': 0, 'seconds': 0.0}

    def evaluated(state, number, value):
        checkpoints = types.SimpleNamespace(is_shared=True)
        saver = Saver(Hosts(), tmp_path, 'em/mean', engine, checkpoints, state)
        saver.save_if_best(number, {'em/mean': value})
        saver.close()
        return saved_steps(tmp_path / 'best'), state.get('best')

    best = {'metric': 'em/mean', 'value': 0.5, 'checkpoint': 2}
    assert evaluated(first, 2, 0.5) == ([2], best)
    assert evaluated({'cursor': 2, 'seconds': 0.0, 'best': best}, 6, 0.7)[0] == [6]
    # The checkpoints of the run end at 4, so step 6 is another one now, and that of 2 is gone.
    resumed = {'cursor': 4, 'seconds': 0.0, 'best': best}
    assert evaluated(resumed, 6, 0.4) == ([6], best | {'value': 0.4, 'checkpoint': 6})


def test_a_text_that_happens_to_name_a_file_is_no_input(tmp_path, monkeypatch):
    """Only fields that are paths are inputs, those of a recipe's own settings among them."""
    monkeypatch.chdir(tmp_path)
    config = make_config()
    for name in (config.judge.model, 'questions.jsonl'):
        (tmp_path / name).write_text('a file')
    config.inputs.questions = 'questions.jsonl'
    assert run_folder.fingerprints(config).keys() == {'policy.path', 'inputs.questions'}

    class Settings(Section):
        notes: InputPath = ''
        title: str = ''

    class Recipe(recipe_class('drzero')):
        settings = {**recipe_class('drzero').settings, 'noted': Settings}

    monkeypatch.setattr(recipes, 'recipe_class', lambda name: Recipe)
    config = fields.default_config('elsewhere')
    config.noted.update(notes='questions.jsonl', title='questions.jsonl')
    assert run_folder.fingerprints(config).keys() == {'policy.path', 'noted.notes'}
