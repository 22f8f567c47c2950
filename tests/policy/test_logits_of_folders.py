"""A table of folders as `transformers` writes and reads them: equal logits, and an export that is what was loaded."""

import json

import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file
from small_policies import logits, torch_logits

from zeroplay_jax.policy import hf

TOLERANCE = 1e-4
# Longer than every window and original length below.
TOKENS = np.random.default_rng(0).integers(0, 80, 48).astype(np.int32)
HEAD, EMBEDDING = 'lm_head.weight', 'model.embed_tokens.weight'


# A case changes the content of config.json and the tensors, {name: array}, of a folder that `transformers` wrote.


def fields(**values):
    """Changes fields of config.json; those that are None are removed."""

    def change(config, tensors):
        config |= values
        for name, value in values.items():
            if value is None:
                del config[name]

    return change


def older(**scaling):
    """Writes the rotary embedding as version 4 does."""

    def change(config, tensors):
        parameters = config.pop('rope_parameters')
        full = parameters.get('full_attention', parameters)
        config |= dict(rope_theta=full['rope_theta'], rope_scaling=scaling)
        if config['model_type'] == 'gemma3_text':
            config['rope_local_base_freq'] = parameters['sliding_attention']['rope_theta']

    return change


def another_head(config, tensors):
    """What merging an adapter of the head leaves: a head beside an embedding that the flag calls the same."""
    noise = np.random.default_rng(1).normal(size=(80, 48)).astype('f')
    tensors[HEAD] = tensors[EMBEDDING] + 0.3 * noise


def one_other_number(config, tensors):
    tensors[HEAD] = tensors[EMBEDDING].copy()
    tensors[HEAD][-1, -1] += 1.0


def same_head(config, tensors):
    tensors[HEAD] = tensors[EMBEDDING].copy()


def further_head(config, tensors):
    """A head that predicts the token after the next one, as published folders have it."""
    tensors['mtp.fc.weight'] = np.ones((2, 2), 'f')


TIED = dict(tie_word_embeddings=True)
WINDOWS = dict(use_sliding_window=True, sliding_window=8)
ORIGINAL = dict(original_max_position_embeddings=24)


YARN = dict(rope_type='yarn', factor=4.0, original_max_position_embeddings=24)
LLAMA3 = dict(
    rope_type='llama3',
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)


def rope(**parameters):
    return dict(rope_parameters=dict(rope_theta=10000.0) | parameters)


unchanged = fields()


def case(name, family, change=unchanged, **values):
    """A row of the table: family, fields of the config class, change of the folder."""
    return pytest.param(family, values, change, id=name.replace(' ', '-'))


EXTENDED = dict(rope_type='yarn', factor=4.0, rope_theta=1e4)
LINEAR = dict(rope_type='linear', factor=3.0)
CASES = [
    *[case(f'{family} as written', family) for family in tiny.FAMILIES],
    # Heads.
    case('tied', 'llama3', **TIED),
    case('untied', 'gemma3', tie_word_embeddings=False),
    case('called tied, another head', 'qwen3', another_head, **TIED),
    case('one other number in the head', 'qwen3', one_other_number, **TIED),
    case('the head again beside a tied embedding', 'llama3', same_head, **TIED),
    case('a head for the token after the next one', 'qwen35', further_head),
    # Sizes.
    case('heads wider than hidden/heads', 'llama3', head_dim=24),
    case('no size of heads', 'llama3', fields(head_dim=None)),
    case('another epsilon', 'qwen2', rms_norm_eps=0.1),
    case('another scale of scores', 'gemma3', query_pre_attn_scalar=7),
    # Positions.
    case('no base of frequencies', 'qwen2', fields(rope_parameters=None)),
    case('base at the top level', 'qwen2', fields(rope_parameters={}, rope_theta=50.0)),
    case('linear in the older form', 'qwen2', older(type='linear', factor=4.0)),
    case('YaRN in the older form', 'qwen3', older(type='yarn', factor=4.0)),
    case('YaRN without rounding', 'qwen3', **rope(**YARN, truncate=False)),
    case('YaRN with its own factor of attention', 'llama3', **rope(**YARN, attention_factor=0.7)),
    case('Llama 3.1 in the older form', 'llama3', older(**LLAMA3)),
    case('original length', 'qwen3', fields(rope_parameters=EXTENDED, **ORIGINAL)),
    case('both forms', 'qwen2', fields(rope_scaling=LINEAR)),
    case('Gemma 3 in the older form', 'gemma3', older(rope_type='linear', factor=8.0)),
    case('OLMo 3 in the older form', 'olmo3', older(rope_type='yarn', factor=4.0)),
    # Windows.
    case('windows that are not enabled', 'qwen2', sliding_window=8),
    case('windows from the first layer on', 'qwen3', **WINDOWS, max_window_layers=0),
    case('layers by a pattern', 'gemma3', fields(layer_types=None, sliding_window_pattern=2)),
    case('no windows', 'mistral', sliding_window=None),
    # Fields that the family's class does not have.
    case('windows of a family without them', 'llama3', fields(use_sliding_window=True)),
]


@pytest.mark.parametrize('family', tiny.WRAPPED)
def test_of_a_model_with_images_the_decoder_is_read_and_written(family, tmp_path):
    text, whole = tiny.make_wrapped_model(family)
    whole.save_pretrained(str(tmp_path / 'in'))
    config = hf.read_config(tmp_path / 'in')
    params = hf.load(tmp_path / 'in', config, progress=False)
    theirs = torch_logits(whole, [TOKENS])
    np.testing.assert_allclose(theirs, torch_logits(text, [TOKENS]), atol=TOLERANCE)
    np.testing.assert_allclose(logits(config, params, [TOKENS]), theirs, atol=TOLERANCE)
    hf.save(tmp_path / 'out', config, params, like=tmp_path / 'in')
    assert hf.read_config(tmp_path / 'out') == config
    np.testing.assert_allclose(torch_logits(tmp_path / 'out', [TOKENS]), theirs, atol=TOLERANCE)
    exported = json.loads((tmp_path / 'out' / 'config.json').read_text())
    assert exported['architectures'] == [type(text).__name__]
    # Of a class without images some libraries refuse positions of images.
    assert ('mrope_section' in exported['rope_parameters']) == ('qwen35' in family)
    # Version 4 of transformers refuses an empty one.
    assert exported.get('rope_scaling') is None


def test_a_decoder_read_as_another_class_has_no_default_base_of_frequencies(tmp_path):
    _, whole = tiny.make_wrapped_model('qwen3')
    whole.save_pretrained(str(tmp_path))
    path = tmp_path / 'config.json'
    values = json.loads(path.read_text())
    values['text_config'].pop('rope_parameters')
    path.write_text(json.dumps(values))
    with pytest.raises(hf.CheckpointError, match='text_config has no rope_theta'):
        hf.read_config(tmp_path)


@pytest.mark.parametrize('family,values,change', CASES)
def test_logits_and_export_are_those_of_transformers(family, values, change, tmp_path):
    import torch

    folder = tmp_path / 'in'
    tiny.make_torch_model(family, **values).save_pretrained(str(folder))
    written = json.loads((folder / 'config.json').read_text())
    tensors = load_file(folder / 'model.safetensors')
    change(written, tensors)
    (folder / 'config.json').write_text(json.dumps(written))
    save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt'})
    theirs = torch_logits(folder, [TOKENS], dtype=torch.float32)
    assert 1 < np.abs(theirs).max() < 100
    config = hf.read_config(folder)
    params = hf.load(folder, config, progress=False)
    difference = np.abs(logits(config, params, [TOKENS]) - theirs).max()
    assert difference <= TOLERANCE

    hf.save(tmp_path / 'out', config, params, like=folder)
    exported_logits = torch_logits(tmp_path / 'out', [TOKENS], dtype=torch.float32)
    assert np.abs(exported_logits - theirs).max() <= TOLERANCE
    exported = json.loads((tmp_path / 'out' / 'config.json').read_text())
    flag = {'tie_word_embeddings': config.tied}
    assert exported | flag == written | flag
    is_tied = exported.get('tie_word_embeddings', family == 'gemma3')
    assert is_tied == config.tied
    stored = load_file(tmp_path / 'out' / 'model.safetensors')
    assert (HEAD in stored) != config.tied
    for name, array in stored.items():
        np.testing.assert_array_equal(array, tensors[name])
