"""How a question is answered: by the policy with its tools, or by a baseline without training; in runs and after them.

search: reasoning that calls tools, as in training (`Recipe.answer`); of a policy without training it is Search-o1's
form (arXiv:2501.05366). direct: in one turn, without tools. retrieve: after one search for the question (RAG,
arXiv:2005.11401). interleave: every sentence of the reasoning is a search, whose passages join those before (IRCoT,
arXiv:2212.10509).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Float64

from zeroplay_jax.evaluation import statistics
from zeroplay_jax.evaluation.results import Answered
from zeroplay_jax.objectives.answers import normalize_answer
from zeroplay_jax.rollout.call_syntax import syntax_for
from zeroplay_jax.rollout.requests import Request
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.selfplay.answers import final_answer, prompt_fields, score
from zeroplay_jax.selfplay.context import Role, RolloutContext
from zeroplay_jax.selfplay.recipe import Recipe, asks_once
from zeroplay_jax.settings.kinds import is_server, prompts_name
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import (
    PROMPT,
    Outcome,
    Question,
    Row,
    RowInfo,
    TaskDropped,
    ToolCall,
    Trajectory,
    UserError,
)

# The end of a sentence, and tags around it.
_SENTENCE_END = re.compile(r'(?<=[.!?])\s|\n')
_TAG = re.compile(r'</?\w+>')


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


def do_nothing(*_: Any) -> None:
    """Default of callbacks."""


async def answer(
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

    async def answer_once(sample: int) -> Trajectory:
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

    return list(await asyncio.gather(*map(answer_once, range(samples))))


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


def check_prompt(context: RolloutContext, role: str, question: Question) -> None:
    """Raises UserError for a question whose prompt is longer than the role allows."""
    tokens = len(context.prompt_ids(role, **prompt_fields(context, role, question)))
    limit = context.roles[role].prompt_tokens
    if tokens > limit:
        raise UserError(
            f'the question is too long: {tokens} tokens with its prompt, {limit} at most; shorten it, or raise '
            'config.rollout.prompt_tokens'
        )


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


def evaluate(
    context: RolloutContext,
    questions: Sequence[Question],
    number: int,
    recipe: Recipe,
    on_answer: Callable[[], None] = do_nothing,
    metric: str = 'none',
) -> list[Row]:
    """Returns a row per question with its greedy answer and the exact match of it; open tasks are graded by a judge.

    With several processes all must call this.

    Args:
      context: roles, scheduler, prompts and, for open tasks, the judge.
      questions: questions and open tasks.
      number: number of this evaluation in the run; (number, index of the question) is the identity of a rollout.
      recipe: answers (`recipe.answering_recipe`).
      on_answer: called after every answer, for a progress bar.
      metric: `config.eval.metric`, a further score of the answers to questions; 'none': no other.

    Returns:
      One rollout per entry of `questions`, in their order; `group` is its hop count (0: unknown). The reward is 1 or 0,
      in `parts` 'exact_match'; of an open task the share of its rubrics that are met (SCOPE eq. 1), 'rubrics', or 0
      with drop 'ungraded' where the judge graded too few. `parts` has the score by `metric` under the name of the
      metric.

    Raises:
      UserError: a question is longer than `rollout.prompt_tokens`.
    """
    episodes: dict[tuple[int, ...], Callable[[], Coroutine[Any, Any, Outcome]]] = {}
    for index, question in enumerate(questions):
        identity = (number, index)
        episodes[identity] = functools.partial(_row_of, context, recipe, identity, question, metric)
    outcomes = context.run_episodes(episodes, on_answer)
    # Each question has one rollout, so each outcome has one row; all processes have them in the order of the questions.
    return [outcome.rows[0] for outcome in outcomes]


def scores_by_hop(rows: Sequence[Row], part: str) -> dict[int, Float64[np.ndarray, ' questions']]:
    """Returns hop count → scores of the rows of `evaluate` that have such a part, such as 'exact_match', ascending."""
    scored = [row for row in rows if part in row.parts]
    return statistics.by_hop([row.group for row in scored], [row.parts[part] for row in scored])


def documents_by_hop(rows: Sequence[Row], part: str) -> dict[int, Sequence[str]]:
    """Returns hop count → names of the documents of the questions of `scores_by_hop`; '' without one."""
    asked = [row for row in rows if part in row.parts]
    origins = [row.info.question.origin if row.info.question else {} for row in asked]
    names = [str(origin.get('document', '')) for origin in origins]
    of_hops: dict[int, list[str]] = {}
    for row, name in zip(asked, names, strict=True):
        of_hops.setdefault(row.group, []).append(name)
    return dict(of_hops)


async def _row_of(
    context: RolloutContext,
    recipe: Recipe,
    identity: tuple[int, int],
    question: Question,
    further_metric: str,
) -> Outcome:
    """Returns the outcome of one question or open task, with one row; the randomness derives from `identity`."""
    # Exact match is used whatever `reward.answer` is, so that results of all recipes are compared by one metric.
    is_open = question.is_open_task
    metric, part_name = ('rubrics', 'rubrics') if is_open else ('em', 'exact_match')
    (trajectory,) = await answer(context, recipe, identity, question)
    text = final_answer(trajectory)
    value = await score(context, metric, identity, question, text)
    reward = value or 0.0
    parts = {part_name: reward}
    if further_metric != 'none' and not is_open:
        # An answer without a verdict of the judge scores 0.
        parts[further_metric] = (
            await score(context, further_metric, identity, question, text) or 0.0
        )
    # Evaluation rows are never trained on; the reason is recorded so that ungraded answers can be counted.
    drop_reason = 'ungraded' if value is None else None
    # Of a question that was dropped.
    if not trajectory.weights:
        drop_reason = trajectory.finish
    row = Row(
        role=recipe.evaluated_role,
        trajectory=trajectory,
        reward=reward,
        group=question.hops,
        parts=parts,
        drop=drop_reason,
        info=RowInfo(question=question, answer=text),
    )
    return Outcome([row])


def answer_all(
    context: RolloutContext,
    questions: Sequence[Question],
    number: int,
    *,
    metric: str,
    samples: int,
    temperature: float | None = None,
    way: str = 'search',
    recipe: Recipe,
    answerer: str = '',
    on_answer: Callable[[], None] = do_nothing,
) -> list[Answered]:
    """Returns the result of each question.

    Args:
      context: roles, scheduler, prompts and, for the metrics that need one, the judge.
      number: number of this evaluation; (number, index of the question) is the identity of the question's rollouts.
      metric: name of the metric, see `selfplay.answers.score`.
      samples, temperature: as of `answer`.
      way: how it is answered, see the module.
      recipe: answers, or its evaluated role in another way.
      answerer: name of the weights that write the last turn, after another policy's searches (SCOPE
        table 4); '' leaves it to the role.

    Raises:
      UserError: a question is longer than its limit, or a way that searches has no search tool.
    """

    role = recipe.evaluated_role
    # Several greedy samples would be equal; None is the temperature of the role.
    if temperature is None and samples == 1:
        temperature = 0.0
    baseline = None if way == 'search' else _Baseline(context, role, way, temperature)

    async def ask(identity: tuple[int, ...], question: Question) -> list[Answer]:
        """Returns the answers to a question."""
        if baseline is not None:
            chains = [baseline.answer((*identity, sample), question) for sample in range(samples)]
            return list(await asyncio.gather(*chains))
        trajectories = await answer(context, recipe, identity, question, samples, temperature)
        if answerer:
            searched = trajectories
            trajectories = [await _answer_after(context, role, answerer, one) for one in searched]
        return list(map(answer_of, trajectories))

    async def result_of(index: int, question: Question) -> Answered:
        """Runs the rollouts of one question and returns its result."""
        identity = (number, index)
        answers = await ask(identity, question)
        first = answers[0]
        failed = sum(given.finish == 'failed' for given in answers)
        workers.answers.update(calls=len(answers), failed=failed)
        # That a server did not answer says nothing about its model.
        if failed:
            return Answered(None, first.searches, first.redundancy, None)
        scores = []
        for sample, given in enumerate(answers):
            value = await score(context, metric, (*identity, sample), question, given.text)
            # An answer without a verdict of the judge scores 0.
            scores.append(value or 0.0)
        # On ties the first sample is taken.
        best = int(np.argmax(scores))
        # Only the queries of the first sample count, so that their number does not grow with `samples`.
        result = Answered(scores[best], first.searches, first.redundancy, answers[best].text)
        if samples == 1:
            return result
        voted = majority([given.text for given in answers])
        vote = None if question.is_open_task else scores[voted]
        return dataclasses.replace(result, samples=tuple(scores), vote=vote)

    workers = context.scheduler.workers
    pending = [result_of(index, question) for index, question in enumerate(questions)]
    results = context.scheduler.run(pending, on_answer)
    counts = workers.counts
    if baseline is not None and counts['search/failed']:
        line = '--answering=%s: %d of %d searches failed; the answers are without their passages'
        logging.warning(line, way, counts['search/failed'], counts['search/calls'])
    return results


def majority(answers: Sequence[str | None]) -> int:
    """Returns the position of the first answer that most samples give, by their normalised texts (self-consistency).

    Samples without an answer have no vote (Wang et al. 2022, arXiv:2203.11171).
    """
    # Nothing is left of an article, such as the letter of a choice.
    texts = [normalize_answer(answer or '') or answer for answer in answers]
    votes = collections.Counter(filter(None, texts))
    # Among equals the counter lists the first first.
    return texts.index(votes.most_common(1)[0][0]) if votes else 0


async def _answer_after(
    context: RolloutContext, role: str, weights: str, searched: Trajectory
) -> Trajectory:
    """Returns a rollout whose last turn other weights have written anew, greedily, from all tokens before that turn.

    Args:
      role: role of the rollout, whose environment the new turn gets, without tools.
      weights: name of the weights that write the turn.
      searched: the rollout; if it has no turn of the policy, all its tokens are the prompt.

    Returns:
      The new rollout's tokens and finish, with the turns of `searched` before its last one.
    """
    # Of a question that was dropped.
    if not searched.weights:
        return searched
    env = context.roles[role].env
    # Token ids are reused unchanged, so the answerer reads exactly the tokens that the searcher read.
    prompt = searched.tokens
    if searched.starts and searched.starts[-1] >= 0:
        prompt = searched.tokens[: searched.starts[-1]]
    limits = dataclasses.replace(env.limits, max_turns=1)
    # The answerer gets no tools and one turn, whose text must be final.
    final_env = dataclasses.replace(env, tools={}, limits=limits)
    # Longer than the identity of any sample of the searcher, hence different from all of them.
    identity = (*searched.identity, 1)
    request = Request(weights, prompt, identity, final_env, samples=1, temperature=0.0)
    (last,) = await context.scheduler.rollout(request)
    # Their tokens stand in the rollout of the searcher.
    before = [dataclasses.replace(turn, context=0, start=0, stop=0) for turn in searched.turns[:-1]]
    return dataclasses.replace(last, turns=(*before, *last.turns))


class _Baseline:
    """Asks questions in one of the ways of the module but search: the role has no tools, and a turn for each prompt."""

    def __init__(self, context: RolloutContext, role: str, way: str, temperature: float | None):
        self._role, self._way, self._temperature = role, way, temperature
        player = context.roles[role]
        env = self._env = player.env
        self._weights, prompt_tokens = player.weights, player.prompt_tokens
        if way != 'direct':
            if 'search' not in env.tools:
                raise UserError(
                    f'--answering={way}: role {role} cannot search; add search to config.tools.names'
                )
            # Passages are part of the prompt, which the slot limits.
            pool = context.scheduler.pools.get(player.weights)
            # A policy at a server has none.
            if pool is not None:
                prompt_tokens = max(prompt_tokens, pool.context - env.limits.turn_tokens)
        one_turn = dataclasses.replace(
            env,
            tools={},
            limits=dataclasses.replace(env.limits, max_turns=1),
            call_openings=env.syntax.opening_tags(env.tools),
        )
        bare = dataclasses.replace(player, env=one_turn, prompt_tokens=prompt_tokens)
        self._context = dataclasses.replace(context, roles={**context.roles, role: bare})

    async def answer(self, identity: tuple[int, ...], question: Question) -> Answer:
        """Returns an answer, after at most as many searches as the policy may call."""
        queries: list[str] = []
        passages: list[str] = []
        query = '' if self._way == 'direct' else question.text
        while query and len(queries) < max(1, self._env.limits.max_turns - 1):
            queries.append(query)
            step = (*identity, len(queries))
            texts = await self._passages(step, query)
            passages += texts
            # A failed search is the last one.
            if not texts or self._way == 'retrieve':
                break
            thoughts = ' '.join(queries[1:])
            turn = await self._read(
                'answer.interleave', step, question, passages, thoughts=thoughts
            )
            if turn.finish in ('answer', 'failed'):
                return answer_of(turn, queries)
            query = _first_sentence(turn)
        prompt = 'answer.retrieve' if passages else 'answer.direct'
        turn = await self._read(prompt, (*identity, 0), question, passages)
        return answer_of(turn, queries)

    async def _passages(self, identity: tuple[int, ...], query: str) -> list[str]:
        """Returns what a search finds, as a text as long as an observation; [] if it fails."""
        arguments = self._env.tools['search'].prepare({'query_list': [query]})
        # A call runs for a rollout; this one has neither tokens nor a slot.
        request = Request(self._weights, np.zeros(0, np.int32), identity, self._env)
        call = await self._context.scheduler.call(request, ToolCall('search', arguments))
        if call.error:
            return []
        env = self._env
        return [env.syntax.start(env.codec, call.text, env.limits.observation_tokens)]

    async def _read(
        self,
        prompt: str,
        identity: tuple[int, ...],
        question: Question,
        passages: Sequence[str],
        **fields: Any,
    ) -> Trajectory:
        """Returns the turn after a question and passages, the oldest of which give way where the slot is too short."""
        fields['question'] = question.text
        # Without passages the prompt is as long as that of the role.
        limit = 'sampler.context' if passages else 'rollout.prompt_tokens'
        with asked(question, limit):
            while True:
                if passages:
                    fields['documents'] = '\n\n'.join(passages)
                try:
                    (turn,) = await self._context.ask(
                        self._role, identity, 1, self._temperature, prompt, **fields
                    )
                    return turn
                except TaskDropped:
                    passages = passages[1:]
                    if not passages:
                        raise


def _first_sentence(trajectory: Trajectory) -> str:
    """Returns the first sentence of the last turn, without tags; '' without a turn."""
    text = ' '.join(turn.text for turn in trajectory.turns)
    return _SENTENCE_END.split(_TAG.sub('', text).strip(), 1)[0].strip()


def result_settings(
    config: Config, policy: str, retrieval: str, template: Mapping[str, str], **measured: Any
) -> dict[str, Any]:
    """Returns the settings of a result; `compare` requires those of `SETTINGS` to be equal.

    Args:
      policy: the checkpoint folder; the run that exported it is a setting, too.
      retrieval: description of the searched corpus (`Library.about`).
      template: what was chosen for the chat template (`role_environment.template_record`); left out if nothing was.
      measured: metric, samples, limit, judge ('' for a metric without one), temperature, which is left out if it is
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
