"""Graded evaluation of a file of open tasks, in a folder that belongs to one policy and file and can be resumed.

The folder holds `run.json`, with config and inputs to which its answers are bound, `answers.jsonl` and `grades.jsonl`
(`record`), and at the end `results.json` and `results.md`. The judge grades every answer, rubric by rubric. It is not
bound: its settings are part of the name under which grades are recorded, so that another judge grades the same answers,
and the results say how far both agree.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

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
from zeroplay_jax.rollout.prompts import select
from zeroplay_jax.run import build, outcome, run_folder
from zeroplay_jax.runtime import disk, signals, workdir
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.selfplay.context import RolloutContext
from zeroplay_jax.selfplay.judge import GRADE_PROMPT, Judge, RuleJudge
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


def evaluate(config: Config, plan: Plan) -> dict[str, Any]:
    """Answers and grades the tasks that are not recorded yet; writes the results and returns them.

    Prints the estimate before the policy is loaded; with `plan.only_estimate` it is returned, and nothing else happens.

    Raises:
      UserError: an unusable file, a folder of another evaluation, or too many failed tool calls or judgements.
    """
    path = files.path_of_set(plan.source)
    all_tasks = load_tasks(path)
    # Tasks keep their positions in the file, so that an answer does not depend on the limit.
    tasks = files.sample(all_tasks, plan.limit or len(all_tasks), config.seed)
    key = _key(config)
    if key == 'rule':
        check_rubrics_of_rule(tasks, path)
    settings = {**config.to_dict(), 'evaluation': plan.sampling}
    # Answers do not depend on the judge, and grades are named by it.
    free = [name for name in fields.leaves(config) if name.startswith('judge.')]
    with workdir.claim(plan.folder, settings, (*fields.changeable_fields(config), *free)):
        inputs = _inputs(config, path)
        _check_inputs(plan.folder, inputs)
        record = GradingRecord(plan.folder)
        todo = estimate(tasks, key, record, plan.samples)
        if plan.only_estimate:
            return todo
        print(json.dumps(todo), flush=True)

        role = recipe_class(config.recipe).evaluated_role
        run = build.build(
            config,
            before_weights=lambda context: check_prompts(context, role, tasks, path),
            date=plan.date or run_folder.start_date([plan.folder]),
            judgements=['grade'] if todo['judgements'] else [],
        )
        inputs['retrieval'] = {run.library.about: {}}
        inputs |= run_folder.template_entry(run.template)
        _check_inputs(plan.folder, inputs)
        recorded = run_record.read(plan.folder) or run_record.Record(
            run_record.plain_config(settings)
        )
        run_record.write(plan.folder, dataclasses.replace(recorded, inputs=inputs))
        _grade(config, plan, tasks, key, record, run)
        about = result_settings(
            config,
            policy=str(run.folder),
            retrieval=run.library.about,
            # Not 'rubrics', which counts a verdict that was not given as not met.
            metric='rubrics of given verdicts',
            limit=plan.limit,
            judge=key,
            template=run.template,
            **plan.sampling,
        )
        name = pathlib.Path(path).stem
        result = grading_results.results(about, name, tasks, key, record, plan.samples)
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


def _key(config: Config) -> str:
    """Returns the judge's name in the record, which changes with its model, limits, temperature and prompt."""
    judge = config.judge
    if judge.kind == 'rule':
        return 'rule'
    is_server = judge.kind == 'endpoint'
    model = judge.grade_model or judge.model
    description = f'endpoint {model}' if is_server else judge.kind
    prompt = select(config.prompts, recipe_class(config.recipe).prompts)[GRADE_PROMPT]
    tokens = judge.grade_tokens or judge.tokens
    request = judge.request if is_server else ''
    identity = [description, judge.temperature, tokens, prompt.user, prompt.system, request]
    stated = [value for value in identity if value != '']
    digest = hashlib.sha256(json.dumps(stated).encode()).hexdigest()
    return f'{description} {digest[:_KEY_DIGITS]}'


def estimate(
    tasks: Sequence[RubricTask], key: str, record: GradingRecord, samples: int
) -> dict[str, int]:
    """Returns what is not recorded yet: 'tasks', 'rollouts' to sample and 'judgements' of the judge with this key.

    A judgement of a missing answer is unnecessary; of an answer that is not there yet it counts.
    """
    asked = 0
    for judgement in judgements(tasks, key, samples):
        answers = record.answers.get(judgement.task)
        is_missing = answers is not None and not answers[judgement.sample].text
        asked += not is_missing and not record.is_graded(judgement)
    unanswered = sum(task.id not in record.answers for task in tasks)
    return {'tasks': len(tasks), 'rollouts': unanswered * samples, 'judgements': asked}


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
    key: str,
    record: GradingRecord,
    run: build.RunContext,
) -> None:
    """Answers and grades what is not recorded, with a progress bar."""
    named = judgements(tasks, key, plan.samples)
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

    assert run.evaluation.judge is not None
    with progress.Bar(len(named), 'judgements', initial=graded, shown=config.progress) as bar:
        grade_tasks(
            run.evaluation,
            answering_recipe(config),
            tasks,
            Grader(run.evaluation.judge, key, record, config.judge.at_once, bar.update),
            **plan.sampling,
            check_tools=check_tools,
        )


def grade_tasks(
    context: RolloutContext,
    recipe: Recipe,
    tasks: Sequence[RubricTask],
    grader: Grader,
    *,
    samples: int = 1,
    temperature: float | None = None,
    check_tools: Callable[[], None] = do_nothing,
) -> None:
    """Answers the tasks without recorded answers, and asks the judgements without a recorded reply; records both.

    Args:
      context: roles, scheduler and prompts.
      recipe: answers.
      grader: has the judge and the record.
      samples, temperature: of the answers to a task, as of `answering.answer`.
      check_tools: raises if too many tool calls failed, or no search found a passage, since its last call.

    Raises:
      UserError: too many judgements have no verdict, or too many tool calls failed. What was recorded until then stays.
    """
    record = grader.record
    grader.count_recorded(judgements(tasks, grader.key, samples))
    # Answers after a failed tool call, or after searches that found nothing, which measure the policy only if these are
    # rare. They are recorded when this is known, so that a search server that is down or empty leaves nothing behind
    # that would be resumed.
    held: dict[str, tuple[Answer, ...]] = {}

    async def run_task(task: RubricTask) -> None:
        """Answers and grades one task."""
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
        await grader.grade(task)

    grader.begin()
    context.scheduler.run([run_task(task) for task in tasks])
    check_tools()
    for task_id, answers in held.items():
        record.add_answers(task_id, answers)
    grader.begin()
    context.scheduler.run([grader.grade(task) for task in tasks if task.id in held])
    # A small evaluation ends before the first look.
    grader.check_lost()


def _is_doubtful(trajectory: Trajectory) -> bool:
    """Returns whether a tool call failed other than by a mistake of the policy, or no search found a passage."""
    rows = [row for call in trajectory.calls for row in call.documents]
    has_found_nothing = bool(rows) and not any(rows)
    return has_found_nothing or trajectory.has_tool_failure


class Grader:
    """Asks the judge for its grades and records them; stops if too many of them have no verdict.

    Args:
      judge: the judge.
      key: its name in the record.
      record: of answers and grades.
      at_once: largest number of judgements in progress.
      on_grades: called with the number of judgements that are done, or that a missing answer makes superfluous.
    """

    def __init__(
        self,
        judge: Judge,
        key: str,
        record: GradingRecord,
        at_once: int,
        on_grades: Callable[[int], None] = do_nothing,
    ):
        self.key, self.record = key, record
        self._judge, self._at_once, self._on_grades = judge, at_once, on_grades

    def count_recorded(self, named: Sequence[Judgement]) -> None:
        """Counts the replies of an earlier start, also those without a verdict: they are not asked again."""
        for judgement in filter(self.record.is_graded, named):
            self._judge.stats['asked'] += 1
            if lost := self.record.grades[judgement].lost:
                self._judge.stats[lost] += 1

    def begin(self) -> None:
        """Prepares for another event loop."""
        # A semaphore belongs to the loop in which somebody first waited for it.
        self._limit = asyncio.Semaphore(self._at_once)

    async def grade(self, task: RubricTask) -> None:
        """Has all recorded answers to a task graded by all rubrics that are not graded yet."""
        pending = []
        answers = self.record.answers[task.id]
        for judgement in judgements([task], self.key, len(answers)):
            text = answers[judgement.sample].text
            if self.record.is_graded(judgement):
                continue
            # A missing answer meets no rubric without doubt, so no judgement is spent on it.
            if text:
                pending.append(self._ask(task, text, judgement))
            else:
                self._on_grades(1)
        await asyncio.gather(*pending)

    async def _ask(self, task: RubricTask, text: str, judgement: Judgement) -> None:
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
        self.record.add_grade(judgement, grade)
        if judge.stats['asked'] >= _FIRST_LOOK:
            self.check_lost()
        self._on_grades(1)

    def check_lost(self) -> None:
        """Raises UserError if too many judgements have no verdict."""
        stats = self._judge.stats
        try:
            self._judge.check_failure_rate(stats)
        except UserError as error:
            fix = 'that repeats failed requests'
            if stats['unread']:
                fix += '; to repeat those whose replies could not be read, remove their lines from grades.jsonl'
            raise UserError(f'config.judge: {error}; {fix}') from None
