"""Scores of packed tokens that are computed a chunk at a time: as arrays, or reduced to a loss with its gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from zeroplay_jax.policy import token_chunks
from zeroplay_jax.policy.attention import AnyArray


@dataclasses.dataclass(frozen=True)
class TokenScores:
    """The arguments of `token_chunks`, for scores of every token given the one before. Nothing is computed yet.

    Attributes:
      function: (head, states, shared, per_token) → tree of scores [tokens], for a chunk of tokens.
      chunk: tokens per iteration and device.
      mesh: mesh over whose data axes the rows are split; None: no mesh.
      head: tree {parameter name: matrix}; it has a gradient unless it is frozen.
      is_frozen: whether the head belongs to a frozen base, of which no gradient is computed.
      states: [batch, length, hidden_size], hidden states of all tokens; that of a token predicts the next one.
      shared: tree that every token needs, without gradient.
      per_token: tree of arrays [batch, length - 1, …], of the predicted tokens, without gradient.
      wanted: bool [batch, length], True at the tokens whose scores are needed; None: all.
    """

    function: Callable
    chunk: int
    mesh: Mesh | None
    head: Any
    is_frozen: bool
    states: Float[Array, 'batch length hidden_size']
    shared: Any
    per_token: Any
    wanted: Bool[AnyArray, 'batch length'] | None

    def arrays(self) -> Any:
        """Returns the tree of scores as arrays [batch, length]; 0 at the first token of a row and where not wanted."""
        scores = self._run(token_chunks.map_tokens, self.function, self.shared, self.per_token)
        # From the token that predicts to the predicted one.
        return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (1, 0))), scores)

    def loss(
        self, function: Callable, rows: Any, shared: Any, elementwise: bool
    ) -> tuple[Float[Array, ''], Any]:
        """Returns (loss, statistics) of the scores.

        Args:
          function: (scores, rows, shared) → (loss, statistics), float32 scalars: sums over tokens. Where the weight of
            a token is 0, it adds nothing. Only the loss has a gradient.
          rows: tree of arrays [batch, length] without gradient.
          shared: tree without gradient.
          elementwise: whether each term of the sums is of one token alone. The function is then applied to chunks,
            arrays [1, tokens], and the gradient computed with the scores. Otherwise it is applied to whole rows, and
            the logits are computed again for the gradient.
        """
        if not elementwise:
            return function(self.arrays(), rows, shared)

        def chunk_loss(head, states, both_shared, both_per_token):
            score_shared, loss_shared = both_shared
            score_inputs, loss_inputs = both_per_token
            scores = self.function(head, states, score_shared, score_inputs)
            # Losses take rows: the chunk is one row.
            one_row = jax.tree.map(lambda x: x[None], (scores, loss_inputs))
            return function(*one_row, loss_shared)

        loss_inputs = jax.tree.map(lambda x: x[:, 1:], rows)
        return self._run(
            token_chunks.sum_tokens,
            chunk_loss,
            (self.shared, shared),
            (self.per_token, loss_inputs),
        )

    def _run(self, over_tokens: Callable, function: Callable, shared, per_token):
        """Calls `map_tokens` or `sum_tokens` for the predictions of all tokens but the first."""
        wanted = None if self.wanted is None else self.wanted[:, 1:]
        head = self.head
        if self.is_frozen:
            # Passed among the arrays without gradient: no product is computed for a gradient that nobody reads.
            head, shared, function = {}, (self.head, shared), _with_frozen_head(function)
        return over_tokens(
            function, self.chunk, self.mesh, head, self.states[:, :-1], shared, per_token, wanted
        )


def _with_frozen_head(function: Callable) -> Callable:
    """Returns `function` with its head among the shared arrays."""

    def call(_, states, head_and_shared, per_token):
        head, shared = head_and_shared
        return function(head, states, shared, per_token)

    return call
