"""Evaluates a policy folder: on the worlds' held-out questions, or on sets of questions.

    zeroplay evaluate --config=configs/quickstart.py
    zeroplay evaluate --config=configs/quickstart.py --policy=zeroplay_jax/mini/base
    zeroplay evaluate --config=configs/dspo.py --sets=nq,my_questions.jsonl --metric=em --out=result.json
    zeroplay evaluate --config=configs/scope.py --sets=my_tasks.jsonl --metric=rubrics
    zeroplay evaluate --config=configs/scope.py --sets=tasks.jsonl --metric=rubrics --workdir=runs/graded

--policy=FOLDER and --index=FOLDER or http://… are short for --config.policy.path and --config.retrieval, as in all
commands; a policy may be a model of the Hugging Face Hub (--policy=hf://owner/model), or behind an OpenAI-compatible
server, with tools as functions and config.prompts=full (--policy=https://…/v1#MODEL). Without --sets: exact match of
greedy answers by hop count with 95 % intervals. With --sets (files of JSON lines, hf://owner/dataset/path/file.jsonl,
or public names that are downloaded): a table with the sets and their average as columns, of mean scores with 95 %
intervals, searches and repeated queries (--format: text, markdown, csv, latex). --samples=N draws N answers to each
question, at the role's temperature or at --temperature: the mean of their scores ± its standard deviation over samples,
the best one (pass@k) and the majority's. --answering=direct,retrieve,interleave,search has a row for each way of
answering, of which all but search are baselines without training. --protocol=ssp, piplay, drzero, dspo or scope sets
what that paper says about questions, searches, lengths, sampling, metric and the table, where no other flag does. --out
keeps every question and answer (of several ways FILE-WAY.json), and `zeroplay compare` compares such
files. --metric=package.module:function scores answers with a function of your own, with the signature of
`reward.answer` (zeroplay_jax/objectives/rewards.py). --metric=rating asks for no answers: the judge of the config rates
how hard the questions are, from 1 to 5, and the scores are 0, .25, .5, .75 and 1.

Open-ended tasks (lines with "task" and "rubrics") are graded by the judge of the config, rubric by rubric. With
--workdir every answer and every grade is written into that folder as soon as it is there, and the same command
continues where it was stopped; it prints what is left to do before it begins (--estimate: nothing else). Another judge
grades the same answers, and the results say how far both agree (docs/grading.md).
The last line is always a JSON object.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import pathlib
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags
from ml_collections import ConfigDict

from zeroplay_jax.configuration import command_line, fields
from zeroplay_jax.configuration.places import fetch_model, keep_prompts
from zeroplay_jax.data import files
from zeroplay_jax.evaluation import protocols, statistics, tables
from zeroplay_jax.evaluation.results import Answered, Results, SetResults, heading
from zeroplay_jax.extras import load_extra
from zeroplay_jax.mini.question_form import warning_of
from zeroplay_jax.objectives import rewards
from zeroplay_jax.objectives.registry import resolve
from zeroplay_jax.retrieval import downloads, progress
from zeroplay_jax.retrieval.command import LOCAL_RESULTS
from zeroplay_jax.runtime import signals
from zeroplay_jax.runtime.workdir import check_is_folder
from zeroplay_jax.selfplay.recipe import answering_recipe, recipe_class
from zeroplay_jax.settings.kinds import is_server
from zeroplay_jax.settings.rollouts import ALL_IDS
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import Question, UserError

if TYPE_CHECKING:
    from zeroplay_jax.run.build import RunContext

_CONFIG = flags.DEFINE_string('config', None, 'What to evaluate: a Python file.')
_SETS = flags.DEFINE_list('sets', [], 'Question sets: files of JSON lines or public names.')
_METRIC = flags.DEFINE_string(
    'metric',
    'em',
    'How answers are scored: em, subem, f1, judge, rubrics or package.module:function; rating: how hard a judge calls '
    'the questions, from 0 (1 of 5) to 1.',
)
_SAMPLES = flags.DEFINE_integer(
    'samples',
    1,
    'Answers per question; several are sampled: their mean, the best one (pass@k) and the majority.',
    lower_bound=1,
)
_TEMPERATURE = flags.DEFINE_float(
    'temperature',
    None,
    'Of the answers; by default 0 for one sample, that of the role for several.',
    lower_bound=0.0,
)
_FORMAT = flags.DEFINE_enum(
    'format', 'text', tables.FORMATS, 'Form of the table: text, markdown, csv or latex.'
)
_LIMIT = flags.DEFINE_integer('limit', 0, 'Questions drawn from each set; 0: all.', lower_bound=0)
_ANSWERER = flags.DEFINE_string(
    'answerer', '', 'Policy that writes the answers after the searches of --policy.'
)
_ANSWERING = flags.DEFINE_list(
    'answering',
    ['search'],
    'Ways of answering, a row each: search, direct (no tools), retrieve (one search), interleave (a search per '
    'sentence).',
)
_PROTOCOL = flags.DEFINE_enum(
    'protocol',
    '',
    ['', *protocols.PROTOCOLS],
    'Evaluate as this paper does; other flags come first.',
)
_OUT = flags.DEFINE_string('out', '', 'File for every answer, as JSON.')
_WORKDIR = flags.DEFINE_string(
    'workdir', '', 'With --metric=rubrics: folder for answers, grades and results; resumable.'
)
_ESTIMATE = flags.DEFINE_bool(
    'estimate', False, 'With --workdir: print only what is left to do; --noestimate: evaluate.'
)
_DATE = flags.DEFINE_string(
    'date',
    '',
    'Day for chat templates that write the date, as 2026-11-25; by default today.',
)

# Metric that asks the judge of the config → what it asks (`Recipe.judgements`). A rating asks whether an answer is
# right: a server that can say so is there, and can be read.
_JUDGEMENTS = {'judge': 'correct', 'rubrics': 'grade', 'rating': 'correct'}
# What --metric=rating, which asks for no answers, has no use for.
_OF_ANSWERS = (_ANSWERING, _ANSWERER, _SAMPLES, _TEMPERATURE)
# Name of the weights of --answerer, and of their slots.
_ANSWERER_WEIGHTS = 'answerer'


def main(argv: list[str]) -> None:
    """Checks the command, then evaluates."""
    config = command_line.load(_CONFIG.value, argv[1:])
    changed = command_line.changed_fields(argv[1:])
    # Before anything is downloaded; again when --protocol has set what was not given.
    _refuse_flags(config)
    # Only the questions of --sets or of the evaluation are asked: other files of the config need not exist. Held-out
    # passages are hidden from training alone.
    unread = ('inputs.', 'retrieval.held_out', *(['eval.'] if _SETS.value else []))
    for name, _ in fields.input_paths(config):
        if name.startswith(unread):
            config.update_from_flattened_dict({name: ''})
    if 'prompts' not in changed:
        if downloads.is_address(config.policy.path):
            config.policy.path = fetch_model('config.policy.path', config.policy.path)
        # A policy is asked as it was trained. A run exports it to WORKDIR/policy/ROLE.
        keep_prompts(config, pathlib.Path(config.policy.path).absolute().parent.parent, False)
    if _SETS.value and _PROTOCOL.value:
        print(
            protocols.apply(_PROTOCOL.value, functools.partial(_put, config, changed)),
            file=sys.stderr,
        )
    # Most evaluations have no workdir; '.' passes its check.
    workdir = _WORKDIR.value or '.'
    command_line.check_command(config, workdir, has_evaluation=not _SETS.value, is_training=False)
    if note := command_line.note_of_questions(_CONFIG.value, config, argv[1:]):
        print(note, file=sys.stderr)
    if _SETS.value and config.retrieval.kind == 'world':
        print(
            'note: --sets is asked over the miniature world; --index names a corpus',
            file=sys.stderr,
        )
    flags.FLAGS.sets = [downloads.fetch(path) for path in _SETS.value]
    flags.FLAGS.answerer = command_line.policy_of_iteration(_ANSWERER.value)
    _check_flags(config)
    config = fields.frozen(config)
    if _WORKDIR.value:
        _evaluate_in_workdir(config)
        return
    with progress.clock('loading libraries', config.progress):
        command_line.prepare_process()
        # This import loads JAX, so it follows the checks of the command.
        from zeroplay_jax.run import build

    # Public sets are downloaded here: before the weights, whose loading takes minutes.
    is_open = _METRIC.value == 'rubrics'
    sets = {
        pathlib.Path(path).stem: files.load_set(path, _LIMIT.value, config.seed, is_open)
        for path in _SETS.value
    }
    extra_weights = _ANSWERER_WEIGHTS if _ANSWERER.value else ''
    metrics = [_METRIC.value]
    if not sets:
        metrics = [config.eval.metric, 'rubrics' if config.eval.tasks else '']
    judgements = tuple(_JUDGEMENTS[metric] for metric in metrics if metric in _JUDGEMENTS)
    run = build.build(config, extra_weights, date=_DATE.value, judgements=judgements)
    model = run.evaluation.model
    for name, questions in sets.items():
        warning = '' if is_server(config.policy.path) else warning_of(questions, run.folder)
        if warning:
            print(f'warning: {name}: {warning}', file=sys.stderr)
    if model is None:
        run.publish_weights(run.rollouts.scheduler.pools)
    # Until here Ctrl-C ended the process at once.
    signals.raise_again()
    # The slot pools have copies, so the loaded weights are dropped to free their memory.
    run = dataclasses.replace(run, params={})
    if sets:
        _evaluate_sets(config, run, sets)
    else:
        _evaluate_held_out(config, run)
    if model is not None:
        print(model.summary(), file=sys.stderr)


def _put(config: ConfigDict, changed: Collection[str], field: str, value: object) -> str:
    """Sets a flag or a field of the config; returns '', or why it stays as it is."""
    section, _, name = field.partition('.')
    if field in changed or not name and flags.FLAGS[field].present:
        return 'given'
    if section == 'judge' and config.judge.kind != 'endpoint':
        return f'judge.kind is {config.judge.kind}'
    if name:
        config[section][name] = value
    else:
        flags.FLAGS[field].value = value
    return ''


def _check_flags(config: Config) -> None:
    """Raises UserError for missing files and for settings that an evaluation does not support."""
    _refuse_flags(config)
    if _WORKDIR.value:
        check_is_folder(_WORKDIR.value)
    try:
        # The judged metrics are included so that the error lists them as well.
        metrics = {**rewards.ANSWER_METRICS, **dict.fromkeys(_JUDGEMENTS)}
        resolve('metric', _METRIC.value, metrics, ('prediction', 'golds'))
    except ValueError as error:
        raise UserError(f'--metric={_METRIC.value}: {error}') from None
    is_open = _METRIC.value == 'rubrics'
    for path in _SETS.value:
        files.check_set(path, allow_public=not is_open)
        # Read here as well as by `main`, so that an unusable line is reported before libraries are loaded.
        if pathlib.Path(path).is_file():
            (files.open_tasks if is_open else files.questions)(path)


def _refuse_flags(config: Any) -> None:
    for problem in _problems(config):
        raise UserError(problem)


def _problems(config: Any) -> Iterator[str]:
    """Yields a line for every flag that has no meaning beside the others."""
    sets, metric, out, workdir = _SETS.value, _METRIC.value, _OUT.value, _WORKDIR.value
    if out.startswith('gs:/'):
        yield f'--out={out}: {LOCAL_RESULTS}'
    if not _is_day(_DATE.value):
        yield f'--date={_DATE.value}: is not a day such as 2026-11-25'
    if out and not sets:
        yield f'--out={out}: is for the answers to --sets; add it, or leave it out'
    if out and not pathlib.Path(out).absolute().parent.is_dir():
        yield f'--out={out}: its folder does not exist; create it first'
    # The held-out questions of a config are scored by its own fields.
    for flag in (_PROTOCOL, _ANSWERING, _METRIC, _SAMPLES, _TEMPERATURE, _LIMIT, _ANSWERER):
        if not sets and flag.value != flag.default:
            field = f'give --config.eval.metric={metric}' if flag is _METRIC else 'leave it out'
            yield f'{_given(flag)}: is for the questions of --sets; add it, or {field}'
    if _TEMPERATURE.value == 0 and _SAMPLES.value > 1:
        problem = f'{_SAMPLES.value} greedy samples are equal'
        yield f'--temperature=0: {problem}; raise it, or give --samples=1'
    if config.distributed.mode != 'off':
        yield 'config.distributed.mode: an evaluation runs in one process; set it to off'
    ways = _ANSWERING.value
    if not ways or not set(ways) <= set(protocols.WAYS):
        yield f'{_given(_ANSWERING)}: give some of {", ".join(protocols.WAYS)}, with commas between'
    # A server or a package may offer a search, too; that is known once it is loaded.
    if {'retrieve', 'interleave'} & set(ways) and set(config.tools.names) <= {'open'}:
        yield f'{_given(_ANSWERING)}: needs a search; add search to config.tools.names'
    is_rating, is_open = metric == 'rating', metric == 'rubrics'
    is_searching = ways == ['search']
    # Flag → whether it is given, and beside what it has no meaning.
    for flag, is_given, is_beside, other in (
        (_ANSWERING, not is_searching, is_open, '--metric=rubrics'),
        (_ANSWERING, not is_searching, _ANSWERER.value, _given(_ANSWERER)),
        (_ANSWERER, _ANSWERER.value, is_server(config.policy.path), 'a policy at a server'),
        (_WORKDIR, workdir, is_server(config.policy.path), 'a policy at a server'),
        (_DATE, _DATE.value, is_server(config.policy.path), 'a policy at a server'),
        *((flag, flag.present, is_rating, '--metric=rating') for flag in _OF_ANSWERS),
        (_ANSWERER, _ANSWERER.value, workdir, '--workdir'),
        (_OUT, out, workdir, '--workdir'),
    ):
        if is_given and is_beside:
            yield f'{_given(flag)}: has no meaning beside {other}; leave one out'
    if metric in _JUDGEMENTS and config.judge.kind == 'rule':
        if is_rating or config.retrieval.kind != 'world':
            yield (
                f'--metric={metric}: the rule (config.judge.kind) works in the miniature worlds only, and does not '
                'rate; set it to policy or endpoint'
            )
    if _ESTIMATE.value and not workdir:
        yield '--estimate: needs a folder for the grades; add --workdir=FOLDER'
    if workdir and (not is_open or len(sets) != 1):
        fix = 'add --metric=rubrics --sets=FILE, or leave it out'
        yield f'{_given(_WORKDIR)}: is for one file of open tasks; {fix}'
    # The average is a column beside those of the sets.
    if len({tables.AVERAGE, *(pathlib.Path(path).stem for path in sets)}) <= len(sets):
        yield (
            f'{_given(_SETS)}: a set is given twice, or has the name of another or of the {tables.AVERAGE}; rename a '
            'file'
        )


def _given(flag: flags.FlagHolder) -> str:
    """Returns a flag as it is given."""
    return flags.FLAGS[flag.name].serialize()


def _is_day(date: str) -> bool:
    """Returns whether `date` is '' or a day such as 2026-11-25; other forms would be recorded as other days."""
    try:
        return not date or datetime.date.fromisoformat(date).isoformat() == date
    except ValueError:
        return False


def _evaluate_held_out(config: Config, run: RunContext) -> None:
    """Asks the library's held-out questions; prints the mean and its 95 % interval, per hop count and in all.

    A JSON object with the same figures follows.

    Raises:
      UserError: too many searches or judgements failed.
      TrainingStopped: no search found a passage.
    """
    from zeroplay_jax.evaluation import answering
    from zeroplay_jax.run import outcome

    items = run.library.evaluation_items
    recipe = answering_recipe(config)
    with progress.Bar(len(items), 'questions', shown=config.progress) as bar:
        metric = config.eval.metric
        rows = answering.evaluate(run.evaluation, items, 0, recipe, bar.update, metric)
    # Checked before anything is printed: figures of an evaluation with failed searches would mislead.
    outcome.raise_if_nothing_found(config, run.check_and_reset_failures())
    failed = sum(row.drop == 'failed' for row in rows)
    if failed:
        raise UserError(
            f'--policy={config.policy.path}: {failed} of {len(rows)} questions had no reply; run the command again, or '
            'raise config.judge.retries'
        )
    judge = run.evaluation.judge
    if judge is not None:
        judge.check_failure_rate(judge.stats)
    correct = answering.scores_by_hop(rows, 'exact_match')
    scores: dict[str, Any] = {f'hop{hops}': flags for hops, flags in correct.items() if hops}
    scores['mean'] = statistics.headline(correct)
    scores['rubrics'] = [row.reward for row in rows if 'rubrics' in row.parts]
    of_metric = answering.scores_by_hop(rows, metric)
    metric_name = metric.rpartition(':')[2]
    scores[metric_name] = statistics.headline(of_metric)
    documents = answering.documents_by_hop(rows, 'exact_match')
    of_questions: dict[str, Any] = {f'hop{hops}': names for hops, names in documents.items()}
    of_questions['mean'] = documents
    of_questions[metric_name] = answering.documents_by_hop(rows, metric)
    intervals = {
        name: statistics.mean_interval(one, of_questions.get(name))
        for name, one in scores.items()
        if len(one)
    }
    table: list[list[tables.Cell]] = [['', 'score']]
    table += [[name, tables.Figure.of(one)] for name, one in intervals.items()]
    print(tables.write(table, _FORMAT.value))
    print(json.dumps({name: [round(end, 4) for end in one] for name, one in intervals.items()}))


def _evaluate_in_workdir(config: Config) -> None:
    """Answers and grades the open tasks of --sets into --workdir; prints the figures and a JSON object."""
    with progress.clock('loading libraries', config.progress):
        command_line.prepare_process()
        # It loads JAX, so it follows the checks of the command.
        graded = load_extra('grading', 'graded')
    plan = graded.Plan(
        source=_SETS.value[0],
        folder=pathlib.Path(_WORKDIR.value),
        samples=_SAMPLES.value,
        temperature=_TEMPERATURE.value,
        limit=_LIMIT.value,
        only_estimate=_ESTIMATE.value,
        date=_DATE.value,
    )
    result = graded.evaluate(config, plan)
    if not _ESTIMATE.value:
        print((plan.folder / graded.PAGE).read_text(encoding='utf-8'))
        # What there is per task is in results.json.
        names = ('judge', 'rubrics_met', 'scored_tasks', 'judgements', 'agreement', 'answers')
        result = {name: result[name] for name in names}
    print(json.dumps(result))


def _evaluate_sets(config: Config, run: RunContext, sets: Mapping[str, list[Question]]) -> None:
    """Asks the questions of --sets; prints a table of mean figures and a JSON object, and writes --out."""
    from zeroplay_jax.run import build

    if _ANSWERER.value:
        folder = fetch_model('--answerer', _ANSWERER.value)
        run.publish_weights([_ANSWERER_WEIGHTS], build.load_like(run, folder))
    settings = _result_settings(config, run)
    is_alone = len(_ANSWERING.value) == 1
    results: dict[str, Results] = {}
    rounded: dict[str, dict[str, dict[str, float]]] = {}
    for way in dict.fromkeys(_ANSWERING.value):
        # A way has the same randomness beside others as alone.
        first_number = protocols.WAYS.index(way) * len(sets)
        of_sets: dict[str, SetResults] = {}
        rounded[way] = {}
        for number, (name, questions) in enumerate(sets.items(), first_number):
            answered = _answer_set(config, run, number, name, questions, way)
            of_sets[name] = SetResults.of(questions, answered)
            means = {metric: round(mean, 4) for metric, mean in of_sets[name].means().items()}
            rounded[way][name] = means
            # The table follows the last set, which may be hours away.
            print(f'{way}, {name}: {json.dumps(means)}', file=sys.stderr, flush=True)
        about = {'answering': way} if way != 'search' else {}
        results[way] = Results({**settings, **about}, of_sets)
        if _OUT.value:
            path = pathlib.Path(_OUT.value)
            results[way].write(path.with_stem(path.stem if is_alone else f'{path.stem}-{way}'))
    print(tables.write(_table(results), _FORMAT.value))
    print(json.dumps(rounded[way] if is_alone else rounded))


def _table(results: Mapping[str, Results]) -> list[list[tables.Cell]]:
    """Returns the rows of a table {way of answering: results}: scores, and below them what they cost."""
    # For package.module:function the heading is the function.
    metric = _METRIC.value.rpartition(':')[2]
    rows: list[list[tables.Cell]] = []
    costs: list[list[tables.Cell]] = []
    for way, result in results.items():
        prefix = '' if len(results) == 1 else f'{way}: '
        for kind in result.kinds():
            row = protocols.in_form(_PROTOCOL.value, result.figures(kind))
            rows.append([heading(prefix + metric, kind), *row.values()])
        means = [one.means() for one in result.sets.values()]
        for name, field in (('searches', 'searches'), ('repeated', 'redundancy')):
            costs.append([prefix + name, *(f'{one[field]:.2f}' for one in means)])
    costs.insert(0, ['questions', *(str(len(one.answered)) for one in result.sets.values())])
    # The average has no costs.
    filled = [[*cost, *[''] * (len(row) + 1 - len(cost))] for cost in costs]
    return [['', *row], *rows, *filled]


def _answer_set(
    config,
    run: RunContext,
    number: int,
    name: str,
    questions: Sequence[Question],
    way: str,
) -> list[Answered]:
    """Returns the result of each question of one set, and checks that few enough searches and judgements failed.

    Args:
      number: of the evaluation among those of this command, from which the randomness of its rollouts derives.
      name: name of the set, for the progress bar.
      way: way of answering.

    Raises:
      UserError: too many searches or judgements failed.
      TrainingStopped: no search found a passage.
    """
    from zeroplay_jax.evaluation import answering, rating
    from zeroplay_jax.run import outcome

    # The judge counts over all sets, but the limit applies to each set.
    context = run.evaluation.bound()
    with progress.Bar(len(questions), 'questions', name, shown=config.progress) as bar:
        if _METRIC.value == 'rating':
            return rating.rate_all(context, config.judge, questions, number, bar.update)
        answered = answering.answer_all(
            context,
            questions,
            number,
            metric=_METRIC.value,
            samples=_SAMPLES.value,
            temperature=_TEMPERATURE.value,
            way=way,
            recipe=answering_recipe(config),
            answerer=_ANSWERER_WEIGHTS if _ANSWERER.value else '',
            on_answer=bar.update,
        )
    outcome.raise_if_nothing_found(config, run.check_and_reset_failures())
    if context.judge is not None:
        context.judge.check_failure_rate(context.judge.stats)
    if context.model is not None and all(one.score is None for one in answered):
        raise UserError(
            f'{context.model}: no question of {name} had a reply; run the command again'
        )
    return answered


def _result_settings(config: Config, run: RunContext) -> Mapping[str, Any]:
    """Returns the settings of a result file; `zeroplay compare` requires most of them to be equal."""
    from zeroplay_jax.evaluation.answering import result_settings

    judge = ''
    if _METRIC.value in _JUDGEMENTS:
        judge = f'{config.judge.kind} {config.judge.model} {config.judge.request}'.rstrip()
    role = run.evaluation.roles[recipe_class(config.recipe).evaluated_role]
    temperature = _TEMPERATURE.value
    if temperature is None and _SAMPLES.value > 1:
        temperature = role.temperature
    settings = result_settings(
        config,
        policy=str(run.evaluation.model or run.folder),
        retrieval=run.library.about,
        template=run.template,
        metric=_METRIC.value,
        samples=_SAMPLES.value,
        limit=_LIMIT.value,
        judge=judge,
        temperature=temperature,
    )
    if temperature and role.truncation != ALL_IDS:
        settings['truncation'] = role.truncation
    return settings | {'answerer': _ANSWERER.value}


if __name__ == '__main__':
    command_line.run_command('zeroplay evaluate', main)
