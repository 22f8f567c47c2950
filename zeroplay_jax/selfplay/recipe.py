"""The base class of recipes. A recipe declares roles, schedule, tasks and episodes; the engine does the rest.

A recipe is a module with a class `Recipe`. The config names it by its file in `recipes/`
(`config.recipe='drzero'`) or by its import path (`'their_package.rzero'`). Recipe modules do not import JAX,
because a config is checked before slow libraries are loaded.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.util
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from zeroplay_jax.objectives.registry import did_you_mean
from zeroplay_jax.rollout.prompts import Prompts
from zeroplay_jax.selfplay.answers import prompt_fields
from zeroplay_jax.selfplay.judge import PROMPTS, Judgement
from zeroplay_jax.selfplay.schedule import BatchCursor, Phase, QuestionPool, Step, all_steps
from zeroplay_jax.settings.kinds import AbsentSection, ConfigError, Problem, Section
from zeroplay_jax.types import Json, Outcome, Question, Task, Trajectory, UserError, first_line

if TYPE_CHECKING:
    from zeroplay_jax.selfplay.context import RolloutContext
    from zeroplay_jax.selfplay.library import Library

# Name of the slot pool with the frozen weights of the start.
INITIAL_WEIGHTS = 'initial'
# Names that no role of a recipe may have: those of the roles of config.judge, and names of weights.
RESERVED_ROLES = (INITIAL_WEIGHTS, 'judge', 'judge_grader', 'policy')
# Built-in recipes. Every config has their sections, so that one config file can switch between recipes.
BUILT_IN = ('drzero', 'piplay', 'ssp', 'dspo', 'scope')
BUILT_IN_PACKAGE = 'zeroplay_jax.recipes.'

# Characters of an error that a line about a recipe's state quotes.
_QUOTED_CHARACTERS = 120
# Smallest number of tasks of each kind of phase whose prompts are measured before a run.
_MEASURED_TASKS = 64


@dataclasses.dataclass(frozen=True)
class RoleSpec:
    """One role of a recipe.

    Attributes:
      name: name in metrics and logs; for a trained role also that of its config section.
      prompt: name of its prompt.
      terminal_tags: closing one of these tags ends its rollout (`Trajectory.finish` is 'answer' then). Give the last
        tag that its prompt asks for: ('answer',) for a proposer that writes a question and then its answer. With a
        wrong one its texts are cut off, or `answers.final_answer` reads none.
      weights_from: trained role whose weights it uses; '': the role is trained itself; 'initial': the frozen
        weights of the start; 'solver@3': those of a trained role at the end of the third iteration (`Phase.iteration`
        2), 'solver@best' at its best evaluation (`checkpoint.best`), and before that moment those of the start. Such a
        role is greedy: for several rollouts give `ask` a temperature.
      tools: names of its tools; None: all of `config.tools.names`. A role without tools has one turn.
      groups_span_prompts: its advantage groups combine several prompts (HRPO groups by hop count),
        so that one rollout per prompt can be compared.
    """

    name: str
    prompt: str
    terminal_tags: tuple[str, ...] = ('answer',)
    weights_from: str = ''
    tools: tuple[str, ...] | None = None
    groups_span_prompts: bool = False

    @property
    def is_trained(self) -> bool:
        """Whether the role has weights of its own."""
        return not self.weights_from


class Recipe:
    """Base class of recipes. A subclass inherits all declarations and may change any of them.

    Attributes:
      settings: schemas of its additional config sections, by name: `config.<name>.FIELD`.
      prompts: name → text or `Prompt`, or name → {prompt set: that}; overrides prompts of ours of the same name.
      further_prompts: names of prompts that it and evaluations ask for beside those of its roles.
      input_files: fields of `config.inputs` that it reads; its config has no others.
      needed_file: that of them without which it cannot train on any corpus but miniature worlds; '': none.
      has_pool: whether it generates questions that are trained on later; its config then has the section `pool`.
      filterable_roles: roles for which `tasks` replaces groups without reward variance.
      distillable_roles: roles whose questions come with a construction path for a teacher.
      turn_reward_roles: roles whose rows have `Row.turn_rewards`.
      judge_roles: prompt of a judgement (`judge.PROMPTS`) → role of this prompt that gives it in training, with
        judge.kind=policy; the others, and those of evaluations, come from the frozen policy (`judge_reward`).
      evaluated_role: the role that held-out evaluations measure.
      has_open_tasks: whether its tasks are graded by rubrics; evaluations then grade open tasks as well.

    Args:
      config: config of the run.
      library: documents, questions and answers to start from.
    """

    # Declared, not computed: a config is checked against them before the recipe is constructed.
    settings: ClassVar[Mapping[str, type[Section]]] = {}
    prompts: ClassVar[Prompts] = {}
    further_prompts: ClassVar[tuple[str, ...]] = ('solver', 'solver.task', 'solver.teacher')
    input_files: ClassVar[tuple[str, ...]] = ()
    needed_file: ClassVar[str] = ''
    has_pool: ClassVar[bool] = True
    filterable_roles: ClassVar[tuple[str, ...]] = ()
    distillable_roles: ClassVar[tuple[str, ...]] = ()
    turn_reward_roles: ClassVar[tuple[str, ...]] = ()
    judge_roles: ClassVar[Mapping[str, str]] = {}
    evaluated_role: ClassVar[str] = 'solver'
    has_open_tasks: ClassVar[bool] = False

    def __init__(self, config: Any, library: Library):
        self.config = config
        self.library = library

    # `roles` and `check` are class methods, because a config is checked before the library and JAX are loaded.
    @classmethod
    def roles(cls, config: Any) -> tuple[RoleSpec, ...]:
        """Returns all roles, trained or frozen. It must not read `config.<role>` of any role."""
        raise ConfigError(f'{cls.__module__}: Recipe.roles is not defined; return its RoleSpecs')

    @classmethod
    def check(cls, config: Any) -> Iterable[Problem] | None:
        """Yields what is wrong between settings: `Problem(field, 'what is wrong; what to give')`."""
        return ()

    @classmethod
    def reads_documents(cls, config: Any) -> bool:
        """Returns whether training reads documents from the corpus (`Library.documents`)."""
        return 'documents' in cls.input_files and not config.inputs.documents

    @classmethod
    def judgements(cls, config: Any) -> tuple[str, ...]:
        """Returns which judgements of the judge (methods of `judge.Judge`) training and its evaluations ask for."""
        names = []
        if 'judge' in (config.reward.answer, config.eval.metric):
            names.append('correct')
        if config.eval.tasks:
            names.append('grade')
        return tuple(names)

    @classmethod
    def check_judge_roles(cls, config: Any) -> Iterator[Problem]:
        """Yields another judge beside roles that judge, and a role that training asks for no judgement."""
        if not cls.judge_roles:
            return
        if config.judge.kind != 'policy':
            yield Problem('judge.kind', f'roles of {config.recipe} judge; give policy')
        # Evaluations keep the judge of the config.
        evaluations = config.eval.model_copy(update={'metric': 'none', 'tasks': ''})
        asked = cls.judgements(config.model_copy(update={'eval': evaluations}))
        for role in dict.fromkeys(cls.judge_roles.values()):
            prompts = [prompt for prompt, name in cls.judge_roles.items() if name == role]
            names = [PROMPTS[prompt] for prompt in prompts]
            if not set(names) & set(asked):
                text = (
                    f'training asks role {role} for no {" or ".join(prompts)}; set what asks the judge, such as '
                    f'reward.answer=judge, or add {names[0]!r} to Recipe.judgements'
                )
                yield Problem('recipe', text)

    def phases(self) -> list[Phase]:
        """Returns the schedule without evaluations."""
        raise TypeError(f'{type(self).__module__}: Recipe.phases is not defined')

    def tasks(self, step: Step, pool: QuestionPool, cursor: BatchCursor) -> list[Task]:
        """Returns the next tasks of a step; an empty list ends the step. Called until then, once per round.

        It must be a function of the arguments alone, so that all processes and a resumed run get the same tasks. With
        `rollout.ahead` round 0 of a step is requested when the step before it begins, so that its questions are not in
        the pool yet.
        """
        raise TypeError(f'{type(self).__module__}: Recipe.tasks is not defined')

    # A coroutine, because thousands of episodes wait for their rollouts at the same time in one thread.
    async def episode(self, context: RolloutContext, step: Step, task: Task) -> Outcome:
        """Runs one task and returns its outcome. A `TaskDropped` that it raises becomes an outcome with its reason."""
        raise TypeError(f'{type(self).__module__}: Recipe.episode is not defined')

    def judge_reward(self, task: Task, judgement: Judgement, reply: int) -> float:
        """Returns the reward of reply number `reply` of a judgement; the default pays agreement with the majority.

        Called at the end of the episode of `task`, for every judgement by a role of `judge_roles` that the step trains.
        Such a judgement is `config.<role>.samples` replies at the role's temperature, which are rows of one group.
        """
        verdict = judgement.verdicts[reply]
        return float(verdict is not None and verdict == judgement.verdict)

    async def answer(
        self, context: RolloutContext, question: Question, identity: tuple[int, ...]
    ) -> Trajectory:
        """Returns the rollout that answers a question or an open task: in evaluations, `evaluate` and `ask`.

        The default asks `evaluated_role` once. A recipe whose agent is more than one rollout does here what its
        episodes do. It has `self.config` and no other attribute: the constructor, which needs the inputs of training,
        is not called. In `evaluate` and `ask` the policy that is given samples for all roles.

        Args:
          context: roles of the policy have the temperature of the evaluation; give `ask` none.
          identity: of the answer; put a number behind it for every request.
        """
        fields = prompt_fields(context, self.evaluated_role, question)
        (trajectory,) = await context.ask(self.evaluated_role, identity, 1, None, **fields)
        return trajectory

    # A recipe with a state overrides these three.
    def after_step(self, step: Step, outcomes: Sequence[Outcome]) -> None:
        """Changes the state by the outcomes of a step, after its update; the only place where a state changes.

        Called on all processes, with equal outcomes.

        Args:
          outcomes: one per task of the step, with all rows; `row.drop` is set, `row.advantage` as of the update. Rows
            of roles that the step does not train (`step.phase.trains`) are among them, as Dr. Zero's proposals while
            questions are collected, whose reward is 0.
        """

    def state(self) -> Json | None:
        """Returns the state of the run as JSON for a checkpoint; None: the recipe has none.

        `tasks` and `episode` of a step run on a copy of the recipe, with the state of the moment in which its first
        tasks were drawn. With `rollout.ahead` that is when the step before begins: they see one outcome less.
        """
        return None

    def restore(self, state: Json) -> None:
        """Sets the attributes of a `state` anew; it may not change objects that they refer to."""
        raise UserError(
            f'{type(self).__module__}: there is a state of the recipe, but Recipe.restore is not defined; define it '
            'with Recipe.state, or begin in a new workdir'
        )

    # A recipe may override the following two; the defaults suit recipes like the built-in ones.
    def first_tasks(self) -> list[tuple[Step, Task]]:
        """Returns tasks whose first prompts are measured before a run.

        Phases of one name are one kind. Of each kind, tasks are collected from its first steps until there are 64 or
        more. `tasks` is called with an empty pool, so a phase that trains on proposed questions has none.
        """
        selected: list[tuple[Step, Task]] = []
        tasks_of_phase: dict[str, int] = {}
        cursor = BatchCursor()
        for step in all_steps(self.phases()):
            name = step.phase.name
            if step.index == 0:
                cursor = BatchCursor()
            # Later iterations are not measured: a phase may begin again with the same items.
            is_first = step.phase.iteration == 0
            count = tasks_of_phase.get(name, 0)
            if not is_first or count >= _MEASURED_TASKS:
                continue
            batches = [self.config[role].batch for role in self.roles_with_tasks(step.phase)]
            cursor = dataclasses.replace(cursor, missing=max(batches, default=0))
            tasks = self.tasks(step, QuestionPool(), cursor)
            # Every n-th task is taken, because tasks may be sorted, for example by hop count.
            stride = max(len(tasks) // _MEASURED_TASKS, 1)
            for task in tasks[::stride]:
                selected.append((step, task))
            tasks_of_phase[name] = count + len(tasks[::stride])
            external = sum(task.external for task in tasks)
            cursor = BatchCursor(
                drawn_in_phase=cursor.drawn_in_phase + len(tasks),
                external=cursor.external + external,
            )
        return selected

    @classmethod
    def roles_with_tasks(cls, phase: Phase) -> list[str]:
        """Returns the trained roles of a phase whose batches are drawn: all but judges, unless it trains these alone.

        How much a judge is asked, and whether its replies differ, depends on the others.
        """
        others = [role for role in phase.trains if role not in cls.judge_roles.values()]
        return others or list(phase.trains)


class NoSuchRecipe(ConfigError):
    """No module of that name can be imported."""


def recipe_class(name: str) -> type[Recipe]:
    """Imports a recipe module and returns its class `Recipe`.

    Args:
      name: value of `config.recipe`: a built-in name or an import path.

    Raises:
      NoSuchRecipe, ConfigError: one line; there is no such module, it cannot be imported, or it has no `Recipe` of its
        own.
    """
    path = name
    built_in_path = f'{BUILT_IN_PACKAGE}{name}'
    # A name without a dot that is not built in may be a single file of the user, my_recipe.py.
    if '.' not in name and importlib.util.find_spec(built_in_path):
        path = built_in_path
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        # The recipe exists, but a module that it imports does not: the error must name that module.
        if error.name and not path.startswith(error.name):
            raise ConfigError(
                f'config.recipe={name}: it imports {error.name}, which is not installed'
            ) from None
        raise NoSuchRecipe(
            f'config.recipe={name}: no such recipe; give one of {", ".join(BUILT_IN)}, or the import '
            'path of a module such as their_package.rzero, in the current folder or installed'
            f'{did_you_mean(name, BUILT_IN)}'
        ) from None
    except Exception as error:
        # The module is code of the user and may raise any exception.
        reason = first_line(error)
        if str(error):
            reason = f'{type(error).__name__}: {reason}'
        raise ConfigError(f'config.recipe={name}: {path} cannot be imported ({reason})') from error
    recipe_type = getattr(module, 'Recipe', None)
    if isinstance(recipe_type, type) and issubclass(recipe_type, Recipe):
        # A module that only imports the base class also has an attribute `Recipe`.
        if recipe_type is not Recipe:
            _check_class_methods(name, recipe_type)
            return recipe_type
    raise ConfigError(
        f'config.recipe={name}: {path} has no class Recipe of its own; derive one from '
        'zeroplay_jax.selfplay.recipe.Recipe'
    )


def _check_class_methods(name: str, recipe: type[Recipe]) -> None:
    """Raises ConfigError for a method that is called without an instance and is no class method."""
    for method in ('roles', 'check', 'judgements', 'reads_documents'):
        # A class method takes the config alone; one of an instance would take `self` too.
        if len(inspect.signature(getattr(recipe, method)).parameters) != 1:
            raise ConfigError(
                f'config.recipe={name}: Recipe.{method} is called before there is a recipe; write @classmethod above it'
            )


def reads_pool(recipe: type[Recipe]) -> bool:
    """Returns whether a config of a recipe has the section `pool`."""
    # Methods that a recipe inherits read what its bases declare.
    bases = [each for each in recipe.__mro__ if issubclass(each, Recipe)]
    return any(each.has_pool for each in bases if each is not Recipe)


def roles_of(recipe: type[Recipe], config: Any) -> tuple[RoleSpec, ...]:
    """Returns the roles of a recipe.

    Raises:
      AbsentSection: it reads a section that the config lacks.
    """
    try:
        return tuple(recipe.roles(config))
    except AttributeError as error:
        if error.obj is not config:
            raise
        raise AbsentSection(recipe.__module__, str(error.name)) from error


def answering_recipe(config: Any) -> Recipe:
    """Returns `config.recipe` with its config alone, for `Recipe.answer`."""
    recipe_type = recipe_class(config.recipe)
    recipe = recipe_type.__new__(recipe_type)
    recipe.config = config
    return recipe


def asks_once(recipe: Recipe) -> bool:
    """Returns whether a recipe answers by one rollout of its evaluated role."""
    return type(recipe).answer is Recipe.answer


def trained_roles(config: Any) -> tuple[str, ...]:
    """Returns the names of the trained roles of `config.recipe`, in the recipe's order."""
    roles = recipe_class(config.recipe).roles(config)
    return tuple(role.name for role in roles if role.is_trained)


def weights_of_roles(config: Any) -> dict[str, str]:
    """Returns trained role → name of its weights: the role's name, or 'policy' unless config.weights='separate'."""
    is_separate = config.weights == 'separate'
    return {role: role if is_separate else 'policy' for role in trained_roles(config)}


def state_of(recipe: Recipe) -> Json | None:
    """Returns `Recipe.state` as a checkpoint gives it back; None without one.

    Raises:
      UserError: it is not JSON.
    """
    state = recipe.state()
    try:
        stored = json.loads(json.dumps(state, allow_nan=False))
        problem = '' if stored == state else f'what is read back differs: {stored}'
    except (TypeError, ValueError) as error:
        problem = str(error)
    if problem:
        raise UserError(
            f'{type(recipe).__module__}: Recipe.state returns no JSON ({problem[:_QUOTED_CHARACTERS]}); give finite '
            'numbers, texts, lists, and dicts with texts as keys'
        )
    return stored


def with_state(recipe: Recipe, state: Json | None) -> Recipe:
    """Returns a copy of a recipe with a state of its own, for the tasks and episodes of a step; None: the recipe.

    Raises:
      UserError: the copy shares objects with the recipe that its state changes.
    """
    if state is None:
        return recipe
    before = state_of(recipe)
    of_step = copy.copy(recipe)
    of_step.restore(copy.deepcopy(state))
    if state_of(recipe) != before or state_of(of_step) != state:
        raise UserError(
            f'{type(recipe).__module__}: Recipe.restore does not give back what state returned, or changes objects in '
            'place; set every attribute of the state anew'
        )
    return of_step


def check_unchanged(recipe: Recipe, state: Json | None) -> None:
    """Raises UserError if tasks or episodes of a step changed the state with which it was drawn.

    Args:
      recipe: the recipe of the step, of `with_state`.
      state: the state of the step.
    """
    if state is not None and state_of(recipe) != state:
        raise UserError(
            f'{type(recipe).__module__}: the state of the recipe changed while a step ran; change it in '
            'Recipe.after_step alone, and set its attributes anew in Recipe.restore'
        )
