"""Which pages of the key/value cache belong to which rollout: bookkeeping on the host, exact integers.

A page holds a fixed number of consecutive tokens. A rollout has a list of pages in the order of its tokens. Siblings
share the pages that their prompt fills; such a page is never written again. Every other page has one writer.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Sequence


@dataclasses.dataclass
class OwnedPages:
    """The pages of one rollout, or of a prompt that is kept for siblings.

    Attributes:
      pages: page numbers, in the order of the tokens.
      floor: tokens in shared pages; the owner is never cut below it.
      reserved: pages that the owner may still take, see `PageAllocator.reserve`.
    """

    pages: list[int] = dataclasses.field(default_factory=list)
    floor: int = 0
    reserved: int = 0


class PageAllocator:
    """The pages of one data shard, with a reference count per page.

    Args:
      count: number of pages.
      page: tokens per page.

    Attributes:
      free: a heap of the pages without references; the lowest number is taken first.
      references: number of owners of each page.
      promised: free pages that are reserved for owners.
    """

    def __init__(self, count: int, page: int):
        self.count = count
        self.page = page
        self.free = list(range(count))
        self.references = [0] * count
        self.promised = 0

    @property
    def available(self) -> int:
        """Free pages that no owner has reserved."""
        return len(self.free) - self.promised

    def pages_for(self, length: int) -> int:
        """Returns the number of pages that hold `length` tokens."""
        return -(-length // self.page)

    def shared_pages(self, prompt: int) -> int:
        """Returns the number of pages that siblings with a prompt of this many tokens share.

        The keys and values of the prompt's last token are not part of the prefill, so its page is written by every
        sibling and is never shared, even if the prompt fills it.
        """
        return (prompt - 1) // self.page

    def reserve(self, owner: OwnedPages, length: int) -> bool:
        """Reserves the pages with which the owner can grow to `length` tokens; returns False if too few are free.

        A rollout that has reserved never waits for another one. That rules out deadlocks between those that decode.
        """
        if self.missing(owner, length) > 0:
            return False
        needed = self._needed(owner, length)
        self.promised += needed - owner.reserved
        owner.reserved = needed
        return True

    def missing(self, owner: OwnedPages, length: int) -> int:
        """Returns how many pages more must be free before `reserve` succeeds; not positive if it does."""
        return self._needed(owner, length) - owner.reserved - self.available

    def _needed(self, owner: OwnedPages, length: int) -> int:
        return max(self.pages_for(length) - len(owner.pages), 0)

    def freed_by(self, owners: Sequence[OwnedPages]) -> int:
        """Returns how many pages the release of these owners would make available."""
        released = collections.Counter(page for owner in owners for page in owner.pages)
        unreferenced = sum(count == self.references[page] for page, count in released.items())
        return unreferenced + sum(owner.reserved for owner in owners)

    def grow(self, owner: OwnedPages, length: int) -> None:
        """Adds pages to an owner until it holds `length` tokens; they must be reserved."""
        while len(owner.pages) < self.pages_for(length):
            if not owner.reserved:
                raise RuntimeError(f'a page is taken for {length} tokens without a reservation')
            page = heapq.heappop(self.free)
            self.references[page] = 1
            owner.pages.append(page)
            owner.reserved -= 1
            self.promised -= 1

    def cut(self, owner: OwnedPages, length: int) -> None:
        """Removes the pages beyond `length` tokens from an owner, and what it has reserved."""
        if length < owner.floor:
            raise RuntimeError(
                f'pages are cut to {length} tokens, of which {owner.floor} are in shared pages'
            )
        remaining = self.pages_for(length)
        for page in owner.pages[remaining:]:
            self._drop_reference(page)
        del owner.pages[remaining:]
        self.promised -= owner.reserved
        owner.reserved = 0

    def release(self, owner: OwnedPages) -> None:
        """Removes all pages from an owner, and what it has reserved."""
        owner.floor = 0
        self.cut(owner, 0)

    def hold(self, owner: OwnedPages, prompt: int) -> OwnedPages:
        """Returns another owner of the pages of a prompt, which keeps them when the rollout ends."""
        pages = owner.pages[: self.pages_for(prompt)]
        for page in pages:
            self.references[page] += 1
        owner.floor = self.shared_pages(prompt) * self.page
        return OwnedPages(pages, floor=owner.floor)

    def fork(self, held: OwnedPages, prompt: int, limit: int) -> OwnedPages | None:
        """Returns the pages of a sibling that can grow to `limit` tokens, or None if too few are free.

        Its last prompt page is a page of its own, to which the device copies the held one. If no rollout uses the held
        one any more, the sibling takes that page itself.

        Args:
          held: pages of the prompt, see `hold`.
          prompt: tokens of the prompt.
          limit: tokens that the sibling may reach in its first turn.
        """
        shared = self.shared_pages(prompt)
        tail = held.pages[shared]
        pages = held.pages[:shared]
        if self.references[tail] == 1:
            pages = [*pages, tail]
        sibling = OwnedPages(pages, floor=shared * self.page)
        if not self.reserve(sibling, limit):
            return None
        for page in pages:
            self.references[page] += 1
        self.grow(sibling, prompt)
        return sibling

    def _drop_reference(self, page: int) -> None:
        self.references[page] -= 1
        if not self.references[page]:
            heapq.heappush(self.free, page)
