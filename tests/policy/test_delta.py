"""Gated delta nets: the chunked form against the recurrence, gradients against PyTorch, and folders."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from zeroplay_jax.policy import delta, hf, transformer


def recurrence(q, k, v, log_decay, rate, segment):
    """What the tokens of a row read, one after another in float64: every segment begins with a memory of zeros."""
    read = np.zeros(v.shape)
    for t in range(len(segment)):
        if t == 0 or segment[t] != segment[t - 1]:
            memory = np.zeros((*k.shape[1:], v.shape[-1]))
        memory = memory * np.exp(log_decay[t])[:, None, None]
        error = v[t] - np.einsum('hk,hkv->hv', k[t], memory)
        memory = memory + np.einsum('hk,hv->hkv', k[t], rate[t][:, None] * error)
        read[t] = np.einsum('hk,hkv->hv', q[t], memory)
    return read, memory


@pytest.mark.parametrize('scale', [0.01, 1.0, 30.0])
def test_chunks_with_segments_are_the_recurrence(scale):
    """Decays from almost none to almost all; segments end within chunks, at their ends, and after several."""
    rng = np.random.default_rng(0)
    rows, length, heads = 2, 150, 3
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, k = (unit(rng.normal(size=(rows, length, heads, 8))) for _ in range(2))
    # The same key again and again: what is written depends most on what was written before.
    k[:, 20:60] = k[:, 20:21]
    v = rng.normal(size=(rows, length, heads, 5))
    log_decay = -scale * rng.uniform(size=(rows, length, heads))
    rate = rng.uniform(size=(rows, length, heads))
    segment = np.stack([np.repeat([1, 2, 3, 0], [64, 6, 70, 10]), np.repeat([1, 2], [130, 20])])
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v, log_decay, rate)]
    memory = jnp.zeros((rows, heads, 8, 5))
    ours, last = jax.jit(delta.chunked)(*arrays, jnp.asarray(segment), memory)
    for row in range(rows):
        theirs, theirs_last = recurrence(
            *(x[row] for x in (q, k, v, log_decay, rate)), segment[row]
        )
        assert np.abs(theirs).max() > 0.3
        # Logarithms of decays add up to larger numbers.
        tolerance = 3e-6 * max(1, scale / 5)
        np.testing.assert_allclose(ours[row], theirs, atol=tolerance)
        np.testing.assert_allclose(last[row], theirs_last, atol=tolerance)


@pytest.fixture(scope='module')
def case(tmp_path_factory):
    """(PyTorch model, its folder, ModelConfig, parameters)."""
    theirs = tiny.make_torch_model('qwen35')
    folder = tmp_path_factory.mktemp('delta') / 'policy'
    theirs.save_pretrained(str(folder))
    model = hf.read_config(folder)
    return theirs, folder, model, hf.load(folder, model)


def test_gradients_of_packed_rows_are_those_of_pytorch(case):
    import torch

    theirs, _, model, params = case
    model = dataclasses.replace(model, remat=True, scan=True)
    rng = np.random.default_rng(1)
    lengths = (70, 13)
    tokens = rng.integers(0, 80, sum(lengths)).astype(np.int32)
    weight = rng.normal(size=(len(tokens), 80)).astype('f') / len(tokens)
    positions = np.concatenate([*map(np.arange, lengths)])[None]
    segment = np.repeat([1, 2], lengths)[None]

    def objective(params):
        states = transformer.hidden(model, params, tokens[None], positions, segment)
        return jnp.sum(transformer.logits(model, params, states[0]) * weight)

    ours = jax.jit(jax.grad(objective))(params)
    theirs.zero_grad()
    for ids, part in zip(np.split(tokens, lengths[:1]), np.split(weight, lengths[:1])):
        out = theirs(torch.tensor(ids[None], dtype=torch.long)).logits[0]
        (out * torch.tensor(part)).sum().backward()
    gradients = {name: x.grad.numpy() for name, x in theirs.named_parameters()}
    for name, mine in tiny.to_tensors(model, ours).items():
        assert tiny.gap(mine, gradients[name]) < 2e-3, name
