"""Runs with adapters: every recipe trains; their folders are those of the checkpoint, and are continued."""

import pathlib

import ahead_runs
import jax
import numpy as np
import pytest
import run_library
from safetensors.numpy import load_file

from zeroplay_jax.configuration.rules import check
from zeroplay_jax.export import export
from zeroplay_jax.policy import adapter_config, adapters, hf
from zeroplay_jax.run import branch, loop


@pytest.mark.parametrize('base', ['none', pytest.param('int8', marks=pytest.mark.long)])
def test_folders_of_a_run_are_exported_again_and_continued(tmp_path, tmp_path_factory, base):
    """π-Play has a teacher."""
    config = run_library.config_of('piplay', tmp_path)
    config.policy.adapters.quantize = base
    if base == 'none':
        whole = run_library.whole('piplay', tmp_path_factory)
    else:
        whole = tmp_path / 'whole'
        loop.run(config, whole)
    folders = sorted(path.name for path in (whole / 'policy').iterdir())
    parents = (whole / 'policy', tmp_path / 'exported')
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
        if base == 'int8':
            folder = whole / 'policy' / name
            base_weights = hf.load(adapter_config.base_folder(folder), quantized=True)
            params = adapters.dequantized(base_weights)
            read = hf.add_adapter(params, folder, hf.read_config(folder))
        merged = hf.load(whole / 'policy' / f'{name}-merged')
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), read, merged)
        again = hf.load(tmp_path / 'exported' / f'{name}-merged')
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), again, merged)
        for file in ('README.md', 'generation_config.json'):
            texts = [(path / f'{name}-merged' / file).read_text() for path in parents]
            assert texts[0] == texts[1]
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
