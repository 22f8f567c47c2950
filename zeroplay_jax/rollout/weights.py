"""The weights that rollouts are sampled with: which versions there are, which are in use, and the device calls of each.

Weights have a name and versions, which count how often they were published: once per step for each role that trains
them, so roles that share weights publish several versions in a step. A version is kept while it is the newest,
while a step has pinned it, or while rollouts of it are in progress. Keys and values of rollouts are those of one
version, so one that rollouts use cannot be replaced. A snapshot of weights has a name of its own, solver@3 or
solver@best, under which those of another moment are published.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from zeroplay_jax.policy import adapters, sharding
from zeroplay_jax.policy.transformer import Params
from zeroplay_jax.rollout.requests import Rollout

# Between the name of weights and the moment of a snapshot of them.
MOMENT = '@'
# Weights of a device call, the slots that it serves (None: all), and the adapter of every slot (None without adapters).
DeviceCall: TypeAlias = tuple[
    Params, Bool[np.ndarray, ' slots'] | None, Int[np.ndarray, ' slots'] | None
]


class WeightStore:
    """Whole weights; every version has device calls of its own.

    Args:
      capacity: name of weights → number of versions that can be in use at the same time; 1 for other names. Versions
        in use together must differ modulo this number.

    Attributes:
      newest: name → newest version.
      params: (name, version) → what is trained of the weights, in the layout of the sampler.
      views: (name, version) → the same in the layout of the learner, of weights that were published with it.
    """

    def __init__(self, capacity: Mapping[str, int] | None = None):
        self.newest: dict[str, int] = {}
        self.params: dict[tuple[str, int], Params] = {}
        self.views: dict[tuple[str, int], Params] = {}
        self._capacity = dict(capacity or {})
        self._pinned: list[dict[str, int]] = []
        # (name, version) → requests in progress.
        self._requests: collections.Counter[tuple[str, int]] = collections.Counter()

    def publish(
        self, name: str, params: Params, version: int | None = None, view: Params | None = None
    ) -> int:
        """Sets the newest weights of a name, and returns their version.

        Args:
          name: name of the weights.
          params: in the layout of the sampler (`Learner.sampler_weights`); kept by reference.
          version: None: the one after the newest; 0 for the first.
          view: the same in the layout of the learner, for checkpoints.

        Raises:
          RuntimeError: rollouts are in progress whose weights these would replace.
        """
        if version is None:
            version = self.newest.get(name, -1) + 1
        capacity = self._capacity.get(name, 1)
        for (other, other_version), count in self._requests.items():
            if count and other == name and (other_version - version) % capacity == 0:
                raise RuntimeError(f'weights {name!r} published while rollouts of them run')
        self.newest[name] = version
        self._drop_unused(name)
        self._set(name, version, params)
        if view is not None:
            self.views[name, version] = view
        return version

    def pin(self, versions: Mapping[str, int]) -> None:
        """Keeps these versions, by name of the weights, until they are released; called when a step begins."""
        self._pinned.append(dict(versions))

    def release(self, versions: Mapping[str, int]) -> None:
        """Ends a `pin`, and drops the versions that nothing needs any more."""
        self._pinned.remove(dict(versions))
        for name in versions:
            self._drop_unused(name)

    @contextlib.contextmanager
    def in_use(self, name: str, version: int) -> Iterator[None]:
        """Keeps a version while a request for rollouts of it is in progress."""
        self._requests[name, version] += 1
        try:
            yield
        finally:
            self._requests[name, version] -= 1
            if not self._requests[name, version]:
                del self._requests[name, version]
                self._drop_unused(name)

    def _drop_unused(self, name: str) -> None:
        needed = {self.newest[name], *(versions.get(name) for versions in self._pinned)}
        for key in list(self.params):
            if key[0] == name and key[1] not in needed and not self._requests[key]:
                del self.params[key]
                self.views.pop(key, None)

    def _set(self, name: str, version: int, params: Params) -> None:
        self.params[name, version] = params

    def of(self, name: str, version: int) -> tuple[Params, int | None]:
        """Returns the weights of a version for a device call, and the number of its adapter (None without adapters)."""
        return self.params[name, version], None

    def calls(self, rollouts: Sequence[Rollout | None]) -> Iterator[DeviceCall]:
        """Yields the device calls that rollouts within a turn need: one per version, oldest first.

        Args:
          rollouts: the rollout in every slot.
        """
        slots_of: dict[tuple[str, int], list[int]] = {}
        for slot, rollout in enumerate(rollouts):
            if rollout is not None and rollout.is_running:
                key = (rollout.request.weights, rollout.request.version)
                slots_of.setdefault(key, []).append(slot)
        for key, slots in sorted(slots_of.items()):
            included = None
            # A single version gets its slots, too, where there may be others: the clock must not decide which of two
            # programs computes a token.
            if self._capacity.get(key[0], 1) > 1:
                included = np.zeros(len(rollouts), bool)
                included[slots] = True
            yield self.params[key], included, None

    def leave_devices(self, updated: Collection[str]) -> None:
        """Frees device memory during an update; the weights of `updated` are lost, because new ones will come."""
        for key, params in self.params.items():
            # Freed and not copied, because new weights are published after the update.
            self.params[key] = {} if key[0] in updated else sharding.to_host(params)

    def return_to_devices(self) -> None:
        """Inverse of `leave_devices`."""
        self.params = sharding.to_device(self.params)


class AdapterStore(WeightStore):
    """Adapters over one base, side by side (policy/adapters.py): all names and versions share every device call.

    The weights of names without a capacity are the base alone.
    """

    def __init__(self, capacity: Mapping[str, int]):
        super().__init__(capacity)
        self._first_place: dict[str, int] = {}
        self._places = 0
        for name, count in capacity.items():
            self._first_place[name] = self._places
            self._places += count
        self._base: Params = {}
        # The base with the adapters of all places; None if it has to be made again.
        self._joined: Params | None = None

    def _set(self, name: str, version: int, params: Params) -> None:
        self._base, adapter = adapters.split(params)
        if name in self._capacity:
            self.params[name, version] = adapter
        self._joined = None

    def of(self, name: str, version: int) -> tuple[Params, int]:
        """Returns the base with all adapters, and the number of this one."""
        if self._joined is None:
            self._joined = self._join()
        number = self._place(name, version) if name in self._capacity else adapters.NO_ADAPTER
        return self._joined, number

    def calls(self, rollouts: Sequence[Rollout | None]) -> Iterator[DeviceCall]:
        """Yields one device call for all rollouts."""
        joined: Params = {}
        adapter = np.full(len(rollouts), adapters.NO_ADAPTER, np.int32)
        for slot, rollout in enumerate(rollouts):
            if rollout is not None:
                joined, adapter[slot] = self.of(rollout.request.weights, rollout.request.version)
        yield joined, None, adapter

    def leave_devices(self, updated: Collection[str]) -> None:
        """Does nothing: an update reads the base, too."""

    def return_to_devices(self) -> None:
        """Does nothing."""

    def _place(self, name: str, version: int) -> int:
        """Returns the number of an adapter: a function of its version, so that a resumed run has the same order."""
        return self._first_place[name] + version % self._capacity[name]

    def _join(self) -> Params:
        """Returns the base with the adapters of all places side by side."""
        if not self.params:
            return self._base
        example = next(iter(self.params.values()))
        unused = jax.tree.map(jnp.zeros_like, example)
        in_order = [unused] * self._places
        for (name, version), adapter in self.params.items():
            in_order[self._place(name, version)] = adapter
        layout = jax.tree.map(lambda x: x.sharding, example)
        stacked = jax.jit(adapters.stack, out_shardings=layout)(in_order)
        scale = jnp.broadcast_to(self._base[adapters.SCALE], (self._places,))
        return adapters.join(self._base | {adapters.SCALE: scale}, stacked)
