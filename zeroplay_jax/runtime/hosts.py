"""The processes of one run. Each plays its share of the episodes with its own slots and search, then all are told all.

Between two exchanges no process waits for another: rollouts take as many rounds as they take. What is exchanged is
JSON, so that every process goes on from the same numbers and takes the same decisions.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zeroplay_jax.types import UserError

Identity = tuple[int, ...]
# Hosts of a slice come up minutes apart; JAX's own patience is the same.
JOIN_SECONDS = 300.0


def connect(mode: str, coordinator: str, processes: int, process: int, heartbeat: int) -> None:
    """Joins the processes of a run; to be called before JAX looks at its devices.

    Args:
      mode: 'off' (one process), 'auto' (TPU VMs, SLURM, GKE and the like say who they are), or 'coordinator'.
      coordinator: 'host:port' of process 0.   processes, process: how many, and which one this is.
      heartbeat: seconds without a sign of life from a process after which JAX stops the others.

    Raises:
      UserError: nobody knows of a cluster here, process 0 cannot open its port, or it does not come.
      Where not all come within `JOIN_SECONDS`, the process ends with one line and code 2: JAX waits in C++.
    """
    if mode == 'off':
        return
    explicit: dict[str, Any] = {}
    if mode == 'coordinator':
        explicit = dict(
            coordinator_address=coordinator, num_processes=processes, process_id=process
        )
        # Else SLURM's variables would cut every process down to one GPU.
        explicit['cluster_detection_method'] = 'deactivate'
        if process == 0:
            _check_free(coordinator)
        else:
            _wait_until_open(coordinator, JOIN_SECONDS)
    # JAX itself ends with an abort in C++ where somebody does not come; this is sooner, and one line.
    patience = threading.Timer(JOIN_SECONDS, _give_up, (mode,))
    patience.daemon = True
    patience.start()
    later = int(JOIN_SECONDS) + 60
    try:
        jax.distributed.initialize(
            **explicit, heartbeat_timeout_seconds=heartbeat, initialization_timeout=later
        )
    except (ValueError, RuntimeError) as error:
        mend = (
            f'is process 0 up at {coordinator}?'
            if mode == 'coordinator'
            else 'set config.distributed.mode to off on one machine, or to coordinator'
        )
        raise UserError(
            f'config.distributed.mode={mode}: {str(error).splitlines()[0]}; {mend}'
        ) from error
    finally:
        patience.cancel()


def _give_up(mode: str) -> None:
    print(
        f'zeroplay_jax: config.distributed.mode={mode}: not all processes came together within {JOIN_SECONDS:.0f} s; '
        'start the same command on every host, and let the hosts reach each other',
        file=sys.stderr,
        flush=True,
    )
    os._exit(2)  # the main thread waits in C++


def _check_free(coordinator: str) -> None:
    """A port that is taken would end JAX's own server, and this process, without a word."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # what JAX's server can open, this can
        try:
            probe.bind(('', int(coordinator.rsplit(':', 1)[1])))
        except OSError as error:
            raise UserError(
                f'config.distributed.coordinator={coordinator}: process 0 cannot open that port '
                f'({error.strerror}); choose another'
            ) from None


def _wait_until_open(coordinator: str, seconds: float) -> None:
    """A process 0 that never comes would end JAX's client, and this process, with an abort in C++."""
    host, _, port = coordinator.rpartition(':')
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip('[]'), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise UserError(
                    f'config.distributed.coordinator={coordinator}: process 0 did not answer for {seconds:.0f} s '
                    f'({error.strerror or error}); start it, and let its host be reached from here'
                ) from None
            time.sleep(0.5)


def leave(code: int) -> None:
    """Ends this process at once if there are others: a plain exit would wait for them, and they for it.

    JAX stops those within the heartbeat.
    """
    if jax.process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def sums(counts: Sequence[Mapping[str, float]]) -> collections.Counter:
    """Counts of several processes together."""
    names = dict.fromkeys(name for each in counts for name in each)
    return collections.Counter({name: sum(each.get(name, 0) for each in counts) for name in names})


class Hosts:
    """What one process may know and do about the others; with a single process everything stays in it.

    Attributes:
      index, count: this process among all.
    """

    def __init__(self) -> None:
        self.index, self.count = jax.process_index(), jax.process_count()
        self._board: dict[Identity, asyncio.Future] = {}

    @property
    def first(self) -> bool:
        """Whether this process writes the files of the run."""
        return self.index == 0

    def owns(self, identity: Identity) -> bool:
        """Whether the episode of that name is played here."""
        return identity[-1] % self.count == self.index

    def gather(self, value: Any) -> list[Any]:
        """What every process gave, in their order; all must call it at the same point. Values are JSON."""
        if self.count == 1:
            return [value]
        text = np.frombuffer(_text(value).encode(), np.uint8)
        sizes = multihost_utils.process_allgather(np.array([text.size]))[:, 0]
        # To a power of two: a handful of shapes, each of which is compiled once.
        padded = np.zeros(1 << int(sizes.max() - 1).bit_length(), np.uint8)
        padded[: text.size] = text
        told = multihost_utils.process_allgather(padded)
        return [json.loads(row[:size].tobytes()) for row, size in zip(np.asarray(told), sizes)]

    def together(self, call: Callable[[], Any]) -> list[Any]:
        """What `call` gives in every process. If it raises in one, all raise: nobody is left waiting."""
        if self.count == 1:
            return [call()]
        own: Exception | None = None
        try:
            said = [call(), None, False]
        except Exception as error:  # whatever it is, the others must hear of it
            own, said = error, [None, str(error) or repr(error), isinstance(error, UserError)]
        told = self.gather(said)
        for i, (_, wrong, users) in enumerate(told):
            if wrong is not None and i == self.index and own is not None:
                raise own
            if wrong is not None:
                raise (UserError if users else RuntimeError)(f'process {i}: {wrong}') from own
        return [value for value, *_ in told]

    # ---- between episodes of one step ----------------------------------------------------------------------

    def clear(self) -> None:
        """Forgets what was posted; to be called when no episode is under way anywhere."""
        if self.count > 1:
            for identity, future in self._board.items():
                if self.owns(identity) and future.done():
                    _client().key_value_delete(_key(identity))
        self._board.clear()

    def post(self, identity: Identity, value: Any) -> None:
        """Shows a JSON value to whoever reads it under this name; only the first one posted counts."""
        slot = self._slot(identity)
        if slot.done():
            return
        slot.set_result(value)
        if self.count > 1:
            _client().key_value_set(_key(identity), _text(value))

    async def read(self, identity: Identity) -> Any:
        """What was posted under a name, waiting until it is there."""
        if self.owns(identity):
            return await self._slot(identity)
        loop = asyncio.get_running_loop()
        return json.loads(await loop.run_in_executor(None, _wait_for, _key(identity)))

    def _slot(self, identity: Identity) -> asyncio.Future:
        if identity not in self._board:
            self._board[identity] = asyncio.get_running_loop().create_future()
        return self._board[identity]


def _text(value: Any) -> str:
    return json.dumps(value, default=lambda x: x.item())  # NumPy's scalars


def _key(identity: Identity) -> str:
    return 'zeroplay_jax/' + '/'.join(map(str, identity))


def _client() -> Any:
    """JAX's own store of small values beside its heartbeats: the one channel that needs no collective."""
    from jax._src import distributed

    return distributed.global_state.client


def _wait_for(key: str) -> str:
    # A process that died stops this one by its heartbeat; a live one always posts in the end.
    return _client().blocking_key_value_get(key, 24 * 3600 * 1000)
