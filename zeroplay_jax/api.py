"""The parts of a run as functions for notebooks and scripts: a policy, an index, rollouts, scores, a loss.

Every function composes the parts that a training run uses, so equal settings and seeds give equal tokens and numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from zeroplay_jax.configuration import command_line, fields, rules
from zeroplay_jax.configuration.places import keep_prompts
from zeroplay_jax.data.answer_fields import accepted_answers
from zeroplay_jax.evaluation.render import (
    SampledRollout,
    rollout_text,
    with_observations,
)
from zeroplay_jax.learner.role_update import step_loss
from zeroplay_jax.learner.weights_view import published
from zeroplay_jax.objectives import losses
from zeroplay_jax.objectives import rewards as reward_functions
from zeroplay_jax.objectives.advantages import LARGEST_REWARD
from zeroplay_jax.policy import adapter_config, hf
from zeroplay_jax.policy.families import FAMILIES
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.retrieval import downloads
from zeroplay_jax.retrieval.jax_options import check_options
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.rollout.prompts import select
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.run import build, policy_settings
from zeroplay_jax.runtime.workdir import check_is_folder
from zeroplay_jax.selfplay import library_builder
from zeroplay_jax.selfplay.answers import final_answer, metric_score
from zeroplay_jax.selfplay.groups import set_advantages
from zeroplay_jax.selfplay.library import SearchableCorpus
from zeroplay_jax.selfplay.recipe import RoleSpec, recipe_class
from zeroplay_jax.selfplay.update import micro_batches
from zeroplay_jax.settings.kinds import ConfigError, is_server
from zeroplay_jax.settings.schema import TrainedRole
from zeroplay_jax.tools.base import Tool
from zeroplay_jax.tools.registry import build_tools
from zeroplay_jax.types import Json, Question, Row, TaskDropped, Trajectory, UserError

_SOLVER = 'solver'
# How long a search server may take to become ready for somebody who waits.
READY_SECONDS = 5.0

# Rollouts of several questions: one list of samples per question.
Rollouts = Sequence[Sequence[Trajectory]]


@dataclasses.dataclass(frozen=True)
class Policy:
    """A model with its weights and tokenizer, and the settings with which it is sampled.

    Attributes:
      config: settings of rollouts, sampler, tools and prompts (see docs/configuration.md).
      opened: checkpoint folder, architecture, devices and tokenizer.
      params: weights, float32, sharded as for training.
    """

    config: ConfigDict
    opened: build.PolicyFolder
    params: Params

    def __repr__(self) -> str:
        # That of a dataclass has the whole config and all weights.
        count = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        family = FAMILIES[self.model.family]
        return f'Policy({str(self.opened.folder)!r}: {family.architecture}, {count:,} parameters)'

    @property
    def model(self) -> ModelConfig:
        """The architecture."""
        return self.opened.model

    @property
    def codec(self) -> Codec:
        """The tokenizer."""
        return self.opened.codec


@dataclasses.dataclass(frozen=True)
class Index:
    """Passages that a policy can search.

    Attributes:
      corpus: searches and opens documents.
      about: name of the corpus.
      questions: held-out questions with answers for the miniature world; none for other corpora.
    """

    corpus: SearchableCorpus = dataclasses.field(repr=False)
    about: str
    questions: tuple[Question, ...] = dataclasses.field(default=(), repr=False)

    def search(self, query: str) -> list[Json]:
        """Returns the passages {'id', 'title', 'text', 'score'} for one query, best first.

            index.search('Arvenburg')[0]['text']

        Raises:
          UserError: the query is not a text, or the search failed.
        """
        check_type('search: the query', query, str, 'give one text')
        (passages,) = self.corpus.search([query])
        if passages is None:
            reason = self.corpus.client.last_failure
            raise UserError(
                f'{self.about}: the search for {query!r} failed ({reason}); try it again'
            )
        return passages


def load_policy(path: str | pathlib.Path = '', settings: ConfigDict | None = None) -> Policy:
    """Returns the policy in a checkpoint folder. `settings` is copied.

        policy = zp.load_policy()
        policy = zp.load_policy('checkpoints/Qwen2.5-3B-Instruct', zp.config('drzero', changes={'sampler.slots': 16}))

    Args:
      path: Hugging Face folder, hf://owner/model or gs://bucket/path; '' is `settings.policy.path`, and where that is
        empty, the built-in tiny checkpoint.
      settings: how the policy is prompted and sampled. None: as zeroplay ask does it, with the config of its run if
        `path` lies in one, else as its tokenizer says; for an instruction-tuned model, zp.config('drzero').

    Raises:
      UserError: `settings` is not a config, or a file cannot be used.
    """
    path = _fetched('load_policy', str(path))
    if settings is None and path:
        settings = _settings_of(pathlib.Path(path))
    settings = _copy('load_policy', settings)
    settings.policy.path = path or _fetched('load_policy', settings.policy.path)
    opened = build.open_policy(settings)
    # Sharded as for training: losses read these weights directly, and the sampler's are made from them.
    params = hf.load(
        opened.folder, opened.model, opened.mesh, training_layout=True, progress=settings.progress
    )
    return Policy(settings, opened, params)


def open_index(source: str | pathlib.Path = '', settings: ConfigDict | None = None) -> Index:
    """Opens the corpus that a policy searches. `settings` is copied.

        index = zp.open_index()                                # the miniature world
        index = zp.open_index('indexes/wiki18_e5')             # a folder that zeroplay index wrote
        index = zp.open_index('http://127.0.0.1:8000')         # a search server

    Args:
      source: folder or address; '' is the miniature world with its held-out questions, whatever `settings.retrieval`
        names (unlike `load_policy`, where '' is `settings.policy.path`).
      settings: of which `retrieval` (except kind, path and url, which `source` decides), `tools`, `world`, `eval` and
        `progress` are read; None: the defaults.

    Raises:
      UserError: `settings` is not a config, the folder is not an index, or the server is not ready within five seconds.
    """
    settings = _copy('open_index', settings)
    command_line.prepare_process()
    place = str(source)
    if not place:
        settings.retrieval.kind = 'world'
    elif is_server(place):
        settings.retrieval.update(kind='http', url=place)
    else:
        settings.retrieval.update(kind='folder', path=_fetched('open_index', place))
        # That of a stored config may be a name on the Hub or an address.
        settings.retrieval.encoder = _fetched('open_index', settings.retrieval.encoder)
    return open_corpus(settings, READY_SECONDS)


def open_corpus(settings: ConfigDict, ready_seconds: float | None = None) -> Index:
    """Returns the corpus of `settings.retrieval`; `ready_seconds`: how long a server may take, None: as in a run."""
    if settings.retrieval.kind == 'world':
        corpus, questions = library_builder.held_out_corpus_and_questions(settings)
        return Index(corpus, 'the miniature world', questions)
    return Index(*library_builder.open_real_corpus(settings, ready_seconds))


def sample_rollouts(
    policy: Policy,
    index: Index,
    questions: Sequence[str],
    *,
    samples: int = 1,
    tools: Sequence[str | Tool] = ('search',),
    temperature: float = 1.0,
    seed: int = 0,
    step: int = 0,
) -> list[list[SampledRollout]]:
    """Returns per question `samples` rollouts in which the policy answers it with tools.

        rollouts = zp.sample_rollouts(policy, index, ['Who founded Arvenburg?'], samples=4)
        answer = rollouts[0][0].turns[-1].text

    Args:
      policy: sampled with the limits, tools' settings and prompts of its config.
      index: what the tools search and open; its settings gave the number of passages per query.
      questions: asked with the solver's prompt of `policy.config.prompts`.
      samples: rollouts per question.
      tools: built-in names, 'package.module:attribute', or Tool objects.
      temperature: 0 is greedy. Tokens are drawn from all ids, whatever top_p and top_k of a role are.
      seed, step: with the index of the question and of the sample they determine all randomness, as the seed and the
        number of a step do in a run.

    Raises:
      UserError: an unknown tool, a seed that is not possible, or a question that is blank or longer than
        `rollout.prompt_tokens`.
    """
    function = 'sample_rollouts'
    check_policy(function, policy)
    check_type(f'{function}: index', index, Index, 'give what zp.open_index() returns')
    check_questions(questions)
    check_sampling(temperature, samples=samples, seed=seed, step=step)
    check_tools(tools)
    settings = _copy(function, policy.config)
    settings.seed = seed
    settings.tools.names = tuple(tool for tool in tools if isinstance(tool, str))
    tools_by_name = build_tools(settings, index.corpus)
    # Tool objects are added last, so that one of them replaces a built-in tool of the same name.
    for tool in tools:
        if isinstance(tool, Tool):
            tools_by_name[tool.name] = tool
    # One role with one set of weights; both are called 'solver', like the prompt.
    context = build.rollout_context(
        settings,
        [RoleSpec(_SOLVER, _SOLVER)],
        policy.opened,
        tools_by_name,
        templates=select(settings.prompts, recipe_class(settings.recipe).prompts),
        weights={_SOLVER: _SOLVER},
    )
    # The same weights in the sampler's layout and dtype.
    of_sampler = published(policy.model, policy.opened.mesh, policy.params)
    context.scheduler.weights.publish(_SOLVER, of_sampler)

    env = context.roles[_SOLVER].env

    async def ask(number: int, question: str) -> list[SampledRollout]:
        # The engine and evaluations use the same identity for item `number` of step `step`.
        identity = (step, number)
        try:
            rollouts = await context.ask(_SOLVER, identity, samples, temperature, question=question)
        except TaskDropped as drop:
            raise UserError(
                f'{function}: questions[{number}] ({question[:60]!r}) cannot be asked: {drop.reason}; shorten it '
                'or raise rollout.prompt_tokens'
            ) from None
        return [with_observations(rollout, env) for rollout in rollouts]

    episodes = [ask(number, question) for number, question in enumerate(questions)]
    return context.scheduler.run(episodes)


def show(trajectory: Trajectory) -> str:
    """Returns a rollout as text: the policy's turns, its tool calls and what it read of their results.

        print(zp.show(rollouts[0][0]))

    A result that was longer than `rollout.observation_tokens` ends with the number of tokens that were left out. Of a
    rollout that `sample_rollouts` did not return the results are whole.

    Raises:
      UserError: `trajectory` is not a single rollout.
    """
    if not isinstance(trajectory, Trajectory):
        kind = type(trajectory).__name__
        raise UserError(f'show: the rollout is a {kind}; give one rollout, such as rollouts[0][0]')
    return rollout_text(trajectory)


def score(
    rollouts: Rollouts,
    answers: Sequence[Sequence[str] | str],
    metric: str | reward_functions.AnswerMetric = 'em',
) -> Float[np.ndarray, 'questions samples']:
    """Returns the scores of the final answers of rollouts, each in [0, 1]; float64 [questions, samples].

        scores = zp.score(rollouts, [['Mara Velling', 'M. Velling']])

    Args:
      rollouts: per question its samples; equally many for each.
      answers: accepted answers per question, read as in a file of questions: also numbers.
      metric: 'em', 'subem', 'f1', 'package.module:function', or the function (prediction, accepted answers) itself.

    Raises:
      UserError: there is no such metric, it raises an error or returns something else than a number in [0, 1], or there
        is not one entry of `answers` per question.
    """
    check_rollouts('score', rollouts)
    answer_lists = answer_texts(answers, rollouts)
    try:
        metric_function = reward_functions.resolve_answer_metric(metric)
    except ValueError as error:
        raise UserError(f'score: {error}') from None
    scores = []
    for trajectories, accepted in zip(rollouts, answer_lists, strict=True):
        predictions = [final_answer(trajectory) for trajectory in trajectories]
        name = f'score: metric {metric!r}'
        scores.append([metric_score(name, metric_function, one, accepted) for one in predictions])
    return np.array(scores, np.float64)


def policy_loss(
    policy: Policy,
    rollouts: Rollouts,
    rewards: Float[np.ndarray, 'questions samples'] | Sequence[Sequence[float]],
    *,
    loss: str | losses.LossFunction = 'token_pg',
    params: Params | None = None,
    **settings: Any,
) -> tuple[Float[Array, ''], dict[str, Any]]:
    """Returns the loss that a training step on these rollouts minimises, and its statistics.

    Advantages are relative to the samples of the same question. With `params` the loss can be differentiated:

        loss, stats = zp.policy_loss(policy, rollouts, scores, loss='token_pg', baseline='loo', scale='none')
        gradient = jax.grad(lambda p: zp.policy_loss(policy, rollouts, scores, params=p)[0])(policy.params)

    Args:
      policy: model, weights and, in its config, the size of a micro-batch (`micro.rows`, `micro.tokens`).
      rollouts: per question its samples.
      rewards: one per rollout, in the same arrangement.
      loss: a name of `objectives.losses`, 'package.module:function', or the function or `PolicyLoss` itself.
      params: weights to evaluate; None: the policy's. A KL term compares them with the policy's.
      settings: fields of `config.<role>` (docs/configuration.md), such as the `temperature` that the rollouts were
        sampled with, 1 by default. Those of the optimiser and of sampling change no loss. Distillation and value
        networks need a run.

    Returns:
      The loss, float32 scalar; statistics as means, by the names that metrics.jsonl uses.

    Raises:
      UserError: there is no such loss or setting, not one reward per rollout, or a rollout is longer than
        `micro.tokens`.
    """
    function = 'policy_loss'
    check_policy(function, policy)
    check_rollouts(function, rollouts)
    rewards_of_rollouts = reward_table(rewards, rollouts)
    role = role_settings(loss, settings)
    rows = []
    for group, (trajectories, values) in enumerate(zip(rollouts, rewards_of_rollouts, strict=True)):
        for trajectory, value in zip(trajectories, values, strict=True):
            rows.append(Row(_SOLVER, trajectory, value, group))
    micro = policy.config.micro
    # Writes the advantages into `rows`, computed within groups as in a training step.
    group_stats = set_advantages(rows, role)
    total_loss, loss_stats = step_loss(
        policy.model,
        role,
        policy.params if params is None else params,
        policy.params,
        micro_batches(rows, role, (micro.rows, micro.tokens)),
    )
    # Statistics are (sum, count). One of no groups has count 0 and no mean; it is left out, as in metrics.jsonl.
    stats = {name: total / count for name, (total, count) in group_stats.items() if count}
    stats |= {name: total / count for name, (total, count) in loss_stats.items()}
    return total_loss, stats


def train(settings: ConfigDict, workdir: str | pathlib.Path) -> Json:
    """Trains a config to its end, or resumes it, like zeroplay train; returns the summary.

        summary = zp.train(zp.config('drzero', 'mini'), 'runs/mini')

    Args:
      settings: all settings of the run.
      workdir: folder of the run (checkpoints, metrics, report), or gs://bucket/path.

    Raises:
      UserError: a config that cannot run, or a workdir of another config.
      TrainingStopped: nothing was trained (`stop_after_empty_steps`), or an alarm (`alarms`); summary and report are
        written. Or an update made weights that are not finite.
    """
    check_settings('train', settings)
    check_type('train: workdir', workdir, str | pathlib.Path, "give a path, such as 'runs/first'")
    check_is_folder(workdir, allows_bucket=True)
    # Copied before: addresses in a bucket are replaced by the paths of their copies.
    settings = _copy('train', settings)
    keep_prompts(settings, workdir)
    rules.check(settings)
    fields.check(workdir, settings)
    # The processes of a run on several hosts have to be connected before JAX looks for devices.
    command_line.connect(settings)
    command_line.check_devices(settings)
    # Imports TensorBoard's writer and the report, which only a run needs.
    from zeroplay_jax.run import loop

    return loop.run(settings, workdir)


def _fetched(function: str, path: str) -> str:
    """Returns a path; that of a local copy for a name on the Hub or in a bucket; UserError if it cannot be fetched."""
    try:
        return downloads.fetch_model(path)
    except RetrievalError as error:
        raise UserError(f'{function}: {error}') from None


def _settings_of(folder: pathlib.Path) -> ConfigDict | None:
    """Returns the settings of a policy for this machine, or None for a folder that is no checkpoint."""
    # `open_policy` names the file that is missing.
    base = adapter_config.base_folder(folder)
    if not all((base / name).is_file() for name in ('config.json', 'tokenizer.json')):
        return None
    return on_this_machine(policy_settings.settings(folder))


def on_this_machine(settings: ConfigDict) -> ConfigDict:
    """Sets the devices of a stored config, which are those of its run, to the defaults; returns the config."""
    defaults = fields.default_config()
    for name in ('mesh', 'cpu_devices', 'distributed'):
        settings[name] = defaults[name]
    return settings


def _copy(function: str, settings: ConfigDict | None) -> ConfigDict:
    """Returns a copy of the settings that may be changed, or the defaults if `settings` is None.

    Raises:
      UserError: `settings` is not a config, which the error says with `function`, or a field of it is not possible.
    """
    if settings is None:
        return fields.default_config()
    check_settings(function, settings)
    fields.check_asked(settings)
    # Copied, so that the caller's config is not changed, and its later changes do not affect a loaded policy.
    return settings.copy_and_resolve_references()


# An error about an argument is one line: the function, the argument and the remedy.


_FLAT_ROLLOUTS = 'give what sample_rollouts returns: one list of rollouts per question'


def check_type(argument: str, value: Any, kind: Any, fix: str) -> None:
    """Refuses an argument of another type.

    Args:
      argument: 'function: name', for the error.
      value: of the argument.
      kind: as `isinstance` takes it; a text is no `Sequence`.
      fix: what to give.

    Raises:
      UserError: one line.
    """
    if not isinstance(value, kind) or (kind is Sequence and isinstance(value, str)):
        raise UserError(f'{argument} is a {type(value).__name__}; {fix}')


def check_settings(function: str, settings: Any) -> None:
    """Refuses settings that are not a config, as `check_type`."""
    fix = "give a config, such as zp.config('drzero', 'mini')"
    check_type(f'{function}: settings', settings, ConfigDict, fix)


def check_policy(function: str, policy: Any) -> None:
    """Refuses what is no policy, as `check_type`."""
    check_type(f'{function}: policy', policy, Policy, 'give what zp.load_policy() returns')
    # A notebook may have changed them since.
    check_options()


def check_questions(questions: Any) -> None:
    """Refuses questions that are not a list of texts, and blank ones, as `check_type`."""
    check_type('sample_rollouts: questions', questions, Sequence, 'give a list of texts')
    for number, question in enumerate(questions):
        argument = f'sample_rollouts: questions[{number}]'
        check_type(argument, question, str, 'give texts, such as question.text')
        if not question.strip():
            raise UserError(f'{argument} is empty; write one, or leave it out')


def check_sampling(temperature: Any, **whole_numbers: Any) -> None:
    """Raises UserError for a temperature, samples, seed or step that cannot be sampled with."""
    for name, value in whole_numbers.items():
        least = 1 if name == 'samples' else 0
        is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not is_whole or not least <= value <= fields.MAX_INT:
            fix = f'give a whole number from {least} to {fields.MAX_INT}'
            raise UserError(f'sample_rollouts: {name}={value!r} is not possible; {fix}')
    is_number = isinstance(temperature, int | float) and math.isfinite(temperature)
    if not is_number or temperature < 0:
        raise UserError(
            f'sample_rollouts: temperature={temperature!r} is not possible; give 0 (greedy) or more'
        )


def check_tools(tools: Any) -> None:
    """Refuses what is not a list of names and Tool objects, two tools of one name, and Tools that fail their check."""
    check_type('sample_rollouts: tools', tools, Sequence, "give a list, such as ['search']")
    names = []
    for tool in tools:
        fix = 'give names and objects of zeroplay_jax.tools.base.Tool'
        check_type('sample_rollouts: a tool', tool, str | Tool, fix)
        names.append(tool.name if isinstance(tool, Tool) else tool)
        if isinstance(tool, Tool):
            try:
                tool.check()
            except ValueError as error:
                raise UserError(f'sample_rollouts: a tool cannot be used: {error}') from None
    if len(set(names)) < len(names):
        raise UserError(
            f'sample_rollouts: tools: {names} has a name twice; leave one out or rename it'
        )


def check_rollouts(function: str, rollouts: Any) -> None:
    """Refuses rollouts that are not one list of rollouts per question, as `check_type`."""
    check_type(f'{function}: rollouts', rollouts, Sequence, _FLAT_ROLLOUTS)
    for number, samples in enumerate(rollouts):
        check_type(f'{function}: rollouts[{number}]', samples, Sequence, _FLAT_ROLLOUTS)
        for sample in samples:
            check_type(f'{function}: a rollout', sample, Trajectory, _FLAT_ROLLOUTS)


def answer_texts(answers: Any, rollouts: Sequence[Sequence[Trajectory]]) -> list[list[str]]:
    """Returns the accepted answers of each question, read as those of a question file.

    Raises:
      UserError: one line; not one entry per question, or an entry without an answer or of another type.
    """
    answers = _plain(answers)
    fix = 'give a list with the accepted answers of each question'
    check_type('score: answers', answers, Sequence, fix)
    if len(answers) != len(rollouts):
        raise UserError(
            f'score: {len(answers)} entries of answers for {len(rollouts)} questions; give one per question'
        )
    texts = []
    for number, accepted in enumerate(answers):
        try:
            texts.append(accepted_answers({'answers': accepted}))
        except ValueError as error:
            raise UserError(
                f'score: answers[{number}]: {error}; give a text or a list of texts'
            ) from None
    return texts


def _plain(value: Any) -> Any:
    """Returns a value with lists and Python's numbers, as a file has them; tables have NumPy's, questions tuples."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


def reward_table(rewards: Any, rollouts: Sequence[Sequence[Trajectory]]) -> list[list[float]]:
    """Returns the rewards as floats: one list per question with one reward per rollout.

    Raises:
      UserError: one line; the shape differs from that of `rollouts`, or a reward is no finite number or too large.
    """
    check_type('policy_loss: rewards', rewards, Iterable, 'give a table such as zp.score returns')
    table = []
    pairs = itertools.zip_longest(rewards, rollouts, fillvalue=())
    for number, (of_question, samples) in enumerate(pairs):
        try:
            values = np.asarray(of_question)
        except ValueError:
            # Of parts that differ in length.
            values = np.asarray(of_question, object)
        are_numbers = values.shape == (len(samples),) and values.dtype.kind in 'biuf'
        if not are_numbers or not (abs(values) <= LARGEST_REWARD).all():
            raise UserError(
                f'policy_loss: rewards of question {number} are {values.tolist()!r}, of {len(samples)} rollouts; give '
                f'a finite number up to {LARGEST_REWARD} for each, such as zp.score returns'
            )
        table.append(list(map(float, values)))
    return table


def role_settings(loss: str | losses.LossFunction, settings: Mapping[str, Any]) -> ConfigDict:
    """Returns all settings of a role: `settings` and `loss`, and defaults for the others.

    Raises:
      UserError: one line; an unknown loss or setting, a value out of bounds, distillation or a value network.
    """
    values = dict(settings)
    # A config holds names only; a function is added when the other fields are checked.
    if not callable(loss):
        values['loss'] = loss
    try:
        checked = fields.checked_section(TrainedRole, _SOLVER, values)
    except ConfigError as error:
        raise UserError(f'policy_loss: {error}') from None
    if callable(loss):
        with checked.ignore_type():
            checked.loss = loss
    try:
        losses.resolve_loss(loss)
    except ValueError as error:
        raise UserError(f'policy_loss: {error}') from None
    if checked.distill_top_k:
        raise UserError('policy_loss: rollouts have no teacher prompt; set distill_top_k to 0')
    if checked.baseline == 'value':
        raise UserError(
            'policy_loss: baseline=value needs a run, which has a value network; give mean, loo or none'
        )
    return checked
