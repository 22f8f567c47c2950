"""Question sets: one result per question, so that two policies can be compared.

A set is a file of JSON lines with "question" and answers, or one of the public names, downloaded
from the collection that Search-R1 and its successors evaluate on (FlashRAG; Jin et al. 2024,
arXiv:2405.13576). An open-ended set has "task" and "rubrics", a list of texts, on every line; a
judge decides which of them an answer meets.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Float64

from zeroplay_jax.data import files
from zeroplay_jax.evaluation import statistics
from zeroplay_jax.evaluation.tables import AVERAGE, Figure
from zeroplay_jax.objectives.rewards import normalize_answer
from zeroplay_jax.retrieval import downloads
from zeroplay_jax.rollout.call_syntax import syntax_for
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.selfplay.answers import final_answer, prompt_fields
from zeroplay_jax.selfplay.context import Role, RolloutContext
from zeroplay_jax.selfplay.recipe import Recipe, asks_once
from zeroplay_jax.settings.kinds import is_server, prompts_name
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import PROMPT, Json, Question, TaskDropped, Trajectory, UserError

COLLECTION = 'hf://RUC-NLPIR/FlashRAG_datasets'
# Settings of a result that `check_comparable` looks at → what sets them. 'answering' is not one of them: rows of a
# paper's table are a base model's ways of answering and a trained policy's searches.
SETTINGS = {
    'retrieval': 'index (--config.retrieval.path, or url of a server)',
    'top_k': '--config.tools.top_k',
    'prompts': '--config.prompts',
    'metric': '--metric',
    'samples': '--samples',
    'temperature': '--temperature',
    'limit': '--limit',
    'judge': '--config.judge',
    'tools': '--config.tools',
    'tokens': '--config.rollout.max_turns, turn_tokens, observation_tokens and response_tokens',
    'context': '--config.sampler.context',
    'template': '--date',
}
# Those of the agent, not of the measurement. Papers have such rows: a policy without a search (DSPO, table 1), prompts
# of other systems (SSP, appendix D).
OF_AGENT = {'prompts', 'tools', 'tokens', 'context'}


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer of the policy.

    Attributes:
      text: the answer; None if the rollout ended without one.
      finish: why the rollout ended (`Trajectory.finish`).
      searches: number of its search queries.
      redundancy: repetition among them (`redundancy`).
      tokens: number of tokens that the policy wrote.
    """

    text: str | None
    finish: str
    searches: int
    redundancy: float
    tokens: int


@dataclasses.dataclass(frozen=True)
class Answered:
    """Result of one question.

    Attributes:
      score: best score of its samples; in a graded evaluation their mean. None without any verdict, or if a
        server did not answer.
      searches: number of search queries of the first sample.
      redundancy: repetition among these queries, see the function `redundancy`.
      given: the answer with the best score; None if that sample has no answer.
      samples: score of every sample; () if there is one alone.
      vote: score of the answer that most samples give (`majority`); None for open tasks and a sample alone.
    """

    score: float | None
    searches: int
    redundancy: float
    given: str | None
    samples: tuple[float, ...] = ()
    vote: float | None = None


def load(name: str, limit: int = 0, seed: int = 0, rubrics: bool = False) -> list[Question]:
    """Returns the questions of a file or a public set, which is downloaded; with `rubrics` the open tasks of a file.

    Args:
      name: path of a file, or a key of `files.PUBLIC` or `files.WRITTEN`.
      limit: number of questions drawn from the set; 0: all.
      seed: seed of the draw.
      rubrics: whether the file holds open tasks.

    Raises:
      UserError: neither a file nor a public name; an unusable line; no connection.
    """
    read = files.open_tasks if rubrics else files.questions
    questions = read(path_of(name))
    return files.sample(questions, limit or len(questions), seed)


def path_of(name: str) -> str:
    """Returns the path of a set's file: `name` itself, or the downloaded file of a public name.

    Raises:
      UserError: neither a file nor a public name; no connection.
    """
    if pathlib.Path(name).is_file():
        return name
    files.check_set(name)
    if name in files.WRITTEN:
        return files.WRITTEN[name]
    if not downloads.is_name(name):
        name = f'{COLLECTION}/{name}/{files.PUBLIC[name]}.jsonl'
    return downloads.fetch_file(name)


def do_nothing(*_: Any) -> None:
    """Default of callbacks."""


async def ask_question(
    context: RolloutContext,
    recipe: Recipe,
    identity: tuple[int, ...],
    question: Question,
    samples: int = 1,
    temperature: float | None = None,
) -> list[Trajectory]:
    """Returns the rollouts that answer a question or open task in an evaluation, each by `Recipe.answer`.

    A dropped one has the question alone as tokens, the reason as `finish`, and no `weights`.

    Args:
      recipe: as `recipe.answering_recipe` returns it.
      identity: of the question, from which the randomness of its rollouts derives.
      samples: number of rollouts.
      temperature: None: 0 for one sample, the role's for several.

    Raises:
      UserError: the question is longer than `rollout.prompt_tokens`, where the recipe asks its role once.
    """
    # Several greedy samples would be equal.
    if temperature is None and samples == 1:
        temperature = 0.0
    if asks_once(recipe):
        # In one request, whose rollouts share their prompt.
        role = recipe.evaluated_role
        fields = prompt_fields(context, role, question)
        with asked(question):
            return await context.ask(role, identity, samples, temperature, **fields)
    if temperature is not None:
        context = dataclasses.replace(context, roles=at_temperature(context.roles, temperature))

    async def answer(sample: int) -> Trajectory:
        try:
            return await recipe.answer(context, question, (*identity, sample))
        except TaskDropped as drop:
            # How long an answer grows is up to the policy.
            line = 'in the evaluation, %r counts as unanswered: Recipe.answer dropped it (%s)'
            logging.warning(line, question.text[:60], drop.reason)
            codec = context.roles[recipe.evaluated_role].env.codec
            tokens = np.array(codec.encode_plain(question.text), np.int32)
            source = np.full_like(tokens, PROMPT, np.int8)
            logp = np.zeros_like(tokens, np.float32)
            return Trajectory(tokens, source, logp, (), drop.reason, '', 0, (*identity, sample))

    return list(await asyncio.gather(*map(answer, range(samples))))


def at_temperature(roles: Mapping[str, Role], temperature: float) -> dict[str, Role]:
    """Returns roles of which the trained ones have this temperature; the others stay greedy."""
    return {
        name: dataclasses.replace(role, temperature=role.temperature and temperature)
        for name, role in roles.items()
    }


@contextlib.contextmanager
def asked(question: Question, limit: str = 'rollout.prompt_tokens') -> Iterator[None]:
    """Refuses a question whose prompt is longer than `limit`, a field of the config.

    Raised instead of dropped: without this question the mean would be taken over another set.

    Raises:
      UserError: such a question.
    """
    try:
        yield
    except TaskDropped as drop:
        raise UserError(
            f'in the evaluation, {question.text[:60]!r} cannot be asked: {drop.reason}; raise config.{limit}'
        ) from drop


def answer_of(trajectory: Trajectory, queries: Sequence[str] | None = None) -> Answer:
    """Returns the answer of a rollout; `queries`: the searches before it, None for those of its calls."""
    if queries is None:
        queries = search_queries(trajectory)
    return Answer(
        text=final_answer(trajectory),
        finish=trajectory.finish,
        searches=len(queries),
        redundancy=redundancy(queries),
        tokens=trajectory.policy_tokens,
    )


def search_queries(trajectory: Trajectory) -> list[str]:
    """Returns the search queries of a rollout in order."""
    queries = []
    for call in trajectory.calls_of('search'):
        queries += call.queries
    return queries


def redundancy(queries: Sequence[str]) -> float:
    """Returns the repetition among queries, from 0 to 1.

    It is the mean, over all queries but the first, of the largest Jaccard overlap of words with an earlier query; 0 for
    fewer than two queries. π-Play reports such a number without defining it.
    """
    earlier_words: list[set[str]] = []
    overlaps = []
    for query in queries:
        words = set(normalize_answer(query).split())
        # The first query has nothing to repeat and does not count in the mean.
        if earlier_words:
            # Two queries without words share none.
            shares = [len(words & other) / max(1, len(words | other)) for other in earlier_words]
            overlaps.append(max(shares))
        earlier_words.append(words)
    if not overlaps:
        return 0.0
    return float(np.mean(overlaps))


def means(answered: Sequence[Answered]) -> dict[str, float]:
    """Returns the means over questions of score (over those that have one), searches and redundancy.

    Of several samples also that of all their scores ('samples'), its standard deviation over samples ('deviation'), and
    that of the majority's ('vote').
    """
    values = {}
    for name in ('score', 'searches', 'redundancy', 'vote'):
        of_questions = [getattr(result, name) for result in answered]
        known = [value for value in of_questions if value is not None]
        if known or name != 'vote':
            values[name] = float(np.mean(known))
    sampled = [result.samples for result in answered if result.samples]
    if sampled:
        of_samples = np.mean(sampled, axis=0)
        values['samples'] = float(of_samples.mean())
        values['deviation'] = float(of_samples.std(ddof=1))
    return values


def result_settings(
    config: Config, policy: str, retrieval: str, template: Mapping[str, str], **measured: Any
) -> dict[str, Any]:
    """Returns the settings of a result; `compare` requires those of `SETTINGS` to be equal.

    Args:
      policy: the checkpoint folder; the run that exported it is a setting, too.
      retrieval: description of the searched corpus (`Library.about`).
      template: what was chosen for the chat template (`role_environment.template_record`); left out if nothing was.
      measured: metric, samples, limit, judge ('' for a metric without one) and temperature, which is left out if it is
        None or 0.
    """
    # With search alone only the syntax is written, so that results of versions without other tools stay comparable.
    tools = syntax_for(config).name
    if tuple(config.tools.names) != ('search',):
        tools = ' '.join([tools, *config.tools.names])
    rollout = config.rollout
    tokens = [rollout.max_turns, rollout.turn_tokens, rollout.observation_tokens]
    # Left out where there is none.
    if rollout.response_tokens:
        tokens.append(rollout.response_tokens)
    chosen: dict[str, Any] = {'template': dict(template)} if template else {}
    exporter = run_record.check_export(pathlib.Path(policy))
    if exporter:
        chosen[run_record.HASH_FIELD] = exporter
    # 0 is what one sample has without it.
    if not measured.get('temperature'):
        measured.pop('temperature', None)
    of_config = {
        'top_k': config.tools.top_k,
        'prompts': prompts_name(config.prompts),
        'tools': tools,
        'tokens': tokens,
        # That of a server's model is not known.
        'context': 0 if is_server(config.policy.path) else config.sampler.context,
    }
    return (
        chosen | {'policy': policy, 'answerer': '', 'retrieval': retrieval} | of_config | measured
    )


def results(
    settings: Json, sets: dict[str, tuple[Sequence[Question], Sequence[Answered]]]
) -> dict[str, Any]:
    """Returns the JSON content of the file that `zeroplay_jax.evaluate --out` writes, which `compare` reads.

    Args:
      settings: the settings of the evaluation, with the keys SETTINGS.
      sets: name of each set → its questions and their results.

    Returns:
      {'settings', 'sets': {name: {'questions': fingerprint, 'mean': see `means`, 'answered': per question
      {'question', 'answers' or 'rubrics'} and the fields of its `Answered`}}}.
    """
    result_of_set = {}
    for name, (questions, answered) in sets.items():
        # Stored per question, so that two results can be compared question by question.
        records = []
        for question, result in zip(questions, answered, strict=True):
            record = _expected(question) | dataclasses.asdict(result)
            if not result.samples:
                del record['samples'], record['vote']
            records.append(record)
        result_of_set[name] = {
            'questions': _fingerprint(questions),
            'mean': means(answered),
            'answered': records,
        }
    return {'settings': dict(settings), 'sets': result_of_set}


def _expected(question: Question) -> dict[str, Any]:
    """Returns the text of a question with its accepted answers, or of an open task with its rubrics."""
    if question.is_open_task:
        return {'question': question.text, 'rubrics': list(question.rubrics)}
    return {'question': question.text, 'answers': list(question.answers)}


def _fingerprint(questions: Sequence[Question]) -> str:
    """Returns a hash of the questions and of their accepted answers or rubrics."""
    records = [list(_expected(question).values()) for question in questions]
    return hashlib.sha256(json.dumps(records, ensure_ascii=False).encode()).hexdigest()[:16]


def kinds(result: Json) -> list[str]:
    """Returns by which rules a result scores a question: 'score', or 'mean', 'best' and 'vote' of several samples.

    There is no vote on open tasks, whose answers are all different.
    """
    first = next(iter(result['sets'].values()))['answered'][0]
    if not first.get('samples'):
        return ['score']
    return ['mean', 'best'] if first['vote'] is None else ['mean', 'best', 'vote']


def scores(result: Json, name: str, kind: str = 'score') -> Float64[np.ndarray, ' questions']:
    """Returns the scores of the questions of a set by one of `kinds`; NaN without a verdict."""
    records = result['sets'][name]['answered']
    if kind == 'mean':
        return np.mean([record['samples'] for record in records], axis=1)
    field = 'vote' if kind == 'vote' else 'score'
    return np.array([record[field] for record in records], float)


def averaged(scores_of_sets: Mapping[str, np.ndarray]) -> dict[str, statistics.Samples]:
    """Returns set → its scores and, of several sets, AVERAGE → the scores of all, each set with the same weight.

    Every paper's main table has this column; pi-Play's total is the average times the number of sets.
    """
    of_sets: dict[str, statistics.Samples] = dict(scores_of_sets)
    if len(of_sets) > 1:
        of_sets[AVERAGE] = dict(enumerate(scores_of_sets.values()))
    return of_sets


def compare(one: Json, other: Json, kind: str = 'score') -> dict[str, statistics.Interval]:
    """Returns {set or AVERAGE: (mean difference other − one, low, high)} with 95 % intervals (`paired_difference`).

    Args:
      one: a result of `results`.
      other: the result that is compared with it.
      kind: one of `kinds` of both.

    Raises:
      UserError: the results differ in settings or questions, or have no set in common; names the difference.
    """
    check_comparable(one, other)
    before, after = {}, {}
    for name in shared_sets([one, other]):
        # Paired by question: questions differ in difficulty far more than policies do, and this variance cancels.
        first, second = scores(one, name, kind), scores(other, name, kind)
        # A question that one side has no score of has no difference.
        is_scored = ~np.isnan(first + second)
        if not is_scored.any():
            raise UserError(
                f'no question of {name} has a score in both results; repeat the evaluation whose judge gave no verdicts'
            )
        before[name], after[name] = first[is_scored], second[is_scored]
    befores, afters = averaged(before), averaged(after)
    return {name: statistics.paired_difference(befores[name], afters[name]) for name in befores}


def figures(result: Json, kind: str = 'score') -> dict[str, Figure]:
    """Returns {set or AVERAGE: score by one of `kinds`}, with its interval over questions.

    A mean over samples has its deviation over samples as well: sample i of all questions is one evaluation.
    """
    known = {}
    of_samples = {}
    for name, one in result['sets'].items():
        of_questions = scores(result, name, kind)
        known[name] = of_questions[~np.isnan(of_questions)]
        if kind == 'mean':
            of_samples[name] = np.mean([record['samples'] for record in one['answered']], axis=0)
    cells = {}
    for name, of_set in averaged(known).items():
        deviation = None
        if of_samples:
            chosen = [of_samples[name]] if name in of_samples else list(of_samples.values())
            deviation = float(np.mean(chosen, axis=0).std(ddof=1))
        cells[name] = Figure.of(statistics.mean_interval(of_set), deviation)
    return cells


def heading(name: str, kind: str) -> str:
    """Returns the heading of a row of a table: what was scored, and by which of `kinds`."""
    return name if kind == 'score' else f'{name}, {kind}'


def shared_sets(results: Sequence[Json]) -> list[str]:
    """Returns the names of the sets that all results have; raises UserError if there is none."""
    names = set.intersection(*(set(result['sets']) for result in results))
    if not names:
        raise UserError('the results have no set in common; evaluate all on the same sets')
    return [name for name in results[0]['sets'] if name in names]


def check_comparable(one: Json, other: Json) -> str:
    """Returns in which settings `OF_AGENT` two results differ, and which flags set them; '' if in none.

    Raises:
      UserError: they differ in another setting or in the questions of a shared set, or share no set.
    """
    differences = {}
    for name in SETTINGS:
        # A setting that is left out is None.
        values = [result['settings'].get(name) for result in (one, other)]
        if values[0] != values[1]:
            differences[name] = f'{name}: {values[0]!r} and {values[1]!r}'
    text = '; '.join(differences.values())
    flags = ' and '.join(SETTINGS[name] for name in differences)
    if differences.keys() - OF_AGENT:
        raise UserError(
            f'these results cannot be compared, they differ in {text}; evaluate both with the same {flags}'
        )
    for name in shared_sets([one, other]):
        # 'questions' is the fingerprint of the set's questions, see `results`.
        if one['sets'][name]['questions'] != other['sets'][name]['questions']:
            raise UserError(
                f'the questions of {name} differ between the two results; evaluate both on the same'
            )
    return text and f'{text} ({flags})'


# ---- open tasks ------------------------------------------------------------------------------------
#
# Tasks of a file with an id and their place in the file, as a graded evaluation records them.


# Characters of a wrong value that an error quotes.
_QUOTED_CHARACTERS = 60


@dataclasses.dataclass(frozen=True)
class RubricTask:
    """One line of a file of open tasks.

    Attributes:
      id: its "id", or the number of the line as a text; unique in the file.
      index: position among the tasks of the file, from 0. The randomness of its rollouts derives from it.
      line: number of the line, from 1.
      question: the task and its rubrics.
    """

    id: str
    index: int
    line: int
    question: Question

    @property
    def rubrics(self) -> list[str]:
        """The texts of the rubrics, in the order of the file."""
        return [rubric['text'] for rubric in self.question.rubrics]


def load_tasks(path: str) -> list[RubricTask]:
    """Returns the tasks of a file of JSON lines {"task", "rubrics": list of texts, "id": text or number, optional}.

    Raises:
      UserError: an unusable line, or two lines with one id; the message has the numbers of the lines.
    """
    line_of_id: dict[str, int] = {}
    tasks = []
    for number, question, record in files.numbered_open_tasks(path):
        task_id = _task_id(path, number, record.get('id'))
        if task_id in line_of_id:
            raise UserError(
                f'{path}, line {number}: the id {task_id!r} is also that of line {line_of_id[task_id]}; give each '
                'task an id of its own, or leave all "id" out'
            )
        line_of_id[task_id] = number
        tasks.append(RubricTask(task_id, len(tasks), number, question))
    return tasks


def _task_id(path: str, number: int, value: object) -> str:
    """Returns the id of a task as a text; raises UserError for one that is neither a text nor a whole number."""
    if value is None:
        return str(number)
    # isinstance would accept true, because bool is a subclass of int.
    if type(value) is int:
        return str(value)
    if isinstance(value, str) and value.strip():
        return value
    raise UserError(
        f'{path}, line {number}: "id" is {repr(value)[:_QUOTED_CHARACTERS]}; give a text or a whole number, or leave '
        'it out'
    )
