"""A judge's ratings of questions, which it does not answer: from 1, the easiest, to 5 (SSP, figure 6c)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence

from zeroplay_jax.evaluation.results import Answered
from zeroplay_jax.selfplay.context import RolloutContext
from zeroplay_jax.selfplay.judge import Judge, policy_writer
from zeroplay_jax.settings import schema
from zeroplay_jax.types import Question, UserError

# What follows the thoughts of a reply: one rating, which ends it. Thoughts that do not end have none.
_RATED = re.compile(r'(?:(?!</?score>|<think>).)*<score>\s*([1-5])\s*</score>[\s*`.]*', re.DOTALL)


class _Rater(Judge):
    """A judge that rates questions."""

    async def rate(self, identity: tuple[int, ...], question: str) -> int | None:
        """Returns the rating of a question; None without one."""
        return await self._ask(parse, identity, 'judge.rating', question=question)


def parse(text: str) -> int | None:
    """Returns the rating at the end of a reply, `<score>1</score>` to `<score>5</score>`; None for anything else."""
    rated = _RATED.fullmatch(text.rpartition('</think>')[2])
    return int(rated[1]) if rated else None


def rate_all(
    context: RolloutContext,
    settings: schema.Judge,
    questions: Sequence[Question],
    number: int,
    on_rating: Callable[[], None],
) -> list[Answered]:
    """Returns a result for each question, whose score is 0 for a rating of 1, 1 for one of 5, and None without one.

    Args:
      settings: `config.judge`, of kind policy or endpoint.
      number: as of `answering.answer_all`.

    Raises:
      UserError: too many replies failed or have no rating.
    """
    if settings.kind == 'policy':
        write = policy_writer(settings.temperature)
    else:
        from zeroplay_jax.selfplay.judge_endpoint import endpoint_writer

        write = endpoint_writer(settings, context.prompts)
    # It writes no rubrics.
    rater = _Rater(write, (0, 0), settings.max_failure_rate).bound(context)
    limit = asyncio.Semaphore(settings.at_once)

    async def rate(index: int, question: Question) -> Answered:
        async with limit:
            rating = await rater.rate((number, index), question.text)
        return Answered(None if rating is None else (rating - 1) / 4, 0, 0.0, None)

    pending = [rate(index, question) for index, question in enumerate(questions)]
    results = context.scheduler.run(pending, on_rating)
    rater.check_failure_rate(rater.stats)
    if all(result.score is None for result in results):
        raise UserError(f'--metric=rating: no question has a rating; {rater.last_failure}')
    return results
