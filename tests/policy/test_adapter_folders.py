"""Adapters as PEFT folders: `peft` computes the same logits, and what it writes is read."""

import numpy as np
import pytest
import tiny
from small_policies import adapter_of, equal, logits, torch_logits

from zeroplay_jax.configs import common
from zeroplay_jax.policy import hf
from zeroplay_jax.run import policies
from zeroplay_jax.settings.schema import ALL_LINEARS, LINEARS

# The others have no other linear layers.
FAMILIES = ('qwen2', 'qwen3_moe', 'gemma3', 'qwen35', 'qwen35_moe')
WITH_IMAGES = ('gemma3 with images', 'qwen3 with images')


@pytest.mark.parametrize('family', FAMILIES + WITH_IMAGES)
def test_peft_computes_the_same_logits(family, tmp_path):
    import peft

    base, out = tmp_path / 'base', tmp_path / 'adapter'
    if family in WITH_IMAGES:
        _, theirs = tiny.make_wrapped_model(family.split()[0])
    else:
        theirs = tiny.make_torch_model(family)
    theirs.save_pretrained(str(base))
    model = hf.read_config(base)
    params = hf.load(base, model)
    linears = LINEARS[:4] if model.experts else LINEARS
    if model.delta:
        linears = (*linears, *ALL_LINEARS[len(LINEARS) :])
    trained = adapter_of(params, linears)
    config = common.get_config()
    config.policy.adapters.update(rank=3, alpha=6.0, linears=linears)
    policies.write_adapter(config, base, model, trained, out)
    theirs = type(theirs).from_pretrained(str(base), attn_implementation='eager')
    theirs = peft.PeftModel.from_pretrained(theirs, str(out))
    ids = np.arange(12)[None]
    want = torch_logits(theirs, ids)
    assert hf.read_config(out) == model
    ours = logits(model, hf.load(out), ids)
    np.testing.assert_allclose(ours, want, atol=1e-3 if model.delta else 2e-4)
    assert np.abs(ours - logits(model, params, ids)).max() > 0.1
    adapted = [name for name, _ in theirs.named_modules() if name.endswith('lora_A')]
    assert len(adapted) == sum(map(len, trained.values()))
    # What peft writes is read back, too.
    theirs.save_pretrained(str(tmp_path / 'again'))
    equal(hf.load_adapter(tmp_path / 'again', model), trained)
