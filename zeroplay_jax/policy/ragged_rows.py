"""The tokens of a step as rows: what kernels of paged attention take, computed once per step for all layers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True)
class StepShape:
    """What is known of the rows of a step before it runs.

    Attributes:
      most_singles: most leading rows with one token; 0 if all rows are chunks.
      has_chunks: whether rows after them may have several tokens.
    """

    most_singles: int
    has_chunks: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows with tokens in a step, in the order of their tokens. Entries from `count` on are invalid.

    Attributes:
      length: positions of every row up to its last token in the step; at least 1, also in invalid entries.
      start: index of the first token of every row, and at `count` the end of the last one.
      table: pages of every row.
      count: number of rows.
      singles: number of leading rows that have one token, see `StepShape`.
    """

    length: Int[Array, ' rows']
    start: Int[Array, ' rows_and_end']
    table: Int[Array, 'rows pages_per_row']
    count: Int[Array, '']
    singles: Int[Array, '']


def rows_of_tokens(
    table: Int[Array, 'rows pages_per_row'],
    row: Int[Array, ' tokens'],
    position: Int[Array, ' tokens'],
    shape: StepShape,
) -> Rows:
    """Returns the rows of a step.

    Args:
      table: pages of every row, those without tokens included.
      row: row of every token. The tokens of a row are consecutive; idle tokens come last.
      position: position of every token within its row, ascending by 1; -1 marks an idle token.
      shape: rows with one token come before chunks.
    """
    tokens = row.shape[0]
    most_rows = min(table.shape[0], tokens)
    is_used = position >= 0
    used = jnp.sum(is_used, dtype=jnp.int32)
    # The first token has no predecessor: -1 is the number of no row.
    before_first = jnp.full((1,), -1, row.dtype)
    previous_row = jnp.concatenate([before_first, row[:-1]])
    is_first = is_used & (row != previous_row)
    first_tokens = jnp.cumsum(is_first, dtype=jnp.int32)
    count = first_tokens[-1]
    number = jnp.arange(most_rows + 1, dtype=jnp.int32)
    start = jnp.searchsorted(first_tokens, number, side='right', method='compare_all')
    # Invalid rows start where the used tokens end, so that they are empty.
    start = jnp.minimum(start.astype(jnp.int32), used)
    first_token = start[:-1]
    end = start[1:]
    last_token = jnp.maximum(end - 1, 0)
    length = position[last_token] + 1
    if shape.has_chunks:
        row_tokens = end - first_token
        most_singles = jnp.minimum(count, shape.most_singles)
        may_be_single = number[:-1] < most_singles
        is_single = (row_tokens == 1) & may_be_single
        # The product is 0 from the first row on that has several tokens.
        is_leading = jnp.cumprod(is_single.astype(jnp.int32))
        singles = jnp.sum(is_leading)
    else:
        singles = count
    row_id = row.at[first_token].get(mode='clip')
    return Rows(
        length=jnp.maximum(length, 1),
        start=start,
        table=table.at[row_id].get(mode='clip'),
        count=count,
        singles=singles,
    )
