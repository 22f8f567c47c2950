"""The page allocator: random operations keep its counts, and nothing is lost or used twice."""

import dataclasses

import numpy as np

from zeroplay_jax.rollout.pages import OwnedPages, PageAllocator

PAGES, PAGE, CONTEXT = 60, 16, 300
# Per step of the random operations.
CHANCES = {'start': 0.1, 'fork': 0.15, 'grow': 0.45, 'cut': 0.1, 'close': 0.15, 'forget': 0.05}


@dataclasses.dataclass(eq=False)
class Row:
    """A rollout of so many tokens, or a prompt that is held for siblings."""

    pages: OwnedPages
    prompt: int
    limit: int = 0
    length: int = 0


def check(allocator, rows, holds):
    used = np.zeros(PAGES, int)
    written = []
    for row in rows:
        assert row.length <= len(row.pages.pages) * PAGE
        assert len(row.pages.pages) <= allocator.pages_for(row.limit)
        written += row.pages.pages[row.pages.floor // PAGE :]
    for owner in [*rows, *holds]:
        used[owner.pages.pages] += 1
    assert allocator.references == used.tolist()
    assert sorted(allocator.free) == np.flatnonzero(used == 0).tolist()
    assert len(set(written)) == len(written), 'a page with two writers'
    assert allocator.promised == sum(row.pages.reserved for row in rows) <= len(allocator.free)


def test_random_operations_keep_the_counts():
    rng = np.random.default_rng(0)
    allocator, rows, holds, refused = PageAllocator(PAGES, PAGE), [], [], 0
    pick = lambda items: items[rng.integers(len(items))]
    for operation in rng.choice(list(CHANCES), 20000, p=list(CHANCES.values())):
        if operation == 'start':
            prompt = int(rng.integers(1, 120))
            row = Row(OwnedPages(), prompt, int(rng.integers(prompt + 1, CONTEXT)), prompt)
            if allocator.reserve(row.pages, row.limit):
                allocator.grow(row.pages, prompt)
                rows.append(row)
                holds.append(Row(allocator.hold(row.pages, prompt), prompt))
            else:
                refused += 1
        elif operation in ('fork', 'forget') and holds:
            held = pick(holds)
            limit = int(rng.integers(held.prompt + 1, CONTEXT))
            if operation == 'forget':
                holds.remove(held)
                allocator.release(held.pages)
            elif pages := allocator.fork(held.pages, held.prompt, limit):
                rows.append(Row(pages, held.prompt, limit, held.prompt))
        elif operation in ('grow', 'cut', 'close') and rows:
            row = pick(rows)
            if operation == 'close':
                rows.remove(row)
                allocator.release(row.pages)
            elif operation == 'cut':
                row.length = int(rng.integers(row.prompt, row.length + 1))
                allocator.cut(row.pages, row.length)
            # A row that was cut reserves its next turn first, and waits if it cannot.
            elif allocator.reserve(row.pages, row.limit):
                row.length = min(row.limit, row.length + int(rng.integers(1, 40)))
                allocator.grow(row.pages, row.length)
        check(allocator, rows, holds)
    assert refused > 50
    for owner in [*rows, *holds]:
        allocator.release(owner.pages)
    assert len(allocator.free) == allocator.available == PAGES


def test_shared_pages_are_free_when_all_their_rows_are_released():
    allocator = PageAllocator(count=8, page=4)
    first = OwnedPages()
    assert allocator.reserve(first, 12)
    allocator.grow(first, 9)
    held = allocator.hold(first, 9)
    second = allocator.fork(held, 9, 12)
    allocator.release(held)
    # Two shared pages and an end page each.
    assert allocator.freed_by([first]) == allocator.freed_by([second]) == 1
    assert allocator.freed_by([first, second]) == 4
    waiting = OwnedPages()
    assert allocator.missing(waiting, 4 * 8) == 4 and not allocator.reserve(waiting, 4 * 8)
    allocator.release(first)
    allocator.release(second)
    assert allocator.missing(waiting, 4 * 8) == 0 and allocator.reserve(waiting, 4 * 8)
