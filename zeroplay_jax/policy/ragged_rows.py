"""The tokens of a step as rows: what kernels of paged attention take, computed once per step for all layers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows with tokens in a step, in the order of their tokens. Only the first `count` entries are valid.

    Attributes:
      length: positions of every row up to its last token in the step; at least 1 also in invalid entries.
      start: index of the first token of every row, and at `count` the end of the last one.
      table: pages of every row.
      count: number of rows.
    """

    length: Int[Array, ' rows']
    start: Int[Array, ' rows_and_end']
    table: Int[Array, 'rows pages_per_row']
    count: Int[Array, '']

    def first(self, most: int, count: Int[Array, '']) -> Rows:
        """Returns the first `count` rows, which are at most `most`."""
        return Rows(self.length[:most], self.start[: most + 1], self.table[:most], count)

    def after(self, count: Int[Array, '']) -> Rows:
        """Returns the rows after the first `count`, with `start` relative to the first of their tokens."""
        start = jnp.roll(self.start, -count)
        return Rows(
            length=jnp.roll(self.length, -count),
            # Entries that `roll` moved to the end are invalid; they become 0.
            start=jnp.maximum(start - start[0], 0),
            table=jnp.roll(self.table, -count, axis=0),
            count=self.count - count,
        )


def rows_of_tokens(
    table: Int[Array, 'rows pages_per_row'],
    row: Int[Array, ' tokens'],
    position: Int[Array, ' tokens'],
) -> Rows:
    """Returns the rows of a step.

    Args:
      table: pages of every row, those without tokens included.
      row: row of every token. The tokens of a row are consecutive; idle tokens come last.
      position: position of every token within its row, ascending by 1; -1 marks an idle token.
    """
    tokens = row.shape[0]
    most_rows = min(table.shape[0], tokens)
    is_used = position >= 0
    used = jnp.sum(is_used, dtype=jnp.int32)
    previous_row = jnp.concatenate([jnp.full((1,), -1, row.dtype), row[:-1]])
    is_first = is_used & (row != previous_row)
    # Entries beyond the last row start where the used tokens end, so that they are empty.
    (start,) = jnp.nonzero(is_first, size=most_rows + 1, fill_value=tokens)
    start = jnp.minimum(start.astype(jnp.int32), used)
    last_token = jnp.maximum(start[1:] - 1, 0)
    return Rows(
        length=jnp.maximum(position[last_token] + 1, 1),
        start=start,
        table=table.at[row[start[:-1]]].get(mode='clip'),
        count=jnp.sum(is_first, dtype=jnp.int32),
    )


def count_singles(rows: Rows, most: int) -> Int[Array, '']:
    """Returns how many of the first rows, `most` at most, have one token in the step."""
    number = jnp.arange(rows.length.shape[0])
    tokens = rows.start[1:] - rows.start[:-1]
    is_single = (tokens == 1) & (number < rows.count) & (number < most)
    return jnp.sum(jnp.cumprod(is_single.astype(jnp.int32)))
