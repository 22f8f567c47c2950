"""Whole runs that several files read: whoever asks first plays one, in its own process; the others wait for it.

Of every run there is a copy of its folder as a kill leaves it, just before a step is saved: the logs have a step that
no checkpoint has.
"""

import shutil

import ahead_runs
import example_runs
import filelock
import pytest
from python_process import ROOT

from zeroplay_jax.configs import ablations, cross, drzero, dspo, piplay, scope, ssp
from zeroplay_jax.configuration import places
from zeroplay_jax.configuration.fields import fit_to_recipe
from zeroplay_jax.configuration.rules import check
from zeroplay_jax.learner.checkpoint import Checkpointer
from zeroplay_jax.run import loop
from zeroplay_jax.selfplay.recipe import trained_roles

PROMPTS = ROOT / 'configs' / 'drzero_prompts.toml'


def small(config):
    """The config of a miniature run, smaller still."""
    config.world.update(train=(0, 4), evaluation=(0, 2))
    config.eval.update(questions=1, hops=(1,))
    config.sampler.slots, config.micro.rows = 8, 2
    # In so few rollouts a step may have no reward variance.
    config.stop_after_empty_steps = 0
    # For the auditor.
    config.log.rows = tuple(range(16))
    return config


def with_pool(config):
    """Two steps of each role, and a pool of eight questions between them."""
    small(config)
    config.proposer.update(steps=2, batch=8)
    config.solver.update(steps=2, batch=4)
    config.pool.update(batch=8, batches=1)
    config.schedule.hop_ratio = (2, 1, 1)
    return config


def piplay_config():
    """Adapters over one base, with a teacher; the merged weights are exported as well."""
    config = with_pool(piplay.get_config('mini'))
    config.policy.adapters.update(rank=4, merge=True)
    for role in trained_roles(config):
        config[role].learning_rate = 1e-3
    return config


def dspo_config():
    """A filter of groups, whose surplus is kept for the next step."""
    config = small(dspo.get_config('mini'))
    config.solver.update(batch=2, minibatches=2)
    return config


def truncated_config():
    """The same with tokens that are drawn from a few ids, which travel with the surplus."""
    config = dspo_config()
    config.solver.update(top_p=0.9, top_k=20)
    return config


def scope_config():
    """A pool of tasks that is full after the first batch, and a judge."""
    config = small(scope.get_config('mini'))
    config.proposer.update(steps=2, batch=4)
    config.solver.update(steps=2, batch=4)
    config.pool.update(batch=4, batches=3, target=1)
    return config


def ppo_config():
    """A value network beside the policy."""
    config = small(ablations.get_config('dspo/search_r1_ppo:mini'))
    config.inputs.world_questions = 16
    config.solver.update(steps=3, batch=4, samples=2, minibatches=2, learning_rate=1e-3)
    config.value_network.learning_rate = 1e-3
    return config


def league_config():
    """Snapshots of adapters, a state of the recipe, and steps that begin early."""
    config = small(ahead_runs.make_config())
    config.solver.update(steps=2, fill_rounds=1)
    config.schedule.iterations = 2
    config.eval.update(questions=2, every=2)
    config.checkpoint.best = 'em/mean'
    config.inputs.world_questions = 16
    config.policy.adapters.rank = 4
    config.recipe = 'tests.selfplay.league_recipe'
    fit_to_recipe(config)
    return config


def prompts_config():
    """Prompts of a user, which are long, and a pool that two roles share."""
    config = with_pool(drzero.get_config('mini'))
    config.prompts = str(PROMPTS)
    config.schedule.hop_ratio = (1, 1)
    config.rollout.update(prompt_tokens=640, max_turns=2, turn_tokens=32)
    config.sampler.context = config.micro.tokens = 1024
    return config


# Name → (its config, the step before whose checkpoint it is killed).
RUNS = {
    'drzero': (lambda: with_pool(drzero.get_config('mini')), 4),
    'piplay': (piplay_config, 5),
    'dspo': (dspo_config, 3),
    'truncated': (truncated_config, 3),
    'scope': (scope_config, 5),
    'ssp': (lambda: small(ssp.get_config('mini')), 3),
    'cross': (lambda: with_pool(cross.get_config('mini')), 5),
    'ppo': (ppo_config, 3),
    'league': (league_config, 4),
    'prompts': (prompts_config, 4),
    'folding': (lambda: example_runs.make_config('folding'), 3),
    'hint': (lambda: example_runs.make_config('hint', 'hinter'), 3),
}


def config_of(name, workdir):
    """The config of a run as the command has it when the run begins or goes on in a workdir."""
    config = RUNS[name][0]()
    config.progress = False
    config.checkpoint.every = 1
    places.keep_prompts(config, workdir)
    check(config)
    return config


def play(name, folder):
    """Plays a run in `folder`/whole; what a kill leaves is in `folder`/killed."""
    workdir, killed_at, save = folder / 'whole', RUNS[name][1], Checkpointer.save

    def copy_and_save(self, step, *arguments):
        # The best evaluation is saved beside the checkpoints.
        is_checkpoint = self._folder.name == 'checkpoints'
        if is_checkpoint and step == killed_at and not (folder / 'killed').exists():
            self.wait()
            shutil.copytree(workdir, folder / 'killed')
        save(self, step, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointer, 'save', copy_and_save)
        loop.run(config_of(name, workdir), workdir)


def folder_of(name, temporary):
    """The folder of a run of this session; `temporary` is pytest's `tmp_path_factory`."""
    base = temporary.getbasetemp()
    # Processes of xdist have folders beside each other.
    session = base.parent if base.name.startswith('popen-') else base
    folder = session / f'run of {name}'
    with filelock.FileLock(session / f'{name}.lock'):
        if not (folder / 'is_whole').exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            play(name, folder)
            (folder / 'is_whole').touch()
    return folder


def whole(name, temporary):
    """The workdir of a whole run, to be read."""
    return folder_of(name, temporary) / 'whole'


def killed(name, temporary, target):
    """A copy of what the kill left, in `target`."""
    shutil.copytree(folder_of(name, temporary) / 'killed', target)
    return target
