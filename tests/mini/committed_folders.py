"""What every folder of a trained policy has to hold."""

import hashlib
import json

import jax
import numpy as np
import pytest

from zeroplay_jax.policy import hf, transformer


def check_hashes(folder):
    """Asserts that SHA256SUMS lists every other file of the folder with its digest."""
    digests = {}
    for line in (folder / 'SHA256SUMS').read_text().splitlines():
        digest, file = line.split('  ')
        digests[file] = digest
    assert set(digests) == {path.name for path in folder.iterdir()} - {'SHA256SUMS'}
    for file, digest in digests.items():
        assert hashlib.sha256((folder / file).read_bytes()).hexdigest() == digest


def log_of(folder):
    return [json.loads(line) for line in (folder / 'training.jsonl').read_text().splitlines()]


def figures_of(folder):
    """Role → shares of what the policy writes right, at the end of its training."""
    return log_of(folder)[-1]['teacher_forced']


def check_stages(folder, stages):
    """Asserts that a folder was trained by these stages, each to its end."""
    trained_steps = {entry['stage']: entry['step'] for entry in log_of(folder) if 'step' in entry}
    assert trained_steps == {stage.name: stage.steps for stage in stages}


def check_logits(folder, tokens):
    """Asserts that transformers computes the same logits."""
    torch = pytest.importorskip('torch')
    from transformers import AutoModelForCausalLM

    params = jax.tree.map(lambda leaf: leaf.astype(np.float32), hf.load(folder))
    config, row = hf.read_config(folder), tokens[None]
    positions = np.arange(len(tokens))[None]
    x = transformer.hidden(config, params, row, positions, np.ones_like(row))
    logits = np.asarray(transformer.logits(config, params, x[0]))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.from_numpy(row.astype(np.int64))).logits[0].numpy()
    assert logits.std() > 1
    np.testing.assert_allclose(logits, expected, atol=2e-4)
