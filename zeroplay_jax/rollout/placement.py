"""Which rollout is in which slot and has which pages, and which one gives its pages up when they run out.

A rollout starts a turn only when all pages of the turn are reserved. It then never waits for another rollout before
the turn has ended, so rollouts cannot block each other. Between two turns (its tool runs, or its next turn waits for
pages) a rollout keeps its pages until an older one needs them; then it is evicted, and its tokens are prefilled again
later. The oldest rollout in a slot of a shard can evict all others, so it always proceeds.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Bool, Int

from zeroplay_jax.rollout.pages import OwnedPages, PageAllocator
from zeroplay_jax.rollout.requests import Prefix, Rollout
from zeroplay_jax.settings.rollouts import SamplerConfig


class Shard:
    """The free slots and the pages of one data shard.

    Args:
      number: of the shard.
      config: shape of the slots of one shard.
    """

    def __init__(self, number: int, config: SamplerConfig):
        self.number = number
        first_slot = number * config.slots
        self.slots = range(first_slot, first_slot + config.slots)
        self.free_slots = set(self.slots)
        self.allocator = PageAllocator(config.page_count, config.page_tokens)
        self._has_page_table = config.is_paged

    @property
    def is_idle(self) -> bool:
        """Whether no rollout is in a slot."""
        return len(self.free_slots) == len(self.slots)

    def take_slot(self, pages: OwnedPages) -> int:
        """Returns a free slot for a rollout with these pages, and removes it from the free ones."""
        if self._has_page_table:
            slot = min(self.free_slots)
        else:
            # Pages as long as a slot need no table: page s is that of slot s.
            slot = self.slots[pages.pages[0]]
        self.free_slots.remove(slot)
        return slot


class Placement:
    """Slots and pages of one sampler: of one set of weights, or of adapters over one base.

    Args:
      config: shape of the slots of all shards.
      shards: number of data shards.
      table: page table that the device programs read, see `Sampler`; None where pages are as long as slots.
      age: order in which turns began, see `Sampler`.

    Attributes:
      rollouts: the rollout in every slot.
      open_prefixes: prefixes of admitted requests with rollouts that still wait for a slot.
      generation: a number per slot that grows whenever a turn begins or ends in it.
      stats: 'evictions' and 'refilled_tokens' (prefilled once more because of them).
      before_eviction: called with a rollout whose pages are about to be given away.
    """

    def __init__(
        self, config: SamplerConfig, shards: int, table: np.ndarray | None, age: np.ndarray
    ):
        self.config = config
        self.table = table
        self.age = age
        self._turns = 0
        shard_config = config.of_shard(shards)
        self.shards = [Shard(number, shard_config) for number in range(shards)]
        self.rollouts: list[Rollout | None] = [None] * config.slots
        self.open_prefixes: list[Prefix] = []
        self.generation: Int[np.ndarray, ' slots'] = np.zeros(config.slots, int)
        self.stats: collections.Counter[str] = collections.Counter()
        self.before_eviction: Callable[[Rollout], None] = lambda rollout: None

    def active(self) -> Iterator[Rollout]:
        """Yields the rollouts in slots."""
        for rollout in self.rollouts:
            if rollout is not None:
                yield rollout

    def shard_for(self, prefix: Prefix, blocked_shards: set[int]) -> Shard | None:
        """Returns the shard for a new request, or None if it has to wait.

        Args:
          prefix: of the request.
          blocked_shards: numbers of the shards in which a rollout waits for pages; they take no new requests.
        """
        fitting = []
        for shard in self.shards:
            if shard.number not in blocked_shards and self._fits(prefix, shard):
                fitting.append(shard)
        # The emptiest shard, so that the shards have equal work; the first of equal ones.
        return max(fitting, key=lambda shard: shard.allocator.available, default=None)

    def _fits(self, prefix: Prefix, shard: Shard) -> bool:
        """Returns whether the first sample of a new request gets a slot of the shard and the pages of its first turn.

        The other samples get slots as these become free. Slots would be idle until there is one for each of them.
        """
        admitted = [other for other in self.open_prefixes if other.shard == shard.number]
        # What the waiting samples of admitted requests will take.
        waiting_slots = sum(len(other.waiting) for other in admitted)
        waiting_pages = sum(len(other.waiting) * self._unshared_pages(other) for other in admitted)
        prompt_pages = shard.allocator.shared_pages(len(prefix.tokens))
        needed_pages = prompt_pages + self._unshared_pages(prefix)
        has_slot = len(shard.free_slots) > waiting_slots
        return has_slot and shard.allocator.available - waiting_pages >= needed_pages

    def _unshared_pages(self, prefix: Prefix) -> int:
        """Returns the pages that a sample needs for its first turn beyond those it shares."""
        allocator = self.shards[0].allocator
        shared = allocator.shared_pages(len(prefix.tokens))
        return allocator.pages_for(prefix.first_limit(self.config.context)) - shared

    def start(self, prefix: Prefix) -> Rollout | None:
        """Gives a slot and pages to the next rollout of a prefix, and keeps those of the prefix for the others.

        Returns None if there is no free slot or page now. The prefix is not prefilled yet.
        """
        shard = self.shards[prefix.shard]
        prefix_tokens = len(prefix.tokens)

        def take_pages() -> OwnedPages | None:
            pages = OwnedPages()
            if not shard.allocator.reserve(pages, prefix.first_limit(self.config.context)):
                return None
            shard.allocator.grow(pages, prefix_tokens)
            return pages

        rollout = self._enter(prefix, take_pages)
        if rollout is not None:
            prefix.pages = shard.allocator.hold(rollout.pages, prefix_tokens)
            prefix.holder_slot = rollout.slot
            prefix.is_cached = False
        return rollout

    def fork(self, prefix: Prefix) -> Rollout | None:
        """Gives a slot to the next rollout of a prefix that is prefilled; None as for `start`."""
        shard = self.shards[prefix.shard]
        shared_pages = prefix.pages
        assert shared_pages is not None and prefix.is_cached

        def take_pages() -> OwnedPages | None:
            limit = prefix.first_limit(self.config.context)
            return shard.allocator.fork(shared_pages, len(prefix.tokens), limit)

        return self._enter(prefix, take_pages)

    def _enter(self, prefix: Prefix, take_pages: Callable[[], OwnedPages | None]) -> Rollout | None:
        """Returns the prefix's next rollout with a slot and the pages that `take_pages` returns."""
        shard = self.shards[prefix.shard]
        if not shard.free_slots:
            return None
        pages = take_pages()
        if pages is None and shard.is_idle:
            # No rollout will end and free pages, so those that only other prefixes occupy are freed.
            self._drop_prefixes(shard, keep=prefix)
            pages = take_pages()
        if pages is None:
            return None
        rollout = prefix.waiting.popleft()
        rollout.enter(shard.take_slot(pages), pages)
        self.rollouts[rollout.slot] = rollout
        self._run_turn(rollout)
        return rollout

    def _run_turn(self, rollout: Rollout) -> None:
        """Records that a turn begins, whose pages the rollout has."""
        rollout.is_running = True
        self.generation[rollout.slot] += 1
        self.age[rollout.slot] = self._turns
        self._turns += 1
        self._write_table(rollout)

    def end_page(self, prefix: Prefix) -> int:
        """Returns the page with the end of a prefix, which its further rollouts copy."""
        assert prefix.pages is not None
        return prefix.pages.pages[-1]

    def take_chunks(
        self, entries_per_shard: int, included: Bool[np.ndarray, ' slots'] | None
    ) -> list[int]:
        """Returns the slots of the next prefill call, an entry per chunk, and takes the chunks from `chunks_left`.

        Args:
          entries_per_shard: most entries of a data shard.
          included: slots that can be in this call; None: all.
        """
        slots = []
        entries_of_shard = [0] * len(self.shards)
        for rollout in self.active():
            if included is not None and not included[rollout.slot]:
                continue
            shard = rollout.prefix.shard
            chunks = min(rollout.chunks_left, entries_per_shard - entries_of_shard[shard])
            entries_of_shard[shard] += chunks
            rollout.chunks_left -= chunks
            slots += [rollout.slot] * chunks
        return slots

    def begin_turn(self, rollout: Rollout) -> bool:
        """Reserves the pages of a rollout's next turn, by eviction if necessary; returns False if it has to wait."""
        if not self._reserve_turn(rollout):
            return False
        self._shard_of(rollout).allocator.grow(rollout.pages, len(rollout.tokens))
        if rollout.is_evicted:
            # The device has nothing of it any more.
            self.stats['refilled_tokens'] += rollout.put_start
            rollout.put_start = 0
            rollout.is_evicted = False
        self._run_turn(rollout)
        return True

    def _reserve_turn(self, rollout: Rollout) -> bool:
        """Reserves the pages of a rollout's turn; evicts younger rollouts of its shard if that gives enough pages."""
        if self._reserve_by_eviction(rollout):
            return True
        shard = self._shard_of(rollout)
        if any(resident.is_running for resident in self._rollouts_of(shard)):
            # They will end their turns and return pages.
            return False
        self._drop_prefixes(shard)
        # Where this fails too, older rollouts have the pages and wait for their tools.
        return self._reserve_by_eviction(rollout)

    def _reserve_by_eviction(self, rollout: Rollout) -> bool:
        """Reserves the pages of a rollout's turn, and evicts the rollouts that this takes; evicts none in vain."""
        shard = self._shard_of(rollout)
        allocator = shard.allocator
        limit = rollout.turn_limit(self.config.context)
        missing = allocator.missing(rollout.pages, limit)
        candidates = self._evictable(shard, rollout)
        victims: list[Rollout] = []
        # A page that siblings share is free only when all of them are evicted, so the pages of all victims are counted
        # together.
        while candidates and allocator.freed_by([victim.pages for victim in victims]) < missing:
            victims.append(candidates.pop(0))
        if allocator.freed_by([victim.pages for victim in victims]) < missing:
            return False
        for victim in victims:
            self._evict(victim)
        return allocator.reserve(rollout.pages, limit)

    def _evictable(self, shard: Shard, rollout: Rollout) -> list[Rollout]:
        """Returns the younger rollouts of the shard that have pages and are not within a turn, youngest first."""
        younger: list[Rollout] = []
        # A page as long as a slot belongs to the slot.
        if not self.config.is_paged:
            return younger
        for other in self._rollouts_of(shard):
            is_parked = not other.is_running and bool(other.pages.pages)
            if is_parked and other.identity > rollout.identity:
                younger.append(other)
        return sorted(younger, key=lambda other: other.identity, reverse=True)

    def _evict(self, rollout: Rollout) -> None:
        self.before_eviction(rollout)
        self._shard_of(rollout).allocator.release(rollout.pages)
        # All its tokens are put and prefilled again when its next turn begins.
        rollout.is_evicted = True
        self.stats['evictions'] += 1

    def grow_for_bursts(self, bursts: int) -> None:
        """Gives every rollout within a turn the pages of so many decode calls."""
        # A page as long as a slot holds all that its rollout will ever have.
        if self.table is None:
            return
        for rollout in self.active():
            length = len(rollout.tokens) + bursts * self.config.burst
            # In most rounds its pages hold them already.
            if not rollout.is_running or length <= len(rollout.pages.pages) * self.config.page:
                continue
            pages_before = len(rollout.pages.pages)
            length = min(length, rollout.turn_limit(self.config.context))
            self._shard_of(rollout).allocator.grow(rollout.pages, length)
            if len(rollout.pages.pages) > pages_before:
                self._write_table(rollout)

    def release_turn(self, rollout: Rollout) -> None:
        """Returns the pages that a rollout's turn did not need."""
        self._stop_turn(rollout)
        self._shard_of(rollout).allocator.cut(rollout.pages, len(rollout.tokens))

    def _stop_turn(self, rollout: Rollout) -> None:
        rollout.is_running = False
        self.generation[rollout.slot] += 1

    def close(self, rollout: Rollout) -> None:
        """Frees the slot and pages of a rollout."""
        shard = self._shard_of(rollout)
        shard.allocator.release(rollout.pages)
        shard.free_slots.add(rollout.slot)
        self._stop_turn(rollout)
        self.rollouts[rollout.slot] = None

    def close_served(self) -> None:
        """Removes the prefixes whose rollouts all have a slot, and the pages kept for them."""
        still_open = []
        for prefix in self.open_prefixes:
            if prefix.waiting:
                still_open.append(prefix)
            else:
                self._drop_pages(prefix)
        self.open_prefixes = still_open

    def _drop_pages(self, prefix: Prefix) -> None:
        """Frees the pages that are kept for the rollouts of a prefix; the next one prefills it again."""
        if prefix.pages is not None:
            self.shards[prefix.shard].allocator.release(prefix.pages)
            prefix.pages = None
            prefix.is_cached = False

    def drop_prefix_in(self, rollout: Rollout) -> None:
        """Frees the prefix whose state is in the slot of a rollout, which replaces it; further siblings prefill it."""
        prefix = rollout.prefix
        if prefix.pages is not None and prefix.pages.pages == rollout.pages.pages:
            self._drop_pages(prefix)

    def _drop_prefixes(self, shard: Shard, keep: Prefix | None = None) -> None:
        for prefix in self.open_prefixes:
            if prefix.shard == shard.number and prefix is not keep:
                self._drop_pages(prefix)

    def _shard_of(self, rollout: Rollout) -> Shard:
        return self.shards[rollout.prefix.shard]

    def _rollouts_of(self, shard: Shard) -> list[Rollout]:
        in_slots = [self.rollouts[slot] for slot in shard.slots]
        return [rollout for rollout in in_slots if rollout is not None]

    def _write_table(self, rollout: Rollout) -> None:
        """Tells the device programs the pages of a rollout."""
        if self.table is not None:
            pages = rollout.pages.pages
            self.table[rollout.slot, : len(pages)] = pages
