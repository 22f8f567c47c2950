"""The weights of a slot pool, and the device calls with them.

`PoolWeights` holds one set of weights in one or several versions; every version has device calls of its own.
`AdapterPoolWeights` holds adapters over one base, of several roles and versions, which share every device call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from zeroplay_jax.policy import adapters, sharding
from zeroplay_jax.policy.transformer import Params
from zeroplay_jax.rollout.placement import Placement
from zeroplay_jax.rollout.requests import ActiveRollout, RequestGroup
from zeroplay_jax.rollout.sampler import DecodeChunk, Sampler


class PoolWeights:
    """One set of weights.

    Attributes:
      has_versions: whether rollouts of several versions may be in progress (`rollout.ahead`).
      version: the newest version.
      views: version → weights in the layout of the sampler.
    """

    def __init__(self, has_versions: bool = False):
        self.has_versions = has_versions
        self.version = 0
        self.views: dict[int, Params] = {0: {}}

    @property
    def params(self) -> Params:
        """The newest weights."""
        return self.views[self.version]

    def newest(self, name: str) -> int:
        """Returns the newest version of the weights of this name."""
        return self.version

    def publish(
        self,
        name: str,
        params: Params,
        version: int,
        keep: Collection[int],
        groups: Iterable[RequestGroup],
    ) -> None:
        """Sets the newest weights; arguments as of `Scheduler.publish_weights`, and all groups in progress."""
        views = {old: view for old, view in self.views.items() if old in keep and old != version}
        # Their prompts are in the cache, too: keys and values of old weights must not be reused.
        _refuse_lost(name, groups, views)
        self.views = views | {version: params}
        self.version = version

    def trained(self, name: str, version: int) -> Params:
        """Returns what is trained of the weights of a name and version: all of them."""
        return self.views[version]

    def keep_only(self, name: str, version: int) -> None:
        """Drops the other versions of the weights of this name."""
        self.views = {version: self.views[version]}

    def share_calls(self, rollout: ActiveRollout, other: ActiveRollout) -> bool:
        """Returns whether two rollouts can be in one prefill call."""
        return rollout.group.version == other.group.version

    def extend(self, sampler: Sampler, rollouts: Sequence[ActiveRollout]) -> None:
        """Prefills a chunk of rollouts that share calls; at least one."""
        view = self.views[rollouts[0].group.version]
        sampler.extend(view, [rollout.slot for rollout in rollouts])

    def decode(self, sampler: Sampler, placement: Placement) -> list[DecodeChunk]:
        """Starts a decode chunk of all rollouts within a turn; returns device arrays without waiting for them."""
        if not self.has_versions:
            return [sampler.decode(self.views[self.version])]
        chunks = []
        # A single version gets its rows, too: the clock must not decide which of two programs computes a token.
        for version, rows in placement.rows_of_versions().items():
            chunks.append(sampler.decode(self.views[version], rows))
        return chunks

    def leave_devices(self, is_updated: bool) -> None:
        """Frees device memory during an update; weights that are updated are lost, because new ones will come."""
        if is_updated:
            # Freed and not copied, because new weights are published after the update.
            self.views = {self.version: {}}
        else:
            self.views = sharding.to_host(self.views)

    def return_to_devices(self) -> None:
        """Inverse of `leave_devices`."""
        self.views = sharding.to_device(self.views)


class AdapterPoolWeights(PoolWeights):
    """Adapters of several names over one base, side by side (policy/adapters.py).

    Args:
      versions: name of weights → number of versions that can be in use at the same time. Versions that are in use
        together must differ modulo this number. The weights of other names are the base alone.
    """

    def __init__(self, versions: Mapping[str, int]):
        super().__init__(has_versions=True)
        self._versions = dict(versions)
        self._first_place: dict[str, int] = {}
        self._places = 0
        for name, count in versions.items():
            self._first_place[name] = self._places
            self._places += count
        self._newest: dict[str, int] = {}
        self._base: Params = {}
        self._adapters: dict[int, Params] = {}
        # The base with all adapters; None if it has to be made again.
        self._joined: Params | None = None

    @property
    def params(self) -> Params:
        """The base with the adapters of all places, as the device programs read it."""
        if self._joined is None:
            self._joined = self._join()
        return self._joined

    def newest(self, name: str) -> int:
        """Returns the newest version of the weights of this name."""
        return self._newest.get(name, 0)

    def publish(
        self,
        name: str,
        params: Params,
        version: int,
        keep: Collection[int],
        groups: Iterable[RequestGroup],
    ) -> None:
        """Sets the newest adapter of a name; arguments as of `PoolWeights.publish`, `params` with the base."""
        kept = set(keep) - {version}
        groups_of_name = [group for group in groups if group.request.weights == name]
        _refuse_lost(name, groups_of_name, kept)
        self._base, adapter = adapters.split(params)
        if name in self._versions:
            self._adapters[self._place(name, version)] = adapter
        self._newest[name] = version
        self._joined = None

    def trained(self, name: str, version: int) -> Params:
        """Returns the adapter of a name and version."""
        return self._adapters[self._place(name, version)]

    def keep_only(self, name: str, version: int) -> None:
        """Does nothing: an old adapter takes little memory, and a newer one will take its place."""

    def share_calls(self, rollout: ActiveRollout, other: ActiveRollout) -> bool:
        """Returns True: rows of one call use different adapters."""
        return True

    def extend(self, sampler: Sampler, rollouts: Sequence[ActiveRollout]) -> None:
        """Prefills a chunk of rollouts."""
        slots = [rollout.slot for rollout in rollouts]
        sampler.extend(self.params, slots, self._adapter_of_slot(sampler, rollouts))

    def decode(self, sampler: Sampler, placement: Placement) -> list[DecodeChunk]:
        """Starts a decode chunk of all rollouts within a turn; returns device arrays without waiting for them."""
        adapter = self._adapter_of_slot(sampler, placement.active())
        return [sampler.decode(self.params, adapter=adapter)]

    def leave_devices(self, is_updated: bool) -> None:
        """Does nothing: an update reads the base, too."""

    def return_to_devices(self) -> None:
        """Does nothing."""

    def _place(self, name: str, version: int) -> int:
        """Returns the number of an adapter: a function of its version, so that a resumed run has the same order."""
        return self._first_place[name] + version % self._versions[name]

    def _adapter_of_slot(
        self, sampler: Sampler, rollouts: Iterable[ActiveRollout]
    ) -> Int[np.ndarray, ' slots']:
        adapter = np.full(sampler.config.slots, adapters.NO_ADAPTER, np.int32)
        for rollout in rollouts:
            name = rollout.group.request.weights
            if name in self._versions:
                adapter[rollout.slot] = self._place(name, rollout.group.version)
        return adapter

    def _join(self) -> Params:
        """Returns the base with the adapters of all places side by side."""
        if not self._adapters:
            return self._base
        example = next(iter(self._adapters.values()))
        unused = jax.tree.map(jnp.zeros_like, example)
        in_order = [self._adapters.get(place, unused) for place in range(self._places)]
        layout = jax.tree.map(lambda x: x.sharding, example)
        stacked = jax.jit(adapters.stack, out_shardings=layout)(in_order)
        scale = jnp.broadcast_to(self._base[adapters.SCALE], (self._places,))
        return adapters.join(self._base | {adapters.SCALE: scale}, stacked)


def _refuse_lost(name: str, groups: Iterable[RequestGroup], versions: Collection[int]) -> None:
    """Raises RuntimeError if groups in progress are played by other versions than these."""
    lost = sum(group.version not in versions for group in groups)
    if lost:
        raise RuntimeError(f'weights {name!r} published while {lost} rollouts run')
