"""The page allocator: random operations keep its counts, and nothing is lost or used twice."""

import numpy as np

from zeroplay_jax.rollout.pages import OwnedPages, PageAllocator

PAGES, PAGE, CONTEXT = 60, 16, 300


class Model:
    """Random operations of rollouts on an allocator, with what every row's pages must hold."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.pages = PageAllocator(PAGES, PAGE)
        self.rows = []  # [row, length, limit, prompt]
        self.holds = []  # (held, prompt)
        self.writers = {}  # page → id of the row that writes it
        self.seen = dict.fromkeys(('refused', 'in_place', 'copied', 'cut'), 0)

    def pick(self, items):
        return items[self.rng.integers(len(items))]

    def start(self):
        prompt = int(self.rng.integers(1, 120))
        limit = int(self.rng.integers(prompt + 1, CONTEXT))
        row = OwnedPages()
        if not self.pages.reserve(row, limit):
            self.seen['refused'] += 1
            return
        self.pages.grow(row, prompt)
        self.rows.append([row, prompt, limit, prompt])
        if self.rng.random() < 0.5:
            self.holds.append((self.pages.hold(row, prompt), prompt))

    def fork(self):
        if not self.holds:
            return
        held, prompt = self.pick(self.holds)
        limit = int(self.rng.integers(prompt + 1, CONTEXT))
        tail = held.pages[self.pages.shared_pages(prompt)]
        before = self.pages.references[tail]
        row = self.pages.fork(held, prompt, limit)
        if row is None:
            self.seen['refused'] += 1
            return
        in_place = row.pages[-1] == tail
        assert in_place == (before == 1)
        self.seen['in_place' if in_place else 'copied'] += 1
        self.rows.append([row, prompt, limit, prompt])

    def grow(self):
        if self.rows:
            entry = self.pick(self.rows)
            row, length, limit, _ = entry
            # A row that was cut reserves its next turn first, and waits if it cannot.
            if self.pages.reserve(row, limit):
                entry[1] = min(limit, length + int(self.rng.integers(1, 40)))
                self.pages.grow(row, entry[1])
            else:
                self.seen['refused'] += 1

    def cut(self):
        if self.rows:
            entry = self.pick(self.rows)
            entry[1] = int(self.rng.integers(entry[3], entry[1] + 1))
            self.pages.cut(entry[0], entry[1])
            self.seen['cut'] += 1

    def close(self):
        if self.rows:
            row, *_ = self.rows.pop(self.rng.integers(len(self.rows)))
            self.pages.release(row)

    def forget(self):
        if self.holds:
            held, _ = self.holds.pop(self.rng.integers(len(self.holds)))
            self.pages.release(held)

    def check(self):
        pages = self.pages
        used = np.zeros(PAGES, int)
        written = []
        for row, length, limit, _ in self.rows:
            assert length <= len(row.pages) * PAGE and len(row.pages) <= pages.pages_for(limit)
            written += row.pages[row.floor // PAGE :]
            used[row.pages] += 1
        for held, _ in self.holds:
            used[held.pages] += 1
        assert pages.references == used.tolist()
        assert sorted(pages.free) == np.flatnonzero(used == 0).tolist()
        assert len(set(written)) == len(written), 'a page with two writers'
        assert pages.promised == sum(row.reserved for row, *_ in self.rows) <= len(pages.free)


def test_random_operations_keep_the_counts():
    model = Model(seed=0)
    operations = [model.start, model.fork, model.grow, model.cut, model.close, model.forget]
    choices = model.rng.choice(len(operations), 20000, p=[0.1, 0.15, 0.45, 0.1, 0.15, 0.05])
    for number, choice in enumerate(choices):
        operations[choice]()
        if number % 50 == 0:
            model.check()
    model.check()
    assert min(model.seen.values()) > 50, model.seen
    while model.rows:
        model.close()
    while model.holds:
        model.forget()
    assert len(model.pages.free) == model.pages.available == PAGES
    assert not any(model.pages.references)


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
