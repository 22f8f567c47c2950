"""Every family against PyTorch: packed rows, the sampler's decoding; and every feature matters."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_policies
import tiny
from small_policies import fill_and_decode, logits, sampler_of, torch_logits

from zeroplay_jax.policy import experts, hf, transformer
from zeroplay_jax.rollout.sampler import SlotPut

TOLERANCE = 2e-4
# A gated delta net normalises what it reads, however small.
DELTA_TOLERANCE = 1e-3
LENGTHS = (70, 40, 9)


@pytest.fixture(scope='module', params=tiny.FAMILIES)
def case(request, tmp_path_factory):
    """(name, PyTorch model, ModelConfig, parameters) of a family, through a folder that transformers wrote."""
    model = tiny.make_torch_model(request.param)
    folder = tmp_path_factory.mktemp('family') / request.param
    model.save_pretrained(str(folder))
    config = hf.read_config(folder)
    return request.param, model, config, hf.load(folder, config)


def sequences(config, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, config.vocab_size, n).astype(np.int32) for n in LENGTHS]


score = jax.jit(transformer.score, static_argnums=0)


@pytest.fixture(scope='module')
def packed(case):
    """(tokens, positions, segments of one row with several sequences and empty places; their logits in PyTorch)."""
    _, model, config, _ = case
    rows = sequences(config)
    empty = np.zeros(7, np.int32)
    tokens = np.concatenate([*rows, empty])[None]
    positions = np.concatenate([*map(np.arange, LENGTHS), empty])[None]
    segment = np.repeat([1, 2, 3, 0], [*LENGTHS, 7])[None]
    theirs = np.concatenate([torch_logits(model, [row])[0] for row in rows])
    assert 1 < np.abs(theirs).max() < 30 and theirs.std() > 1
    return (tokens, positions, segment), theirs


def gap(config, params, packed):
    """The largest difference to the logits in PyTorch."""
    inputs, theirs = packed
    ours = logits(config, params, *inputs)[0]
    return np.abs(ours[: len(theirs)] - theirs).max()


def test_packed_logits_are_those_of_transformers(case, packed):
    _, _, config, params = case
    assert gap(config, params, packed) <= (DELTA_TOLERANCE if config.delta else TOLERANCE)


@pytest.mark.parametrize('case', ['qwen3_moe', 'qwen35', 'qwen35_moe'], indirect=True)
def test_gradients_of_packed_rows_are_those_of_transformers(case, tmp_path, monkeypatch):
    import torch

    # Experts have several blocks of choices, whole and cut ones; segments are longer than a chunk of the delta net.
    monkeypatch.setattr(experts, '_BLOCK', 8)
    _, model, config, params = case
    tokens, *places = small_policies.packed(config, 2, 140, segments=2)
    weight = np.random.default_rng(1).normal(size=(2, 140, config.hidden_size)).astype('f')
    looped = dataclasses.replace(config, scan=True, remat=True)

    def objective(params):
        return jnp.sum(transformer.hidden(looped, params, tokens, *places) * weight)

    ours = jax.jit(jax.grad(objective))(params)
    model = copy.deepcopy(model)
    states = model.model(torch.tensor(tokens.reshape(4, 70), dtype=torch.long)).last_hidden_state
    torch.sum(states * torch.tensor(weight).reshape(states.shape)).backward()
    # A folder with gradients in place of weights.
    for parameter in model.model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(tmp_path)
    theirs = hf.load(tmp_path, config)
    del ours['head'], theirs['head']
    assert all(np.linalg.norm(x) > 0 for x in jax.tree.leaves(theirs))
    assert tiny.gap(ours, theirs) <= (2e-3 if config.delta else 1e-4)


FEATURES = {
    'qwen2': 'qkv_bias',
    'qwen2_tied_sliding': 'qkv_bias windows',
    'qwen3': 'qk_norm',
    'qwen3_moe': 'qk_norm normalized',
    'qwen3_yarn': 'qk_norm rope_scaling attention_factor',
    'llama3': 'rope_scaling',
    'olmo3': 'qk_norm windows rope_scaling attention_factor scale_sliding',
    'gemma3': """qk_norm windows rope_scaling scale_sliding norm_offset activation scale_embedding query_scale
        sliding_theta""",
    'mistral': 'windows',
    'qwen35': 'rotary_dim',
    'qwen35_moe': 'rotary_dim normalized shared',
}
PLAIN = {field.name: field.default for field in dataclasses.fields(transformer.ModelConfig)}
PLAIN['qk_norm'] = 'none'
OF_PARTS = {'attention_factor': ('rope_scaling', 1.0), 'normalized': ('experts', False)}
OF_PARTS['shared'] = ('experts', False)


def without(feature, config):
    """The config of a model without one of its features."""
    if feature in PLAIN:
        return dataclasses.replace(config, **{feature: PLAIN[feature]})
    name, value = OF_PARTS[feature]
    part = dataclasses.replace(getattr(config, name), **{feature: value})
    return dataclasses.replace(config, **{name: part})


def test_a_feature_left_out_shows(case, packed):
    name, _, config, params = case
    for feature in FEATURES[name].split():
        difference = gap(without(feature, config), params, packed)
        assert difference >= 100 * TOLERANCE, f'{feature}: {difference}'


# The others have features that these have, apart or together.
DECODED = ('qwen2', 'qwen3_moe', 'gemma3', 'qwen35', 'qwen35_moe')


@pytest.mark.parametrize(
    'case',
    [
        pytest.param(family, marks=() if family in DECODED else pytest.mark.long)
        for family in tiny.FAMILIES
    ],
    indirect=True,
)
def test_the_sampler_decodes_what_generate_does_with_the_scores_of_a_full_forward(case):
    """Slot 0 is greedy for 64 tokens; slot 1 samples, reads an observation, and samples on. Chunks cross the window."""
    import torch

    _, model, config, params = case
    shape = dict(slots=2, context=100, chunk=12, fill_rows=2, burst=8, put_rows=2, put_tokens=32)
    sampler = sampler_of(config, **shape)
    rng = np.random.default_rng(4)
    draw = lambda count: rng.integers(0, config.vocab_size, count).astype(np.int32)
    prompt, other, observation = draw(20), draw(25), draw(27)
    key = np.array([1, 2], np.uint32)
    sampler.put([SlotPut(0, prompt, 0, 84, 0.0, key), SlotPut(1, other, 0, 45, 1.0, key)])
    (greedy, first), (greedy_logp, first_logp) = fill_and_decode(
        sampler, params, np.array([84, 45])
    )
    # A state is that with which the turn began.
    start = 25 if config.delta else 45
    known = np.array([*other, *first, *observation], np.int32)
    sampler.put([SlotPut(1, known[start:], start, 92, 1.0, key)])
    (_, second), (_, second_logp) = fill_and_decode(sampler, params, np.array([84, 92]))

    with torch.no_grad():
        inputs = torch.tensor(prompt[None], dtype=torch.long)
        theirs = model.generate(inputs, max_new_tokens=64, do_sample=False)[0, 20:].tolist()
    assert greedy == theirs and len(theirs) == 64

    def check_scores(row, start, logp):
        # One length for all; what follows has no effect.
        tokens = np.resize(np.array(row, np.int32), 92)[None]
        positions = np.arange(92)[None]
        full, _ = score(config, params, tokens, positions, np.ones_like(positions))
        assert np.abs(np.asarray(full)[0, start : start + len(logp)] - logp).max() <= 1e-4

    check_scores([*prompt, *greedy], 20, greedy_logp)
    sampled = [*other, *first, *observation, *second]
    check_scores(sampled, 25, first_logp)
    check_scores(sampled, 72, second_logp)
    assert len(second_logp) == 20
