"""The compilation cache: programs that an earlier process compiled are read from a folder."""

from __future__ import annotations

import collections
import pathlib

import jax

# Events of JAX → names of the counts.
_EVENTS = {
    '/jax/compilation_cache/cache_hits': 'cached',
    '/jax/compilation_cache/cache_misses': 'compiled',
}


class CompilationCache:
    """Counts the programs that were read from the cache and those that were compiled, in this process.

    Args:
      folder: of the cache; several runs may share it. '' leaves JAX's own settings (JAX_COMPILATION_CACHE_DIR) as they
        are and counts nothing.
      gigabytes: size above which the programs that were not used for longest are removed; 0: no limit.
    """

    def __init__(self, folder: str, gigabytes: float):
        self._counts: collections.Counter[str] = collections.Counter()
        self._is_used = bool(folder)
        if not folder:
            return
        size = int(gigabytes * 1e9) if gigabytes else -1
        jax.config.update('jax_compilation_cache_dir', str(pathlib.Path(folder).resolve()))
        jax.config.update('jax_compilation_cache_max_size', size)
        # JAX's own limits leave out programs that compile in less than a second; a run has dozens of them.
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
        jax.config.update('jax_persistent_cache_min_entry_size_bytes', 0)
        jax.monitoring.register_event_listener(self._count)

    def take_metrics(self) -> dict[str, float]:
        """Returns 'programs/cached' and 'programs/compiled' since the last call; {} without a cache."""
        if not self._is_used:
            return {}
        metrics = {f'programs/{name}': float(self._counts[name]) for name in _EVENTS.values()}
        self._counts.clear()
        return metrics

    def _count(self, event: str, **_: object) -> None:
        if event in _EVENTS:
            self._counts[_EVENTS[event]] += 1
