"""Graded evaluation of a file of open tasks, in a folder that belongs to one policy and file and can be resumed.

The folder holds `run.json`, with config and inputs to which its answers are bound, `answers.jsonl` and `grades.jsonl`
(`record`), and at the end `results.json` and `results.md`. One judge or two grade every answer, rubric by rubric. They
are not bound: their settings are part of the name under which grades are recorded, so that another judge grades the
same answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import pathlib
import types
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from zeroplay_jax.configuration import fields
from zeroplay_jax.data import files
from zeroplay_jax.evaluation.answering import (
    Answer,
    answer,
    answer_of,
    check_prompt,
    do_nothing,
    result_settings,
)
from zeroplay_jax.extras.grading import grading_results
from zeroplay_jax.extras.grading.record import (
    Grade,
    GradingRecord,
    Judgement,
    RubricTask,
    judgements,
    load_tasks,
)
from zeroplay_jax.retrieval import progress
from zeroplay_jax.rollout.prompts import Prompt, select
from zeroplay_jax.run import build, outcome, run_folder
from zeroplay_jax.runtime import disk, signals, workdir
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.selfplay.context import RolloutContext
from zeroplay_jax.selfplay.judge import GRADE_PROMPT, Judge, RuleJudge, TextJudge
from zeroplay_jax.selfplay.judge_endpoint import check_judge, endpoint_writer
from zeroplay_jax.selfplay.recipe import Recipe, answering_recipe, recipe_class
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import Trajectory, UserError

RESULTS = 'results.json'
PAGE = 'results.md'
_KEY_DIGITS = 8
# Judgements before the share of lost ones is looked at: fewer say little, and a server that is down fails at once.
_FIRST_LOOK = 20
# All rollouts of an evaluation begin their identity with this number; a second evaluation in a process would need
# another one.
_NUMBER = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to evaluate.

    Attributes:
      source: file of open tasks (`record.load_tasks`), or its name on the Hub.
      folder: folder of the evaluation.
      samples, temperature: of the answers to a task, as of `answering.answer`.
      limit: number of tasks drawn from the file; 0: all. A later start may have another limit.
      only_estimate: whether to print what there is to do and stop.
      date: the day that a chat template gets; '': that of the first start in the folder.
    """

    source: str
    folder: pathlib.Path
    samples: int = 1
    temperature: float | None = None
    limit: int = 0
    only_estimate: bool = False
    date: str = ''

    @property
    def sampling(self) -> dict[str, Any]:
        """`samples`, and `temperature` if there is one."""
        sampling: dict[str, Any] = {'samples': self.samples}
        if self.temperature:
            sampling['temperature'] = self.temperature
        return sampling


class NamedJudge(NamedTuple):
    """A judge of a graded evaluation.

    Attributes:
      name: its section of the config, 'judge' or 'second_judge'.
      key: its name in the record of grades, which changes with its model, limits, temperature and prompt.
      judge: the judge; None before it is asked.
    """

    name: str
    key: str
    judge: Judge | None = None


def evaluate(config: Config, plan: Plan) -> dict[str, Any]:
    """Plays and grades the tasks that are not recorded yet; writes the results and returns them.

    Prints the estimate before the policy is loaded; with `plan.only_estimate` it is returned, and nothing else happens.

    Raises:
      UserError: an unusable file, a folder of another evaluation, or too many failed tool calls or judgements.
    """
    path = files.path_of_set(plan.source)
    all_tasks = load_tasks(path)
    # Tasks keep their positions in the file, so that an answer does not depend on the limit.
    tasks = files.sample(all_tasks, plan.limit or len(all_tasks), config.seed)
    judges = _judges(config)
    if any(judge.key == 'rule' for judge in judges):
        check_rubrics_of_rule(tasks, path)
    settings = {**config.to_dict(), 'evaluation': plan.sampling}
    free = [*fields.changeable_fields(config)]
    # Answers do not depend on judges, and grades are named by them.
    free += [name for name in fields.leaves(config) if name.startswith(('judge.', 'second_judge.'))]
    with workdir.claim(plan.folder, settings, tuple(free)):
        inputs = _inputs(config, path)
        _check_inputs(plan.folder, inputs)
        with GradingRecord(plan.folder) as record:
            todo = estimate(tasks, [judge.key for judge in judges], record, plan.samples)

            if plan.only_estimate:
                return todo
            print(json.dumps(todo), flush=True)

            def before_weights(context: RolloutContext) -> None:
                """Refuses long prompts, and judges without verdicts."""
                check_prompts(context, recipe_class(config.recipe).evaluated_role, tasks, path)
                for name, key, _ in judges:
                    if config[name].kind == 'endpoint' and todo['judgements'][key]:
                        check_judge(context, _settings_of(config, name), ['grade'], name)

            run = build.build(
                config,
                before_weights=before_weights,
                date=plan.date or run_folder.start_date([plan.folder]),
            )
            inputs['retrieval'] = {run.library.about: {}}
            inputs |= run_folder.template_entry(run.template)
            _check_inputs(plan.folder, inputs)
            recorded = run_record.read(plan.folder) or run_record.Record(
                run_record.plain_config(settings)
            )
            run_record.write(plan.folder, dataclasses.replace(recorded, inputs=inputs))
            _grade(config, plan, tasks, judges, record, run)
            # The first judge is that whose scores `compare` reads.
            about = result_settings(
                config,
                policy=str(run.folder),
                retrieval=run.library.about,
                # Not 'rubrics', which counts a verdict that was not given as not met.
                metric='rubrics of given verdicts',
                limit=plan.limit,
                judge=judges[0].key,
                template=run.template,
                **plan.sampling,
            )
            keys = {judge.name: judge.key for judge in judges}
            result = grading_results.results(
                about, pathlib.Path(path).stem, tasks, keys, record, plan.samples
            )
    text = json.dumps(result, ensure_ascii=False, indent=1)
    disk.write_text(plan.folder / RESULTS, text + '\n')
    disk.write_text(plan.folder / PAGE, grading_results.markdown(result))
    return result


def _inputs(config: Config, path: str) -> run_record.Entries:
    """Returns the fingerprints of all files that answers depend on, by config field; those of the tasks as '--sets'."""
    file = pathlib.Path(path)
    (digest,) = disk.file_digests([file])
    entry = {'bytes': file.stat().st_size, 'sha256': digest}
    # Without the name of the file, which may be moved.
    return {**run_folder.fingerprints(config), '--sets': {'the file of tasks': entry}}


def _check_inputs(folder: pathlib.Path, inputs: run_record.Entries) -> None:
    """Raises UserError if the answers in the folder were made from files with other content.

    Args:
      inputs: the current fingerprints; those of the record that are not among them are not compared.
    """
    recorded = run_record.read(folder)
    if recorded is None:
        return
    compared = {name: recorded.inputs.get(name, {}) for name in inputs}
    difference = run_record.find_difference(compared, inputs)
    if difference:
        raise UserError(
            f'--workdir={folder}: its answers were made with another content of {difference}; bring that back, or '
            'choose another folder'
        )


def _judges(config: Config) -> list[NamedJudge]:
    """Returns name and key of the judge and, if there is one, of the second judge; UserError if both are the same."""
    judges = [NamedJudge('judge', _key(config, 'judge'))]
    if config.second_judge.kind != 'none':
        judges.append(NamedJudge('second_judge', _key(config, 'second_judge')))
        if judges[0].key == judges[1].key:
            raise UserError(
                f'config.second_judge.kind={config.second_judge.kind}: is the same judge as config.judge '
                f'({judges[0].key}); give another model or kind'
            )
    return judges


def _settings_of(config: Config, name: str) -> types.SimpleNamespace:
    """Returns the settings of a judge, with those for grading; 'second_judge' has all fields of `judge`."""
    judge = config.judge
    settings = dict(judge) | {'grade_model': '', 'grade_tokens': 0}
    settings['model'] = judge.grade_model or judge.model
    settings['tokens'] = judge.grade_tokens or judge.tokens
    if name == 'second_judge':
        settings |= dict(config.second_judge)
    return types.SimpleNamespace(**settings)


def _key(config: Config, name: str) -> str:
    """Returns the name of a judge in the record."""
    settings = _settings_of(config, name)
    if settings.kind == 'rule':
        return 'rule'
    description = settings.kind
    if settings.kind == 'endpoint':
        description += f' {settings.model}'
    prompt = _templates(config)[GRADE_PROMPT]
    identity = [description, settings.temperature, settings.tokens, prompt.user]
    identity += filter(None, [prompt.system])
    if settings.kind == 'endpoint' and settings.request:
        identity.append(settings.request)
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:_KEY_DIGITS]
    return f'{description} {digest}'


def _templates(config: Config) -> dict[str, Prompt]:
    return select(config.prompts, recipe_class(config.recipe).prompts)


def _second_judge(config: Config) -> Judge:
    """Returns the second judge of a config that has one."""
    settings = _settings_of(config, 'second_judge')
    if settings.kind == 'rule':
        # Titles matter for gates only, which are not asked here.
        return RuleJudge(list, settings.rubrics, settings.max_failure_rate)
    writer = endpoint_writer(settings, _templates(config), 'second_judge')
    return TextJudge(writer, settings.rubrics, settings.max_failure_rate)


def estimate(
    tasks: Sequence[RubricTask], keys: Sequence[str], record: GradingRecord, samples: int
) -> dict[str, Any]:
    """Returns what is not recorded yet: 'tasks', 'rollouts' to play and 'judgements' per key of a judge.

    A judgement of a missing answer is unnecessary; of an answer that is not there yet it counts.
    """
    asked: dict[str, int] = {}
    for key in keys:
        asked[key] = 0
        for named in judgements(tasks, key, samples):
            answers = record.answers.get(named.task)
            is_missing = answers is not None and not answers[named.sample].text
            asked[key] += not is_missing and not record.is_graded(named)
    unplayed = sum(task.id not in record.answers for task in tasks)
    return {'tasks': len(tasks), 'rollouts': unplayed * samples, 'judgements': asked}


def check_prompts(
    context: RolloutContext, role: str, tasks: Sequence[RubricTask], path: str
) -> None:
    """Raises UserError for a task with a prompt longer than the role's limit; `path`: file of the tasks."""
    for task in tasks:
        try:
            check_prompt(context, role, task.question)
        except UserError as error:
            raise UserError(f'{path}, line {task.line}: {error}') from None


def check_rubrics_of_rule(tasks: Sequence[RubricTask], path: str) -> None:
    """Raises UserError for a rubric that the rule judge cannot read; `path`: file of the tasks."""
    for task in tasks:
        for number, rubric in enumerate(task.rubrics, 1):
            if not RuleJudge.can_read(rubric):
                raise UserError(
                    f'{path}, line {task.line}: rubric {number} states no fact of the miniature worlds, and the rule '
                    'judge reads no other; give --config.judge.kind=endpoint or policy'
                )


def _grade(
    config: Config,
    plan: Plan,
    tasks: Sequence[RubricTask],
    judges: Sequence[NamedJudge],
    record: GradingRecord,
    run: build.RunContext,
) -> None:
    """Plays and grades what is not recorded, with a progress bar."""
    of_name: dict[str, Judge | None] = {'judge': run.evaluation.judge}
    if len(judges) > 1:
        of_name['second_judge'] = _second_judge(config)
    judges = [judge._replace(judge=of_name[judge.name]) for judge in judges]
    named = [one for judge in judges for one in judgements(tasks, judge.key, plan.samples)]
    graded = sum(map(record.is_graded, named))
    run.publish_weights(run.rollouts.scheduler.pools)
    # Until here Ctrl-C ended the process at once.
    signals.raise_again()
    # The slot pools have copies, so the loaded weights are dropped to free their memory.
    run = dataclasses.replace(run, params={})
    # Answers whose searches found something are recorded at once; an earlier start may have some.
    searched_before = any(one.searches for answers in record.answers.values() for one in answers)

    def check_tools() -> None:
        counts = run.check_and_reset_failures()
        if not searched_before:
            outcome.raise_if_nothing_found(config, counts)

    with progress.Bar(len(named), 'judgements', initial=graded, shown=config.progress) as bar:
        grade_tasks(
            run.evaluation,
            answering_recipe(config),
            tasks,
            judges,
            record,
            at_once=config.judge.at_once,
            **plan.sampling,
            check_tools=check_tools,
            on_grades=bar.update,
        )


def grade_tasks(
    context: RolloutContext,
    recipe: Recipe,
    tasks: Sequence[RubricTask],
    judges: Sequence[NamedJudge],
    record: GradingRecord,
    *,
    at_once: int,
    samples: int = 1,
    temperature: float | None = None,
    check_tools: Callable[[], None] = do_nothing,
    on_grades: Callable[[int], None] = do_nothing,
) -> None:
    """Plays the tasks without recorded answers, and asks the judgements without a recorded reply; records both.

    Args:
      context: roles, scheduler and prompts.
      recipe: answers.
      at_once: largest number of judgements of one judge in progress.
      samples, temperature: of the answers to a task, as of `answering.answer`.
      check_tools: raises if too many tool calls failed, or no search found a passage, since its last call.
      on_grades: called with the number of judgements that are done, or that a missing answer makes superfluous.

    Raises:
      UserError: too many judgements of a judge have no verdict, or too many tool calls failed. What was recorded until
        then stays.
    """
    graders = [_Grader(judge, record, tasks, samples, at_once) for judge in judges]
    # Answers after a failed tool call, or after searches that found nothing, which measure the policy only if these are
    # rare. They are recorded when this is known, so that a search server that is down or empty leaves nothing behind
    # that would be resumed.
    held: dict[str, tuple[Answer, ...]] = {}

    async def play(task: RubricTask) -> None:
        """Plays and grades one task."""
        if task.id not in record.answers:
            identity = (_NUMBER, task.index)
            trajectories = await answer(
                context, recipe, identity, task.question, samples, temperature
            )
            answers = tuple(map(answer_of, trajectories))
            if any(map(_is_doubtful, trajectories)):
                held[task.id] = answers
                return
            record.add_answers(task.id, answers)
        await grade_answers(task)

    async def grade_answers(task: RubricTask) -> None:
        """Has the recorded answers to one task graded by all judges."""
        # Judges do not wait for each other.
        answers = record.answers[task.id]
        await asyncio.gather(*(grader.grade(task, answers, on_grades) for grader in graders))

    _run(context, graders, [play(task) for task in tasks])
    check_tools()
    for task_id, answers in held.items():
        record.add_answers(task_id, answers)
    _run(context, graders, [grade_answers(task) for task in tasks if task.id in held])
    # A small evaluation ends before the first look.
    for grader in graders:
        grader.check_lost()


def _run(
    context: RolloutContext, graders: Sequence[_Grader], episodes: Sequence[Coroutine]
) -> None:
    """Runs episodes in an event loop of their own."""
    for grader in graders:
        grader.begin()
    context.scheduler.run(episodes)


def _is_doubtful(trajectory: Trajectory) -> bool:
    """Returns whether a tool call failed other than by a mistake of the policy, or no search found a passage."""
    rows = [row for call in trajectory.calls for row in call.documents]
    has_found_nothing = bool(rows) and not any(rows)
    return has_found_nothing or trajectory.has_tool_failure


class _Grader:
    """Asks one judge for its grades, and stops if too many of them have no verdict."""

    def __init__(
        self,
        judge: NamedJudge,
        record: GradingRecord,
        tasks: Sequence[RubricTask],
        samples: int,
        at_once: int,
    ):
        assert judge.judge is not None
        self._name, self._key, self._judge = judge.name, judge.key, judge.judge
        self._record = record
        self._at_once = at_once
        self.begin()
        # Replies without a verdict of an earlier start count, too: they are not asked again.
        for judgement in judgements(tasks, self._key, samples):
            if record.is_graded(judgement):
                grade = record.grades[judgement]
                self._judge.stats['asked'] += 1
                if grade.lost:
                    self._judge.stats[grade.lost] += 1

    def begin(self) -> None:
        """Prepares for another event loop."""
        # A semaphore belongs to the loop in which somebody first waited for it.
        self._limit = asyncio.Semaphore(self._at_once)

    async def grade(
        self, task: RubricTask, answers: Sequence[Answer], on_grades: Callable[[int], None]
    ) -> None:
        """Has all answers to a task graded by all rubrics that are not graded yet."""
        pending = []
        for judgement in judgements([task], self._key, len(answers)):
            text = answers[judgement.sample].text
            if self._record.is_graded(judgement):
                continue
            # A missing answer meets no rubric without doubt, so no judgement is spent on it.
            if text:
                pending.append(self._ask(task, text, judgement, on_grades))
            else:
                on_grades(1)
        await asyncio.gather(*pending)

    async def _ask(
        self,
        task: RubricTask,
        text: str,
        judgement: Judgement,
        on_grades: Callable[[int], None],
    ) -> None:
        """Asks for one grade and records it."""
        judge = self._judge
        identity = (_NUMBER, task.index, judgement.sample, judgement.rubric)
        rubric = task.rubrics[judgement.rubric]
        async with self._limit:
            met = await judge.grade(identity, task.question.text, text, rubric)
            grade = Grade(met)
            if met is None:
                # These are of this very judgement: no other coroutine runs between the judge's return and this line.
                grade = Grade(None, judge.last_lost, judge.last_failure)
        self._record.add_grade(judgement, grade)
        if judge.stats['asked'] >= _FIRST_LOOK:
            self.check_lost()
        on_grades(1)

    def check_lost(self) -> None:
        """Raises UserError if too many judgements have no verdict."""
        stats = self._judge.stats
        try:
            self._judge.check_failure_rate(stats)
        except UserError as error:
            fix = 'that repeats failed requests'
            if stats['unread']:
                fix += '; to repeat those whose replies could not be read, remove their lines from grades.jsonl'
            raise UserError(f'config.{self._name}: {error}; {fix}') from None
