"""How a rollout goes on after its end: the context in which it does, made of ids that exist already.

A turn stays in the context together with what was written behind it, an observation or a note; the prompt always
stays. Where something is left out, the old context joins `Trajectory.earlier`, as with `rollout.drop_thinking`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Int

from zeroplay_jax.rollout.environment import Environment
from zeroplay_jax.rollout.foreign_text import Untrusted
from zeroplay_jax.types import ENV, POLICY, PROMPT, ToolCall, Trajectory, UserError


def cut(rollout: Trajectory, keep: Collection[int] | None) -> Trajectory:
    """Returns a rollout in the context of its prompt and the turns `keep`; None: in its context as it is.

    A note directly behind the prompt belongs to no turn, and stays with None only.

    Args:
      keep: indices of `Trajectory.turns`, in any order.

    Raises:
      UserError: one of these turns is not in the context.
    """
    if keep is None:
        return rollout
    starts = np.asarray(rollout.starts, np.int64)
    missing = sorted(
        number for number in keep if not 0 <= number < len(starts) or starts[number] < 0
    )
    if missing:
        present = np.flatnonzero(starts >= 0).tolist()
        raise UserError(
            f'rollout {rollout.identity} cannot keep turn {missing[0]}, which is not in its context; keep some of '
            f'{present}'
        )
    length = len(rollout.tokens)
    edges = [*starts[starts >= 0], length]
    positions = list(range(rollout.prompt_tokens))
    new_starts = [-1] * len(starts)
    for number in sorted(set(keep)):
        new_starts[number] = len(positions)
        stop = min(edge for edge in edges if edge > starts[number])
        positions += range(starts[number], stop)
    if len(positions) == length:
        return rollout
    kept = np.asarray(positions)
    return _in_new_context(
        rollout, rollout.tokens[kept], rollout.source[kept], starts=tuple(new_starts)
    )


def _in_new_context(
    rollout: Trajectory,
    tokens: Int[np.ndarray, ' tokens'],
    source: Int[np.ndarray, ' tokens'],
    starts: tuple[int, ...],
) -> Trajectory:
    """Returns a rollout whose context has these tokens; the old one, if anything in it is trained, is in `earlier`."""
    earlier = rollout.earlier
    if np.any(rollout.source == POLICY):
        ended = dataclasses.replace(
            rollout, turns=(), finish='continued', earlier=(), starts=(), tool_states=({},)
        )
        earlier = (*earlier, ended)
    return dataclasses.replace(
        rollout,
        tokens=tokens,
        # They are trained in the context in which they were sampled.
        source=np.where(source == POLICY, PROMPT, source).astype(np.int8),
        logp=np.zeros(len(tokens), np.float32),
        earlier=earlier,
        starts=starts,
        experts=None,
        kept=None,
    )


def ends_in_turn(rollout: Trajectory) -> bool:
    """Returns whether the context ends with the last turn, to which nothing has been replied."""
    if not rollout.starts or rollout.starts[-1] < 0:
        return False
    return rollout.source[-1] != ENV


def open_call(rollout: Trajectory, env: Environment) -> tuple[ToolCall | None, bool]:
    """Returns the call that waits for its reply at the end of the context, and whether it was run (or refused) already.

    A call waits that the last turn ended with: a refused one, one whose result found no room, and one that was not run
    because no turn was left.
    """
    if not ends_in_turn(rollout):
        return None, False
    turn = rollout.turns[-1]
    if turn.call is not None:
        return turn.call, True
    if not turn.closed or not turn.text.endswith(env.call_stops):
        return None, False
    call = env.read_turn(turn.text).call
    return call, call is not None and call.error is not None


def note_ids(rollout: Trajectory, env: Environment, note: str) -> Int[np.ndarray, ' tokens']:
    """Returns the ids, int32, of a note: the end of the assistant's turn, a message of the user, the next header.

    The chat template writes them around the note, which is foreign text. An end token that was sampled stands for the
    template's own.

    Raises:
      UserError: the chat template cannot write such a message.
    """
    ids = env.codec.suffix({'role': 'user', 'content': [Untrusted(env.escaped(note))]})
    end_tokens = env.codec.eos_ids
    if rollout.tokens[-1] in end_tokens and ids[0] in end_tokens:
        return ids[1:]
    return ids


def replied(rollout: Trajectory, env: Environment, ids: Sequence[int]) -> Trajectory:
    """Returns a rollout with an observation or a note behind its context.

    With `rollout.drop_thinking` the thoughts of a turn leave the context, as they do while a rollout runs.
    """
    if ends_in_turn(rollout):
        start = rollout.starts[-1]
        turn_ids = rollout.tokens[start:].tolist()
        retained = env.retained_tokens(turn_ids)
        if retained != turn_ids:
            tokens = np.concatenate([rollout.tokens[:start], np.asarray(retained, np.int32)])
            source = np.full(len(tokens), PROMPT, np.int8)
            source[:start] = rollout.source[:start]
            rollout = _in_new_context(rollout, tokens, source, rollout.starts)
    added = len(ids)
    return dataclasses.replace(
        rollout,
        tokens=np.concatenate([rollout.tokens, np.asarray(ids, np.int32)]),
        source=np.concatenate([rollout.source, np.full(added, ENV, np.int8)]),
        logp=np.concatenate([rollout.logp, np.zeros(added, np.float32)]),
        # Those of a context that goes on are recorded anew.
        experts=None,
    )


def as_prompt(rollout: Trajectory) -> Trajectory:
    """Returns the context as a prompt: nothing in it is trained, and no turn or earlier context belongs to it.

    Tools have stored what they had after the last turn of this context.
    """
    present = [number for number, start in enumerate(rollout.starts) if start >= 0]
    turns = tuple(rollout.turns[number] for number in present)
    return dataclasses.replace(
        rollout,
        source=np.full(len(rollout.tokens), PROMPT, np.int8),
        logp=np.zeros(len(rollout.tokens), np.float32),
        turns=(),
        earlier=(),
        starts=(),
        kept=None,
        tool_states=(rollout.tool_states[max(present, default=-1) + 1],),
        after_failure=dataclasses.replace(rollout, turns=turns).has_tool_failure,
    )
