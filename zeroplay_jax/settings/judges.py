"""Fields of the judges."""

from __future__ import annotations

from typing import Literal

from zeroplay_jax.settings.bounds import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Prices,
    RequestFields,
    RubricCount,
    Section,
)


class Judge(Section):
    """Verdicts where no string comparison decides."""

    kind: Literal['rule', 'policy', 'endpoint'] = 'rule'
    """rule (miniature worlds), policy (the initial weights), or endpoint (a server)."""
    url: str = 'http://127.0.0.1:8001/v1'
    """endpoint: an OpenAI-compatible server; its key is read from OPENAI_API_KEY."""
    model: str = 'judge'
    """endpoint: name of the model."""
    rubric_model: str = ''
    """endpoint: another model that writes rubrics; '' is `model`."""
    grade_model: str = ''
    """endpoint: another model that grades by rubrics; '' is `model`."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature."""
    tokens: PositiveInt = 512
    """Longest reply."""
    grade_tokens: NonNegativeInt = 0
    """Longest reply that grades an answer by a rubric; 0: `tokens`. A policy's also ends where its slot is full."""
    request: RequestFields = ''
    """endpoint: further fields of the request, a JSON object; null takes a field away. Servers of reasoning models want
    `{"max_completion_tokens": 4096, "temperature": null}`."""
    timeout: PositiveFloat = 60.0
    """endpoint: seconds per attempt."""
    retries: NonNegativeInt = 3
    """endpoint: further attempts."""
    # Higher than for searches: small judges often write replies that cannot be parsed.
    max_failure_rate: Fraction = 0.5
    """Share of judgements without a verdict in a step above which the run stops."""
    rubrics: RubricCount = (3, 5)
    """Fewest and most items of a rubric list."""
    at_once: PositiveInt = 64
    """`evaluate --workdir`: judgements in progress at the same time, of each judge."""
    prices: Prices = (0.0, 0.0)
    """endpoint: prices of a million prompt tokens and of a million reply tokens, for the estimate that
    `evaluate --workdir` prints; (0, 0): unknown."""


class SecondJudge(Section):
    """A second judge of `evaluate --workdir`, whose grades are compared with those of `judge`; timeout, retries and
    max_failure_rate are those of `judge`."""

    kind: Literal['none', 'rule', 'endpoint'] = 'none'
    """none, rule (miniature worlds), or endpoint (a server)."""
    url: str = 'http://127.0.0.1:8002/v1'
    """endpoint: an OpenAI-compatible server; its key is read from SECOND_JUDGE_API_KEY."""
    model: str = 'judge'
    """endpoint: name of the model."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature."""
    tokens: PositiveInt = 512
    """Longest reply."""
    request: RequestFields = ''
    """As judge.request."""
    prices: Prices = (0.0, 0.0)
    """As judge.prices."""
