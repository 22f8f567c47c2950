"""Runs with adapters: every recipe trains; their folders are those of the checkpoint, and are continued."""

import pathlib

import ahead_runs
import jax
import numpy as np
import run_library
from safetensors.numpy import load_file

from zeroplay_jax.configuration.rules import check
from zeroplay_jax.export import export
from zeroplay_jax.policy import hf
from zeroplay_jax.run import branch


def test_folders_of_a_run_are_exported_again_and_continued(tmp_path, tmp_path_factory):
    """π-Play has a teacher."""
    config = run_library.config_of('piplay', tmp_path)
    whole = run_library.whole('piplay', tmp_path_factory)
    folders = sorted(path.name for path in (whole / 'policy').iterdir())
    exported = export(whole, tmp_path / 'exported')
    for name in [folder.name for folder in exported if folder.name in folders]:
        if name.endswith('-merged'):
            continue
        file = pathlib.Path(name, 'adapter_model.safetensors')
        ours = load_file(whole / 'policy' / file)
        from_checkpoint = load_file(tmp_path / 'exported' / file)
        jax.tree.map(np.testing.assert_array_equal, ours, from_checkpoint)
        # The merged folder holds the base that was trained over, with the adapter.
        read = hf.load(whole / 'policy' / name)
        merged = hf.load(whole / 'policy' / f'{name}-merged')
        again = hf.load(tmp_path / 'exported' / f'{name}-merged')
        for ours in (read, again):
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), ours, merged)
    # A role is continued from its folder, all roles from a checkpoint with their moments and teachers.
    config.solver.adapter = str(whole / 'policy' / 'solver')
    check(config)
    engine = ahead_runs.make_engine(config)
    learner = engine.learners['solver']
    want = 'base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight'
    stored = load_file(whole / 'policy' / 'solver' / 'adapter_model.safetensors')[want]
    np.testing.assert_array_equal(np.asarray(learner.params['layer_0']['q']['lora_b']).T, stored)
    assert not np.asarray(engine.learners['proposer'].params['layer_0']['q']['lora_b']).any()
    branch.load(branch.newest_checkpoint(whole), engine)
    np.testing.assert_array_equal(np.asarray(learner.params['layer_0']['q']['lora_b']).T, stored)
    assert any(np.asarray(x).any() for x in jax.tree.leaves(learner.state['opt']))
