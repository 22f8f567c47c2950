"""Config fields of rollouts and their programs; `schema.Run` has them as sections."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from zeroplay_jax.settings.kinds import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Problem,
    Section,
    Sizes,
)

# Ids of a set that a token is drawn from: all of them are recorded, and shapes are static.
MOST_KEPT = 512


# (top_p, top_k) with which tokens are drawn from the whole vocabulary.
ALL_IDS = (1.0, 0)


def most_kept(top_p: float, top_k: int) -> int:
    """Returns the most ids that tokens are drawn from with these fields of a role; 0: the whole vocabulary."""
    return 0 if (top_p, top_k) == ALL_IDS else top_k or MOST_KEPT


class Sampler(Section):
    """Shapes of the rollout programs."""

    # Static shapes: every other value compiles other programs.
    slots: PositiveInt = 96
    """Concurrent rollouts per process and set of weights."""
    context: PositiveInt = 512
    """Tokens of a slot: prompt, turns and observations."""
    chunk: PositiveInt = 32
    """Tokens of a chunk: prefill (not with page) and `log_probs`."""
    fill_rows: PositiveInt = 16
    """Prefill: chunks per call; not read with page."""
    burst: PositiveInt = 8
    """Decode steps per call."""
    page: NonNegativeInt = 0
    """Tokens of a [page](concepts.md#slots-and-pages) of the cache, 16 to 128; 0: as long as a slot (fastest on
    CPUs)."""
    pages: NonNegativeInt = 0
    """Pages of a process; 0: as many as the slots can fill. With fewer, waiting rollouts may be evicted."""
    token_budget: NonNegativeInt = 0
    """Required with page: tokens of a step, prefill and decode together, per process."""
    decode_buckets: Sizes = ()
    """With page: token counts of smaller steps without prefill, which [change last
    digits](concepts.md#slots-and-pages)."""
    attention: Literal['xla', 'used', 'ragged'] = 'xla'
    """xla: all slots at once. used: on CPUs, without page, used positions only. ragged: with page, a kernel for TPUs
    and GPUs."""


def written_tokens(rollout: Any) -> int:
    """Returns the most tokens that the policy writes in a rollout with these limits, a section `Rollout`."""
    turns_tokens = rollout.max_turns * rollout.turn_tokens
    return min(turns_tokens, rollout.response_tokens or turns_tokens)


class Rollout(Section):
    """Limits of a rollout."""

    prompt_tokens: PositiveInt = 96
    """Longest prompt; longer ones drop their task."""
    turn_tokens: PositiveInt = 64
    """Longest assistant turn."""
    response_tokens: NonNegativeInt = 0
    """Most tokens after the prompt, with observations; 0: until the slot is full."""
    observation_tokens: PositiveInt = 128
    """Longest observation; the end is cut off."""
    max_turns: PositiveInt = 5
    """Assistant turns; the last cannot call a tool."""
    drop_thinking: bool = False
    """Remove thoughts (…</think>) when their turn ends; every context is trained on."""
    truncated: Literal['keep', 'drop'] = 'keep'
    """Train on rollouts that ended at a limit, or drop them."""
    failed: Literal['keep', 'drop', 'retry'] = 'drop'
    """Rollouts in which a tool failed or timed out: train on them (keep: the policy pays for its slow calls), drop
    them, or sample them anew twice at most, then drop (retry). What a judge's server failed at is dropped, too; with
    keep a missing verdict approves nothing."""
    deterministic: bool = True
    """Wait for slow tools. False: slow calls become error observations."""
    tool_timeout: PositiveFloat = 30.0
    """Seconds from a tool call to its result if not `deterministic`, waiting for a thread included."""
    overlap: Literal['auto', 'on', 'off'] = 'auto'
    """Decode while the host reads the call before; auto: on accelerators. Rollouts are the same."""
    ahead: Literal[0, 1] = 0
    """1: rollouts of the next step use free slots, with weights one step older ([what it
    needs](concepts.md#steps-that-begin-early))."""

    def conflicts(self) -> Iterator[Problem]:
        """Yields a response that is shorter than a turn."""
        if 0 < self.response_tokens < self.turn_tokens:
            text = f'a turn may have {self.turn_tokens} (rollout.turn_tokens); give that or more, or 0 for no limit'
            yield Problem('response_tokens', text)


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Static shape of the programs.

    Attributes:
      slots: rollouts in progress at the same time.
      context: tokens that a slot can hold.
      chunk: tokens of a slot that are prefilled together, not over pages shorter than a slot; tokens of a pass of
        rollout/scoring.py.
      fill_rows: chunks of a prefill call, of which several can be of one slot; not read over such pages either.
      burst: steps of a decode call.
      put_rows: slots of a put or clone call per data shard.
      put_tokens: tokens per slot of a put call.
      eos: ids of the tokens that end a turn.
      page: tokens of a page; 0: a page is as long as a slot.
      pages: pages of the cache; 0: as many as the slots can fill.
      token_budget: tokens of a step over pages shorter than a slot, which prefills and decodes at once.
      decode_buckets: ascending numbers of tokens for which a smaller step without prefill is compiled.
      attention: 'xla'; over pages shorter than a slot also 'ragged', a kernel; over pages as long as
        a slot also 'used', which reads used places only, one slot after another.
      kept: most ids that a token is drawn from where some role has top_p or top_k (`most_kept`); 0: none has.
    """

    slots: int
    context: int
    chunk: int
    fill_rows: int
    burst: int
    # Host to device is a small part of a step, whatever the size of these calls.
    put_rows: int = 16
    put_tokens: int = 96
    eos: tuple[int, ...] = ()
    page: int = 0
    pages: int = 0
    token_budget: int = 0
    decode_buckets: tuple[int, ...] = ()
    attention: str = 'xla'
    kept: int = 0

    @property
    def is_paged(self) -> bool:
        """Whether pages are shorter than a slot."""
        return 0 < self.page < self.context

    @property
    def positions(self) -> int:
        """Positions per slot in the cache."""
        if self.is_paged:
            return self.pages_per_slot * self.page
        # More than `context`, because a chunk that begins near its end runs past it.
        return self.context + max(self.chunk, self.burst)

    @property
    def page_tokens(self) -> int:
        """Positions of a page."""
        return self.page if self.is_paged else self.positions

    @property
    def pages_per_slot(self) -> int:
        """Pages of a rollout that fills its slot."""
        return -(-self.context // self.page) if self.is_paged else 1

    @property
    def page_count(self) -> int:
        """Pages of the cache."""
        return self.pages or self.slots * self.pages_per_slot

    def of_shard(self, shards: int) -> SamplerConfig:
        """Returns the shape of one of `shards` equal data shards; `configuration.rules.check_shards` allows them."""
        return dataclasses.replace(
            self,
            slots=self.slots // shards,
            pages=self.page_count // shards,
            token_budget=self.token_budget // shards,
            decode_buckets=tuple(bucket // shards for bucket in self.decode_buckets),
            # Rounded up: a call never has fewer chunks than the config says.
            fill_rows=-(-self.fill_rows // shards),
        )

    def conflicts(self, shards: int) -> Iterator[Problem]:
        """Yields pages that do not fit a slot, a cache too small for a rollout, and settings that need pages."""
        if self.page > self.context:
            yield Problem(
                'sampler.page', f'longer than a slot; give at most {self.context} (sampler.context)'
            )
        if not self.is_paged:
            without_pages = {
                'pages': (0, self.slots),
                'token_budget': (0,),
                'decode_buckets': ((),),
                'attention': ('xla', 'used'),
            }
            for name, values in without_pages.items():
                if getattr(self, name) not in values:
                    text = 'a page is as long as a slot; set sampler.page, such as 64'
                    yield Problem(f'sampler.{name}', text)
            return
        if self.attention == 'used':
            text = f'sampler.page={self.page} is shorter than a slot; set xla, or sampler.page=0'
            yield Problem('sampler.attention', text)
        if not self.token_budget:
            text = f'sampler.page={self.page} needs steps that prefill and decode; give the tokens of a step, such as'
            yield Problem('sampler.token_budget', f'{text} {2 * self.slots}')
            return
        buckets = self.decode_buckets
        if any(bucket >= self.token_budget for bucket in buckets):
            text = f'a whole step has {self.token_budget} tokens (sampler.token_budget); give less'
            yield Problem('sampler.decode_buckets', text)
        if list(buckets) != sorted(set(buckets)):
            text = 'not ascending; give each once, smallest first'
            yield Problem('sampler.decode_buckets', text)
        if any(bucket % shards for bucket in buckets):
            text = f'cannot be split evenly over {shards} data shards; give multiples of {shards}'
            yield Problem('sampler.decode_buckets', text)
        needed = self.pages_per_slot * shards
        if 0 < self.pages < needed:
            text = f'a rollout of {self.context} tokens fills {self.pages_per_slot} pages of {self.page}'
            yield Problem('sampler.pages', f'{text}; give {needed} or more')
