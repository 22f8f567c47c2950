"""How a question is answered: by the policy with its tools, or by a baseline without training.

search: reasoning that calls tools, as in training (`Recipe.answer`); of a policy without training it is Search-o1's
form (arXiv:2501.05366). direct: in one turn, without tools. retrieve: after one search for the question (RAG,
arXiv:2005.11401). interleave: every sentence of the reasoning is a search, whose passages join those before (IRCoT,
arXiv:2212.10509).
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import logging

from zeroplay_jax.evaluation.question_sets import (
    Answer,
    Answered,
    answer_of,
    ask_question,
    asked,
    do_nothing,
)
from zeroplay_jax.objectives.rewards import normalize_answer
from zeroplay_jax.rollout.requests import Request
from zeroplay_jax.selfplay.answers import score
from zeroplay_jax.selfplay.context import RolloutContext
from zeroplay_jax.selfplay.recipe import Recipe
from zeroplay_jax.types import Question, TaskDropped, ToolCall, Trajectory, UserError

# The end of a sentence, and tags around it.
_SENTENCE_END = re.compile(r'(?<=[.!?])\s|\n')
_TAG = re.compile(r'</?\w+>')


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
      samples, temperature: as of `ask_question`.
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
        trajectories = await ask_question(context, recipe, identity, question, samples, temperature)
        if answerer:
            searched = trajectories
            trajectories = [await _answer_after(context, role, answerer, one) for one in searched]
        return list(map(answer_of, trajectories))

    async def answer(index: int, question: Question) -> Answered:
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
    pending = [answer(index, question) for index, question in enumerate(questions)]
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


# ---- baselines without training --------------------------------------------------------------------


class _Baseline:
    """Asks questions in one of the ways of the module but search: the role has no tools, and a turn for each prompt."""

    def __init__(self, context: RolloutContext, role: str, way: str, temperature: float | None):
        self._role, self._temperature = role, temperature
        player = context.roles[role]
        env = self._env = player.env
        prompt_tokens = player.prompt_tokens
        self._way = way
        most = max(1, env.limits.max_turns - 1)
        self._most_searches = {'direct': 0, 'retrieve': 1}.get(way, most)
        if self._most_searches:
            if 'search' not in env.tools:
                raise UserError(
                    f'--answering={way}: role {role} cannot search; add search to config.tools.names'
                )
            self._weights = player.weights
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
        passages = []
        query = question.text
        while query and len(queries) < self._most_searches:
            queries.append(query)
            texts = await self._passages((*identity, len(queries)), query)
            passages += texts
            # A failed search is the last one.
            if not texts or self._way == 'retrieve':
                break
            step, thoughts = (*identity, len(queries)), ' '.join(queries[1:])
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
