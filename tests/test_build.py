"""What a run is built of, and what it lets go of."""

import gc
import types
import weakref
from unittest import mock

import jax
import pytest

from zeroplay_jax.configs import drzero
from zeroplay_jax.retrieval.client import Client
from zeroplay_jax.rollout.tool_workers import ToolWorkers
from zeroplay_jax.run import build
from zeroplay_jax.selfplay.library import Library, SearchableCorpus
from zeroplay_jax.types import UserError


def test_an_engine_does_not_keep_the_loaded_weights():
    config = drzero.get_config('mini')
    config.world.update(train=(0, 2), evaluation=(0, 1))
    parts = build.build(config)
    engine = build.build_engine(config, parts)
    leaves = [weakref.ref(x) for x in jax.tree.leaves(parts.params)]
    parts.params.clear()
    gc.collect()
    assert leaves and all(ref() is None for ref in leaves) and engine.learners


def test_an_evaluation_with_a_broken_tool_stops_the_run():
    backend = types.SimpleNamespace(name='unused', retrieve=None)
    corpus = SearchableCorpus(Client(backend), 3, 100)
    workers = ToolWorkers(deterministic=True, timeout=1.0)
    rollouts = mock.Mock(roles={})
    rollouts.scheduler.workers = workers
    library = Library(corpus, corpus, (), ())
    check = build.failure_check(drzero.get_config('mini'), library, rollouts)
    workers.counts.update({'calculator/calls': 20, 'calculator/failed': 11})
    with pytest.raises(UserError, match="11 of 20 calls of the tool 'calculator'"):
        check()
    # Failures below the limit must not be counted for the training step after the evaluation.
    workers.counts.update({'calculator/calls': 20, 'calculator/failed': 10})
    check()
    assert not workers.counts
