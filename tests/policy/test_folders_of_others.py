"""Folders as others publish them: read as `transformers` and PEFT read them, refused in one line, or said."""

import dataclasses
import json
import struct

import numpy as np
import peft
import pytest
import tiny
import transformers
from safetensors.numpy import load_file, save_file
from small_policies import copy_of
from transformers.models.gemma3.configuration_gemma3 import Gemma3Config

from zeroplay_jax.policy import (
    adapter_config,
    adapters,
    config_fields,
    families,
    hf,
)
from zeroplay_jax.policy.adapter_config import CONFIG_FILE, WEIGHTS_FILE, AdapterConfig
from zeroplay_jax.policy.config_fields import FAMILIES
from zeroplay_jax.retrieval import downloads
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.rollout.tokens import open_codec
from zeroplay_jax.training import policy_settings
from zeroplay_jax.types import UserError

CLASSES = {
    'qwen2': transformers.Qwen2Config,
    'qwen3': transformers.Qwen3Config,
    'llama': transformers.LlamaConfig,
    'olmo3': transformers.Olmo3Config,
    'gemma3': transformers.Gemma3TextConfig,
}
KERNEL = 'model.layers.1.mlp.up_proj.weight'
INDEX = 'model.safetensors.index.json'


def refusal(call, *arguments):
    """Returns the line with which a call is refused."""
    with pytest.raises(UserError) as caught:
        call(*arguments)
    line = str(caught.value)
    assert '\n' not in line
    return line


def row(key, sent, *values):
    return pytest.param(*values, id=sent.replace(' ', '-'), marks=pytest.mark.fault(key, sent))


@pytest.fixture
def folder(published, tmp_path):
    """A copy of it."""
    return copy_of(published, tmp_path / 'policy')


def change_json(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_config(folder, **values):
    change_json(folder / 'config.json', **values)


def change_tensors(folder, change):
    path = folder / 'model.safetensors'
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={'format': 'pt'})


# config.json


@pytest.mark.parametrize('name', FAMILIES)
def test_every_field_of_a_config_class_is_read_without_effect_or_limited(name):
    """Fails where a version of transformers adds a field: say in config_fields.py what it means."""
    family = FAMILIES[name]
    config_class = CLASSES[name]
    assert config_class.model_type == family.model_type
    assert config_class().max_position_embeddings == family.max_positions
    fields = {field.name for field in dataclasses.fields(config_class)}
    for field in fields:
        assert config_fields.is_read(field, family.fields) or config_fields.is_known(field), field
    # The class accepts what is read beside its fields: older spellings.
    assert family.fields - fields <= {
        'original_max_position_embeddings',
        'rope_local_base_freq',
        'sliding_window_pattern',
    }


def test_every_field_of_a_model_with_an_encoder_of_images_is_known():
    assert Gemma3Config.model_type == FAMILIES['gemma3'].wrapper_type
    for field in dataclasses.fields(Gemma3Config):
        assert field.name in config_fields.WRAPPER_FIELDS or config_fields.is_known(field.name)


@pytest.mark.parametrize(
    'values,text',
    [
        row(
            'new-config', 'layers 10^7', dict(num_hidden_layers=10**7), 'num_hidden_layers=10000000'
        ),
        row('new-config', 'vocabulary 4·10^8', dict(vocab_size=4 * 10**8), 'vocab_size=400000000'),
        row(
            'new-config', 'heads 10^9', dict(num_attention_heads=10**9), 'larger than in any model'
        ),
        row('kin-config', 'type of another class', dict(model_type='llama'), "model_type='llama'"),
        row('kin-config', 'cap of logits', dict(final_logit_softcapping=30.0), 'softcapping=30.0'),
        row(
            'kin-config', 'quantised', dict(quantization_config={'bits': 4}), 'quantization_config'
        ),
        row('kin-config', 'scaled residuals', dict(residual_multiplier=0.2), 'residual_multiplier'),
        row(
            'kin-config', 'layers without positions', dict(no_rope_layers=[1, 0]), 'no_rope_layers'
        ),
        row('kin-config', 'pairs of neighbours', dict(rope_interleaved=True), 'rope_interleaved'),
        row('kin-config', 'a cap of 0', dict(attn_logit_softcapping=0.0), 'softcapping=0.0'),
        row('kin-config', 'experts', dict(num_local_experts=8), 'num_local_experts=8'),
        row('kin-config', 'fields per layer', dict(per_layer_config={'0': {}}), 'per_layer_config'),
        row(
            'kin-config',
            'part of the channels rotated',
            dict(rope_parameters=dict(rope_type='default', partial_rotary_factor=0.5)),
            'partial_rotary_factor=0.5',
        ),
        row(
            'kin-config',
            'kind of positions unknown',
            dict(rope_scaling=dict(type='dynamic', factor=2.0)),
            "rope_type='dynamic'",
        ),
        row('kin-config', 'base of 1', dict(rope_theta=1), 'must exceed 1'),
        row(
            'kin-config',
            'original length as a text',
            dict(
                original_max_position_embeddings='24',
                rope_scaling=dict(rope_type='yarn', factor=2.0),
            ),
            "original_max_position_embeddings='24' must be a positive int",
        ),
    ],
)
def test_a_value_that_is_not_computed_is_refused_by_name(folder, user_reads, values, text):
    change_config(folder, **values)
    line = refusal(hf.read_config, folder)
    assert text in line and 'config.json' in line
    user_reads(line)


def write_config(folder, **values):
    """Writes a config.json alone; returns the folder."""
    (folder / 'config.json').write_text(json.dumps(values))
    return folder


def config_of(family):
    config = tiny.make_torch_model(family).config.to_dict()
    return config | {'architectures': [FAMILIES[family].architecture]}


@pytest.mark.parametrize(
    'family,values,text',
    [
        row(
            'kin-config',
            'one object of positions where layers have two',
            'olmo3',
            dict(rope_parameters=dict(rope_type='yarn', factor=4.0)),
            'rope_parameters.rope_type has no effect in Olmo3ForCausalLM',
        ),
        row(
            'kin-config',
            'older name of the kind where layers have two',
            'gemma3',
            dict(rope_parameters=None, rope_scaling=dict(type='linear', factor=4.0)),
            'rope_scaling.type is not read by every version',
        ),
        row(
            'kin-config',
            'one base where versions differ',
            'olmo3',
            dict(rope_parameters=None, rope_theta=1e4),
            'rope_theta=10000 is not read alike',
        ),
        row(
            'kin-config',
            'windows without a size',
            'gemma3',
            dict(sliding_window=None),
            'sliding_window is null',
        ),
    ],
)
def test_what_versions_read_differently_is_refused(tmp_path, user_reads, family, values, text):
    line = refusal(hf.read_config, write_config(tmp_path, **config_of(family) | values))
    assert text in line
    user_reads(line)


@pytest.mark.fault('kin-config', 'fields that the class does not have')
def test_fields_that_the_class_does_not_have_are_named_once(folder, capsys, user_reads):
    harmless = dict(
        unsloth_version='2025.1', auto_map={'AutoModel': 'x.y'}, _private=1, use_x=False
    )
    change_config(folder, rope_ratio=8, query_pre_attn_scalar=4, temperature=0.7, **harmless)
    for _ in range(2):
        assert hf.read_config(folder).query_scale == 1
    (warning,) = capsys.readouterr().err.splitlines()
    assert 'config.json: ignored' in warning
    assert warning.endswith('query_pre_attn_scalar=4, rope_ratio=8')
    user_reads(warning)


# Positions


YARN = dict(rope_type='yarn', factor=4.0, original_max_position_embeddings=1024)


@pytest.mark.fault('third-19', 'a context beyond the positions of the model')
def test_a_context_beyond_the_positions_is_refused(folder, user_reads):
    assert families.check_context(folder, 2048, 'sampler.context') == ''
    line = refusal(families.check_context, folder, 2049, 'sampler.context')
    assert 'sampler.context=2049 exceeds max_position_embeddings=2048' in line
    user_reads(line)


@pytest.mark.parametrize(
    'scaling',
    [
        row('third-19', 'a context up to which YaRN extends the positions', YARN),
        row('third-19', 'positions with linear scaling', dict(type='linear', factor=2.0)),
    ],
)
def test_a_context_within_extended_positions_is_said(folder, user_reads, scaling):
    change_config(folder, rope_scaling=scaling)
    line = families.check_context(folder, 4096, 'sampler.context')
    assert 'the rotary scaling extends the positions to 4096' in line
    refusal(families.check_context, folder, 4097, 'sampler.context')
    user_reads(line)


def whole_model(**values):
    """config.json of a decoder beside an encoder of images."""
    return dict(
        architectures=['Gemma3ForConditionalGeneration'], text_config=config_of('gemma3') | values
    )


@pytest.mark.fault('third-19', 'positions of the decoder beside an encoder of images')
def test_positions_of_a_decoder_in_a_section_limit_the_context(tmp_path, user_reads):
    write_config(tmp_path, **whole_model())
    (tmp_path / 'tokenizer.json').write_text('{}')
    assert policy_settings.settings(tmp_path).sampler.context == 256
    user_reads('right: asked with a context of max_position_embeddings')


# Files


@pytest.mark.parametrize(
    'place',
    [
        row('J', 'an index that names a file outside the folder', '../other.safetensors'),
        row('J', 'an index that names a file by its whole path', '{parent}/other.safetensors'),
        row('kin-index', 'an index that names a file in a folder', 'part/other.safetensors'),
        row('kin-index', 'an index that names the folder above', '..'),
    ],
)
def test_an_index_names_files_of_its_folder(folder, user_reads, place):
    tensors = load_file(folder / 'model.safetensors')
    (folder / 'model.safetensors').rename(folder.parent / 'other.safetensors')
    name = place.format(parent=folder.parent)
    (folder / INDEX).write_text(json.dumps({'weight_map': dict.fromkeys(tensors, name)}))
    line = refusal(hf.load, folder)
    assert 'which is no file of the folder' in line
    user_reads(line)


@pytest.mark.parametrize(
    'text',
    [
        '{"weight_map": {}}',
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        '[' * 100_000,
        '\ufeff{}',
    ],
)
def test_an_index_that_is_none_is_refused(folder, text):
    (folder / INDEX).write_text(text)
    assert INDEX in refusal(hf.load, folder)


@pytest.mark.parametrize(
    'name',
    [
        row('J', f'the name {name}', name)
        for name in ('hf://a/b/../..', 'hf://a/b/x/../y.jsonl', 'hf://../b/x', 'hf://a/b//x')
    ],
)
def test_names_on_the_hub_stay_in_their_folder(user_reads, name):
    with pytest.raises(RetrievalError) as caught:
        downloads.check_name(name, is_file=True)
    downloads.check_name('hf://a/b.c/.x/y..z.jsonl', is_file=True)
    user_reads(caught.value)


@pytest.mark.parametrize('name', ['hf://a/..', 'hf://../b', 'hf://./b'])
def test_models_on_the_hub_have_names(name):
    with pytest.raises(RetrievalError, match='names no model'):
        downloads.check_name(name)
    downloads.check_name('hf://a.b/.c')


@pytest.mark.parametrize(
    'file,text',
    [
        row('kin-files', 'weights of PyTorch', 'pytorch_model.bin', 'save_pretrained'),
        row('kin-files', 'weights of llama.cpp', 'model-q4.gguf', 'save_pretrained'),
        row('kin-files', 'weights of another name', 'consolidated.safetensors', 'copy the index'),
        row('kin-files', 'no weights', 'README.md', 'copy the folder again'),
    ],
)
def test_weights_in_other_files_are_named(folder, user_reads, file, text):
    (folder / 'model.safetensors').rename(folder / file)
    line = refusal(hf.load, folder)
    assert 'holds neither model.safetensors nor' in line and text in line
    assert file in line or file == 'README.md'
    user_reads(line)


def write_raw(path, tensors, name, dtype, bytes_per_number):
    """Writes a tensor of a dtype that NumPy lacks among others."""
    header, data = {}, b''
    for tensor, array in tensors.items():
        content = array.tobytes()
        kind = 'F32'
        if tensor == name:
            content = bytes(int(bytes_per_number * array.size))
            kind = dtype
        offsets = [len(data), len(data) + len(content)]
        header[tensor] = dict(dtype=kind, shape=list(array.shape), data_offsets=offsets)
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack('<Q', len(text)) + text + data)


# dtype of a file → bytes of a number.
DTYPES = {
    'I32': 4,
    'BOOL': 1,
    'C64': 8,
    'F8_E4M3': 1,
    'F8_E5M2': 1,
    'F8_E8M0': 1,
    'F4': 0.5,
    'U8': 1,
}


@pytest.mark.parametrize(
    'dtype', [row('new-dtypes', f'weights of {name}', name) for name in DTYPES]
)
def test_tensors_that_are_no_weights_are_refused(folder, user_reads, dtype):
    tensors = load_file(folder / 'model.safetensors')
    write_raw(folder / 'model.safetensors', tensors, KERNEL, dtype, DTYPES[dtype])
    line = refusal(hf.load, folder)
    assert f'{KERNEL} has dtype {dtype}' in line
    user_reads(line)


@pytest.mark.parametrize(
    'dtype,number',
    [
        row('new-numbers', f'a weight of {number:g} in {dtype}', dtype, number)
        for dtype, number in [
            ('float32', 1e20),
            ('float64', 1e300),
            ('float32', -1e8),
            ('bfloat16', 1e30),
            ('float16', np.inf),
        ]
    ],
)
def test_weights_that_no_model_has_are_refused(folder, user_reads, dtype, number, recwarn):
    def change(tensors):
        tensors[KERNEL] = tensors[KERNEL].astype(dtype)
        tensors[KERNEL][-1, -1] = number

    change_tensors(folder, change)
    line = refusal(hf.load, folder)
    assert KERNEL in line and not recwarn.list
    user_reads(line)


@pytest.mark.fault('third-3', 'a head that is missing')
def test_a_head_that_is_missing_is_named_with_the_flag(folder, user_reads):
    change_config(folder, tie_word_embeddings=False)
    line = refusal(hf.load, folder)
    assert 'lm_head.weight is missing; copy it, or write tie_word_embeddings=true' in line
    user_reads(line)


@pytest.mark.fault('third-3', 'a head beside an encoder of images, called tied by the whole model')
def test_the_head_of_a_decoder_in_another_model_is_kept(tmp_path, user_reads):
    _, whole = tiny.make_wrapped_model()
    whole.save_pretrained(str(tmp_path))
    head = np.random.default_rng(0).normal(size=(80, 48)).astype('f')
    change_tensors(tmp_path, lambda tensors: tensors.update({'lm_head.weight': head}))
    config = hf.read_config(tmp_path)
    assert not config.tied
    params = hf.load(tmp_path, config)
    hf.save(tmp_path / 'out', config, params, like=tmp_path)
    written = json.loads((tmp_path / 'out' / 'config.json').read_text())
    assert written['tie_word_embeddings'] is False
    stored = load_file(tmp_path / 'out' / 'model.safetensors')
    np.testing.assert_array_equal(stored['lm_head.weight'], head)
    user_reads('right: loaded and exported')


@pytest.mark.fault('third-3', 'flags of two sections that differ')
@pytest.mark.parametrize('whole_flag,tied', [(True, True), (None, True), (False, False)])
def test_the_flag_of_the_whole_model_decides(tmp_path, user_reads, whole_flag, tied):
    config = whole_model(tie_word_embeddings=not tied) | {'tie_word_embeddings': whole_flag}
    assert hf.read_config(write_config(tmp_path, **config)).tied == tied
    user_reads('right: as in transformers, the flag beside text_config')


# Adapters


LINEARS = ('q', 'v')


@pytest.fixture
def adapter(published, tmp_path):
    """A folder of an adapter that nothing is wrong with."""
    model = hf.read_config(published)
    trained = adapters.init(hf.load(published, model), LINEARS, 3, 0, 'role')
    config = AdapterConfig(3, 6.0, LINEARS, published)
    hf.save_adapter(tmp_path / 'adapter', model, config, trained)
    return tmp_path / 'adapter'


def change_adapter(folder, **values):
    change_json(folder / CONFIG_FILE, **values)


@pytest.mark.parametrize(
    'dtype', [row('new-dtypes', f'factors of {name}', name) for name in DTYPES]
)
def test_factors_that_are_no_weights_are_refused(adapter, user_reads, dtype):
    tensors = load_file(adapter / WEIGHTS_FILE)
    name = sorted(tensors)[0]
    write_raw(adapter / WEIGHTS_FILE, tensors, name, dtype, DTYPES[dtype])
    line = refusal(hf.load, adapter)
    assert f'{name} has dtype {dtype}' in line
    user_reads(line)


@pytest.mark.parametrize(
    'number,alpha,text',
    [
        row('new-numbers', 'entries of 1e20', 1e20, 6.0, 'has a number of 1e+20'),
        row('new-numbers', 'entries of 10^5 in both factors', 1e5, 6.0, 'change weights by up to'),
        row('new-numbers', 'alpha of 1e300', 1.0, 1e300, 'change weights by up to 1e+300'),
        row('new-numbers', 'entries of NaN', np.nan, 6.0, 'not finite'),
    ],
)
def test_adapters_that_make_a_model_infinite_are_refused(adapter, user_reads, number, alpha, text):
    tensors = load_file(adapter / WEIGHTS_FILE)
    for array in tensors.values():
        array.fill(number)
    save_file(tensors, adapter / WEIGHTS_FILE)
    change_adapter(adapter, lora_alpha=alpha)
    line = refusal(hf.load, adapter)
    assert text in line and WEIGHTS_FILE in line
    user_reads(line)


# What a field of PEFT may be that changes what an adapter computes.
CHANGES = {
    'alora_invocation_tokens': [1],
    'alpha_pattern': {'q_proj': 5},
    'arrow_config': {'top_k': 3},
    'bias': 'all',
    'corda_config': {'x': 1},
    'fan_in_fan_out': True,
    'init_lora_weights': 'pissa',
    'kasa_config': {'x': 1},
    'layer_replication': [[0, 1]],
    'layers_to_transform': [0],
    'loftq_config': {'loftq_bits': 4},
    'lora_bias': True,
    'lora_ga_config': {'x': 1},
    'megatron_config': {'x': 1},
    'modules_to_save': ['lm_head'],
    'monteclora_config': {'x': 1},
    'peft_type': 'IA3',
    'r': 0,
    'lora_alpha': True,
    'rank_pattern': {'q_proj': 5},
    'target_modules': {'q_proj': 1},
    'target_parameters': ['x'],
    'trainable_token_indices': [3],
    'use_bdlora': {'x': 1},
    'use_dora': True,
    'use_qalora': True,
    'use_rslora': True,
    'velora_config': {'x': 1},
}


def test_every_field_of_peft_is_refused_or_without_effect():
    """Fails where a version of PEFT adds a field: say here or in adapter_config.py what it means."""
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    unknown = fields - set(CHANGES) - adapter_config.WITHOUT_EFFECT
    assert not unknown


@pytest.mark.parametrize('field', [row('kin-peft', f'{name}', name) for name in CHANGES])
def test_a_field_of_peft_that_changes_an_adapter_is_refused(adapter, user_reads, field):
    change_adapter(adapter, **{field: CHANGES[field]})
    line = refusal(hf.load, adapter)
    assert f'{field}=' in line and CONFIG_FILE in line
    user_reads(line)


@pytest.mark.parametrize(
    'values,text',
    [
        row('kin-peft', 'no modules', dict(target_modules=[]), 'target_modules=[]'),
        row('kin-peft', 'modules that are numbers', dict(target_modules=[1]), 'target_modules=[1]'),
        row('kin-peft', 'a rank of true', dict(r=True), 'r=True is not a whole number'),
        row('kin-peft', 'a base that is a number', dict(base_model_name_or_path=5), 'path=5'),
        row('kin-peft', 'no base', dict(base_model_name_or_path=None), 'path=None'),
    ],
)
def test_values_of_adapter_config_are_checked(adapter, user_reads, values, text):
    change_adapter(adapter, **values)
    line = refusal(hf.load, adapter)
    assert text in line and CONFIG_FILE in line
    user_reads(line)


@pytest.mark.fault('new-adapters', 'an adapter_config.json that is no object')
@pytest.mark.parametrize('text', ['', '{', '5', '[' * 100_000])
def test_an_adapter_config_that_is_none_is_named_by_every_reader(adapter, user_reads, text):
    (adapter / CONFIG_FILE).write_text(text)
    for read in (hf.load, open_codec):
        line = refusal(read, adapter)
        assert f'{CONFIG_FILE}: cannot be read' in line
    user_reads(line)


@pytest.mark.fault('new-adapters', 'an adapter whose base is an adapter')
def test_an_adapter_over_an_adapter_is_refused(adapter, tmp_path, user_reads):
    second = copy_of(adapter, tmp_path / 'second')
    change_adapter(second, base_model_name_or_path=str(adapter))
    line = refusal(hf.load, second)
    assert 'is an adapter itself' in line
    user_reads(line)


@pytest.mark.fault('new-adapters', 'a pickled adapter')
def test_a_pickled_adapter_is_not_opened(adapter, user_reads):
    (adapter / WEIGHTS_FILE).rename(adapter / 'adapter_model.bin')
    line = refusal(hf.load, adapter)
    assert 'load adapter_model.bin with peft and write it with save_pretrained' in line
    user_reads(line)
