"""Graded evaluation of a file of open tasks, in a folder that belongs to one policy and file and can be resumed.

The folder holds `run.json`, with config and inputs to which its answers are bound, `answers.jsonl` and `grades.jsonl`
(`evaluation.play`), and at the end `results.json` and `results.md`. Judges are not bound: their settings are
part of the name under which grades are recorded, so that another judge grades the same answers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import types
from collections.abc import Mapping, Sequence
from typing import Any

from zeroplay_jax.configuration import fields
from zeroplay_jax.data import files
from zeroplay_jax.evaluation import play, question_sets, statistics
from zeroplay_jax.evaluation.play import GradingRecord, NamedJudge, is_needed, judgements
from zeroplay_jax.evaluation.question_sets import RubricTask
from zeroplay_jax.extras.grading import grading_results
from zeroplay_jax.retrieval import progress
from zeroplay_jax.rollout.prompts import Prompt, fill, select
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.runtime import disk, signals, workdir
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.selfplay.context import RolloutContext
from zeroplay_jax.selfplay.judge import GRADE_PROMPT, Judge, RuleJudge, TextJudge
from zeroplay_jax.selfplay.judge_endpoint import check_judge, endpoint_writer
from zeroplay_jax.selfplay.recipe import answering_recipe, recipe_class
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.training import build, outcome, run_folder
from zeroplay_jax.types import UserError

RESULTS = 'results.json'
PAGE = 'results.md'
_KEY_DIGITS = 8


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to evaluate.

    Attributes:
      source: file of open tasks (`question_sets.load_tasks`), or its name on the Hub.
      folder: folder of the evaluation.
      samples, temperature: of the answers to a task, as of `question_sets.ask_question`.
      limit: number of tasks drawn from the file; 0: all. A later start may have another limit.
      only_estimate: whether to print the estimate and stop.
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


class _OnlyEstimate(Exception):
    """Ends an evaluation of which only the estimate was wanted."""


def evaluate(config: Config, plan: Plan) -> dict[str, Any]:
    """Plays and grades the tasks that are not recorded yet; writes the results and returns them.

    Prints the estimate before the weights are loaded. With `plan.only_estimate` nothing else happens, and the numbers
    of the estimate are returned.

    Raises:
      UserError: an unusable file, a folder of another evaluation, or too many failed tool calls or judgements.
    """
    path = question_sets.path_of(plan.source)
    all_tasks = question_sets.load_tasks(path)
    # Tasks keep their positions in the file, so that an answer does not depend on the limit.
    tasks = files.sample(all_tasks, plan.limit or len(all_tasks), config.seed)
    costs = _judge_costs(config)
    settings = {**config.to_dict(), 'evaluation': plan.sampling}
    free = _free_fields(config)
    with workdir.claim(plan.folder, settings, free):
        inputs = _inputs(config, path)
        _check_inputs(plan.folder, inputs)
        with GradingRecord(plan.folder) as grading:
            estimates: list[JudgeEstimate] = []

            def before_weights(context: RolloutContext) -> None:
                """Prints the estimate; refuses long prompts, rubrics that no rule reads, judges without verdicts."""
                role = recipe_class(config.recipe).evaluated_role
                play.check_prompts(context, role, tasks, path)
                if any(config[cost.name].kind == 'rule' for cost in costs):
                    play.check_rubrics_of_rule(tasks, path)
                estimates.extend(_estimate(plan, tasks, costs, grading, context, role))
                if plan.only_estimate:
                    raise _OnlyEstimate
                for estimate in estimates:
                    name = estimate.cost.name
                    if config[name].kind == 'endpoint' and estimate.judgements:
                        check_judge(context, _settings_of(config, name), ['grade'], name)

            try:
                run = build.build(
                    config,
                    before_weights=before_weights,
                    date=plan.date or run_folder.start_date([plan.folder]),
                )
            except _OnlyEstimate:
                return _estimate_json(tasks, estimates)
            inputs['retrieval'] = {run.library.about: {}}
            inputs |= run_folder.template_entry(run.template)
            _check_inputs(plan.folder, inputs)
            recorded = run_record.read(plan.folder) or run_record.Record(
                run_record.plain_config(settings)
            )
            run_record.write(plan.folder, dataclasses.replace(recorded, inputs=inputs))
            _grade(config, plan, tasks, costs, grading, run)
            # The first judge is that whose scores `compare` reads.
            about = question_sets.result_settings(
                config,
                policy=str(run.folder),
                retrieval=run.library.about,
                # Not 'rubrics', which counts a verdict that was not given as not met.
                metric='rubrics of given verdicts',
                limit=plan.limit,
                judge=costs[0].key,
                template=run.template,
                **plan.sampling,
            )
            result = grading_results.results(
                about,
                pathlib.Path(path).stem,
                tasks,
                {cost.name: cost.key for cost in costs},
                grading,
                plan.samples,
            )
    text = json.dumps(result, ensure_ascii=False, indent=1)
    disk.write_text(plan.folder / RESULTS, text + '\n')
    disk.write_text(plan.folder / PAGE, grading_results.markdown(result))
    return result


def summary_text(result: Mapping[str, Any], folder: pathlib.Path) -> str:
    """Returns the figures of a result (`grading_results.results`) as lines for the terminal."""
    lines = []
    for name, judge in result['judges'].items():
        counts = judge['judgements']
        lines.append(
            f'{name:14}rubrics met {statistics.interval_text(judge["rubrics_met"])}, '
            f'{counts["unread"]:,} replies not read, {counts["failed"]:,} requests without a reply'
        )
    measured = result['agreement']
    if measured is not None:
        lines.append(
            f'{"agreement":14}{statistics.interval_text(measured["raw"])}, '
            f"Cohen's kappa {grading_results.kappa_text(measured)}"
        )
    lines.append(f'{"written":14}{folder / PAGE}')
    return '\n'.join(lines)


def _free_fields(config: Config) -> tuple[str, ...]:
    """Returns the fields that another start may change: answers do not depend on them, and grades are named by them."""
    free = list(fields.changeable_fields(config))
    for name in fields.leaves(config):
        if name.startswith(('judge.', 'second_judge.')):
            free.append(name)
    return tuple(free)


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


# ---- judges ------------------------------------------------------------------------------------------


def _judge_costs(config: Config) -> list[JudgeCost]:
    """Returns name, key and reply limit of the judge and, if there is one, of the second judge.

    Raises:
      UserError: both are the same judge.
    """
    costs = [_judge_cost(config, 'judge')]
    if config.second_judge.kind != 'none':
        costs.append(_judge_cost(config, 'second_judge'))
        if costs[0].key == costs[1].key:
            raise UserError(
                f'config.second_judge.kind={config.second_judge.kind}: is the same judge as config.judge '
                f'({costs[0].key}); give another model, temperature or kind'
            )
    return costs


def _settings_of(config: Config, name: str) -> types.SimpleNamespace:
    """Returns the settings of a judge, with those for grading; 'second_judge' has all fields of `judge`."""
    judge = config.judge
    settings = dict(judge) | {'grade_model': '', 'grade_tokens': 0}
    settings['model'] = judge.grade_model or judge.model
    settings['tokens'] = judge.grade_tokens or judge.tokens
    if name == 'second_judge':
        settings |= dict(config.second_judge)
    return types.SimpleNamespace(**settings)


def _judge_cost(config: Config, name: str) -> JudgeCost:
    """Returns name, key and reply limit of one judge."""
    settings = _settings_of(config, name)
    if settings.kind == 'rule':
        return JudgeCost(name, 'rule', 0)
    description = settings.kind
    if settings.kind == 'endpoint':
        description += f' {settings.model}'
    prompt = _templates(config)[GRADE_PROMPT]
    identity = [description, settings.temperature, settings.tokens, prompt.user]
    identity += filter(None, [prompt.system])
    if settings.kind == 'endpoint' and settings.request:
        identity.append(settings.request)
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:_KEY_DIGITS]
    return JudgeCost(name, f'{description} {digest}', settings.tokens)


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


# ---- estimate and grading ----------------------------------------------------------------------------


def _estimate(
    plan: Plan,
    tasks: Sequence[RubricTask],
    costs: Sequence[JudgeCost],
    record: GradingRecord,
    context: RolloutContext,
    role: str,
) -> list[JudgeEstimate]:
    """Prints the estimate and returns its part of each judge."""
    env = context.roles[role].env
    answer_tokens = env.limits.turn_tokens
    estimates = [
        estimate_judge(cost, tasks, record, plan.samples, env.codec, context.prompts, answer_tokens)
        for cost in costs
    ]
    print(estimate_text(tasks, record, plan.samples, answer_tokens, estimates), flush=True)
    return estimates


def _estimate_json(
    tasks: Sequence[RubricTask], estimates: Sequence[JudgeEstimate]
) -> dict[str, Any]:
    """Returns the numbers of an estimate."""
    judges = {}
    for estimate in estimates:
        judges[estimate.cost.name] = {
            'judgements': estimate.judgements,
            'prompt_tokens': estimate.prompt_tokens,
            'reply_tokens': estimate.reply_tokens,
        }
    return {'tasks': len(tasks), 'judges': judges}


def _grade(
    config: Config,
    plan: Plan,
    tasks: Sequence[RubricTask],
    costs: Sequence[JudgeCost],
    record: GradingRecord,
    run: build.RunContext,
) -> None:
    """Plays and grades what is not recorded, with a progress bar."""
    context = run.evaluation
    assert context.judge is not None
    of_name: dict[str, Judge] = {'judge': context.judge}
    if len(costs) > 1:
        of_name['second_judge'] = _second_judge(config)
    judges = []
    total = 0
    pending = 0
    for cost in costs:
        judges.append(NamedJudge(cost.name, cost.key, of_name[cost.name]))
        named = play.judgements(tasks, cost.key, plan.samples)
        total += len(named)
        pending += sum(not record.is_graded(judgement) for judgement in named)
    run.publish_weights(run.rollouts.scheduler.pools)
    # Until here Ctrl-C ended the process at once.
    signals.raise_again()
    # The slot pools have copies, so the loaded weights are dropped to free their memory.
    run = dataclasses.replace(run, params={})
    # Answers whose searches found something are recorded at once; an earlier start may have some.
    searched_before = any(
        answer.searches for answers in record.answers.values() for answer in answers
    )

    def check_tools() -> None:
        counts = run.check_and_reset_failures()
        if not searched_before:
            outcome.raise_if_nothing_found(config, counts)

    with progress.Bar(total, 'judgements', initial=total - pending, shown=config.progress) as bar:
        play.grade_tasks(
            context,
            answering_recipe(config),
            tasks,
            judges,
            record,
            at_once=config.judge.at_once,
            **plan.sampling,
            check_tools=check_tools,
            on_grades=bar.update,
        )


# ---- estimate --------------------------------------------------------------------------------------
#
# Rollouts, judge requests, and tokens at most.


@dataclasses.dataclass(frozen=True)
class JudgeCost:
    """What one judge costs.

    Attributes:
      name: 'judge' or 'second_judge'.
      key: its name in the record (`NamedJudge.key`).
      reply_tokens: longest reply; 0: a rule, which gets no requests.
    """

    name: str
    key: str
    reply_tokens: int


@dataclasses.dataclass(frozen=True)
class JudgeEstimate:
    """Estimate of the judgements of one judge that are not recorded yet.

    Attributes:
      cost: the judge.
      judgements: number of judgements; without the unnecessary ones of missing answers, as far as these are known.
      prompt_tokens: tokens of all prompts at most, by the policy's tokenizer.
      reply_tokens: tokens of all replies at most.
    """

    cost: JudgeCost
    judgements: int
    prompt_tokens: int
    reply_tokens: int


def estimate_judge(
    cost: JudgeCost,
    tasks: Sequence[RubricTask],
    record: GradingRecord,
    samples: int,
    codec: Codec,
    templates: Mapping[str, Prompt],
    answer_tokens: int,
) -> JudgeEstimate:
    """Returns the estimate of one judge.

    Recorded answers count with their own lengths, the others with `answer_tokens`.

    Args:
      samples: answers per task.
      codec: the policy's tokenizer; that of a judge at a server may differ by some tenths.
      templates: prompts by name.
      answer_tokens: longest answer of the policy (`rollout.turn_tokens`).
    """
    needed = 0
    prompt_tokens = 0
    empty_prompt = fill(templates[GRADE_PROMPT], task='', given='', rubric='')
    template_tokens = len(codec.render(empty_prompt))
    for task in tasks:
        named = judgements([task], cost.key, samples)
        pending = [judgement for judgement in named if is_needed(record, judgement)]
        needed += len(pending)
        if not pending or not cost.reply_tokens:
            continue
        task_tokens = _length(codec, task.question.text)
        rubric_tokens = [_length(codec, rubric) for rubric in task.rubrics]
        answers_tokens = [answer_tokens] * samples
        for sample, answer in enumerate(record.answers.get(task.id, ())):
            answers_tokens[sample] = _length(codec, answer.text or '')
        for judgement in pending:
            parts = task_tokens + rubric_tokens[judgement.rubric] + answers_tokens[judgement.sample]
            prompt_tokens += template_tokens + parts
    return JudgeEstimate(cost, needed, prompt_tokens, needed * cost.reply_tokens)


def _length(codec: Codec, text: str) -> int:
    return len(codec.encode_plain(text))


def estimate_text(
    tasks: Sequence[RubricTask],
    record: GradingRecord,
    samples: int,
    answer_tokens: int,
    judges: Sequence[JudgeEstimate],
) -> str:
    """Returns the estimate as lines of text, without a final newline.

    Args:
      answer_tokens: longest turn of the policy.
    """
    num_rubrics = sum(len(task.rubrics) for task in tasks)
    num_recorded = sum(task.id in record.answers for task in tasks)
    num_rollouts = (len(tasks) - num_recorded) * samples
    lines = [
        f'{"tasks":14}{len(tasks):,}, rubrics {num_rubrics:,}, answers per task {samples}',
        f'{"rollouts":14}{num_rollouts:,} to play, at most {answer_tokens:,} tokens a turn; '
        f'{num_recorded * samples:,} recorded',
    ]
    for estimate in judges:
        lines.append(f'{estimate.cost.name:14}{_judge_text(estimate)}')
    return '\n'.join(lines)


def _judge_text(estimate: JudgeEstimate) -> str:
    """Returns the estimate of a judge as a line without its name."""
    key = estimate.cost.key
    if not estimate.cost.reply_tokens:
        return f'{key}: {estimate.judgements:,} grades, no requests'
    return (
        f'{key}: {estimate.judgements:,} requests, at most {estimate.prompt_tokens:,} prompt tokens and '
        f'{estimate.reply_tokens:,} reply tokens'
    )
