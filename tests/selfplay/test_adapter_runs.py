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
from zeroplay_jax.selfplay import recipe as recipes
from zeroplay_jax.selfplay.recipe import trained_roles, weights_of_roles


def trained_weights(engine, records):
    """Names of the weights of all roles that had a gradient in some step."""
    weights = weights_of_roles(engine.config)
    names = set()
    for (step, _), record in zip(ahead_runs.pairs(engine), records, strict=True):
        metrics = record['metrics']
        for role in step.phase.trains:
            if metrics.get(f'{role}/gradient_norm', 0):
                names.add(weights[role])
    return names


@pytest.mark.long
@pytest.mark.parametrize('recipe', recipes.BUILT_IN)
def test_every_recipe_trains_adapters_over_one_base(tmp_path, recipe):
    config = run_library.config_of(recipe, tmp_path)
    config.policy.adapters.rank = 4
    for role in trained_roles(config):
        config[role].update(steps=1, learning_rate=1e-3)
    engine = ahead_runs.make_engine(config)
    before = {name: arrays(learner.params) for name, learner in engine.learners.items()}
    # One pool serves all roles, those that are not trained included.
    assert len(set(engine.scheduler.pools.values())) == 1
    records = ahead_runs.play(engine)
    trained = [r['metrics'].get('solver/gradient_norm', 0) for r in records]
    assert sum(len(r['rollouts']) for r in records) and max(trained) > 0
    # A role without reward variance has no gradient in so short a run; every other adapter is changed.
    expected = trained_weights(engine, records)
    for name, learner in engine.learners.items():
        different = jax.tree.map(np.not_equal, before[name], arrays(learner.params))
        is_changed = any(map(np.any, jax.tree.leaves(different)))
        assert is_changed == (name in expected), (name, expected)


def arrays(tree):
    return jax.tree.map(np.array, tree)


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
    exported = export(whole, tmp_path / 'exported')
    for name in [folder.name for folder in exported if folder.name in folders]:
        if name.endswith('-merged'):
            continue
        file = pathlib.Path(name, 'adapter_model.safetensors')
        ours = load_file(whole / 'policy' / file)
        from_checkpoint = load_file(tmp_path / 'exported' / file)
        jax.tree.map(np.testing.assert_array_equal, ours, from_checkpoint)
        card = (whole / 'policy' / name / 'README.md').read_text()
        assert 'library_name: peft' in card and 'LoRA of rank 4' in card
        assert ('linear layers in int8' in card) == (base == 'int8')
        card_of_checkpoint = (tmp_path / 'exported' / name / 'README.md').read_text()
        assert card_of_checkpoint == card
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
        texts = {}
        for parent in (whole / 'policy', tmp_path / 'exported'):
            merged_folder = parent / f'{name}-merged'
            texts[parent] = (merged_folder / 'generation_config.json').read_text()
            merged_card = (merged_folder / 'README.md').read_text()
            assert 'library_name: transformers' in merged_card
            assert 'LoRA of rank 4' in merged_card and 'merged into these weights' in merged_card
            assert ('linear layers in int8, merged' in merged_card) == (base == 'int8')
        assert len(set(texts.values())) == 1
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
