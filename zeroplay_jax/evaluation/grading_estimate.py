"""What a graded evaluation will ask for: rollouts, judge requests, tokens at most, and their price."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from zeroplay_jax.evaluation.grading_record import GradingRecord
from zeroplay_jax.evaluation.rubric_grading import is_needed, judgements
from zeroplay_jax.evaluation.rubric_tasks import RubricTask
from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.tokens import Codec

# Prices are per this many tokens.
_PRICED_TOKENS = 1_000_000


@dataclasses.dataclass(frozen=True)
class JudgeCost:
    """What one judge costs.

    Attributes:
      name: 'judge' or 'second_judge'.
      key: its name in the record (`NamedJudge.key`).
      reply_tokens: longest reply; 0: a rule, which gets no requests.
      prices: of a million prompt tokens and of a million reply tokens; zeros: unknown.
    """

    name: str
    key: str
    reply_tokens: int
    prices: tuple[float, float] = (0.0, 0.0)


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

    @property
    def price(self) -> float | None:
        """Price at most, in the currency of the prices, without repeated requests; None if no prices are known."""
        # A rule gets no requests.
        if not self.cost.reply_tokens:
            return 0.0
        if not any(self.cost.prices):
            return None
        prompt_price, reply_price = self.cost.prices
        amount = self.prompt_tokens * prompt_price + self.reply_tokens * reply_price
        return amount / _PRICED_TOKENS


def estimate_judge(
    cost: JudgeCost,
    tasks: Sequence[RubricTask],
    record: GradingRecord,
    samples: int,
    codec: Codec,
    templates: Mapping[str, str],
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
    empty_prompt = prompts.fill(templates['judge_grade'], task='', given='', rubric='')
    template_tokens = len(codec.render(empty_prompt))
    for task in tasks:
        pending = []
        for judgement in judgements([task], cost.key, samples):
            if is_needed(record, judgement):
                pending.append(judgement)
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
    text = (
        f'{key}: {estimate.judgements:,} requests, at most {estimate.prompt_tokens:,} prompt tokens and '
        f'{estimate.reply_tokens:,} reply tokens'
    )
    if estimate.price is not None:
        text += (
            f', at most {estimate.price:,.2f} in the currency of config.{estimate.cost.name}.prices'
        )
    return text
