"""Folders as others publish them: read as `transformers` and PEFT read them, refused in one line, or said."""

import dataclasses
import json
import re
import shutil
import struct

import numpy as np
import peft
import pytest
import tiny
import transformers
from refused_calls import refused, row
from safetensors.numpy import load_file
from small_policies import KERNEL, change_json, change_tensors, config_of, copy_of

from zeroplay_jax.configuration import check
from zeroplay_jax.configuration.fields import config as packaged_config
from zeroplay_jax.policy import (
    adapter_config,
    adapters,
    families,
    hf,
    shape,
)
from zeroplay_jax.policy.adapter_config import CONFIG_FILE, WEIGHTS_FILE, AdapterConfig
from zeroplay_jax.policy.families import FAMILIES
from zeroplay_jax.retrieval import downloads
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.rollout.tokens import open_codec
from zeroplay_jax.run import policy_settings
from zeroplay_jax.settings.kinds import PARTS_CHECKPOINT

CLASSES = {
    'qwen2': transformers.Qwen2Config,
    'qwen3': transformers.Qwen3Config,
    'qwen3_moe': transformers.Qwen3MoeConfig,
    'llama': transformers.LlamaConfig,
    'olmo3': transformers.Olmo3Config,
    'gemma3': transformers.Gemma3TextConfig,
    'qwen35': transformers.Qwen3_5TextConfig,
}
WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'


@pytest.fixture
def folder(published, tmp_path):
    """A copy of it."""
    return copy_of(published, tmp_path / 'policy')


def change_config(folder, **values):
    change_json(folder / 'config.json', **values)


def write_config(folder, **values):
    """Writes a config.json alone; returns the folder."""
    (folder / 'config.json').write_text(json.dumps(values))
    return folder


# Fields of config classes that change neither logits nor gradients.
WITHOUT_EFFECT = set(
    """
architectures attention_dropout bos_token_id chunk_size_feed_forward dtype eos_token_id id2label initializer_range
is_encoder_decoder label2id output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type
return_dict router_aux_loss_coef transformers_version use_cache
""".split()
)
# Fields that shape.py, or the class itself, reads.
READ = set(
    """
head_dim hidden_act hidden_activation hidden_size intermediate_size layer_types linear_conv_kernel_dim
linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim max_position_embeddings
max_window_layers moe_intermediate_size norm_topk_prob num_attention_heads num_experts num_experts_per_tok
num_hidden_layers num_key_value_heads query_pre_attn_scalar rms_norm_eps rope_parameters sliding_window
tie_word_embeddings use_sliding_window vocab_size
""".split()
)


@pytest.mark.parametrize('name', FAMILIES)
def test_every_field_of_a_config_class_is_read_without_effect_or_limited(name):
    """Fails where a version of transformers adds a field: read it, or say here or in families.py what it means."""
    family = FAMILIES[name]
    config_class = CLASSES[name]
    assert config_class.model_type == family.model_type
    limited = families._ONLY.keys() | family.only.keys()
    for field in dataclasses.fields(config_class):
        assert field.name in WITHOUT_EFFECT | READ | limited, field.name


# Changes of a folder and the line that refuses it


def config_row(key, sent, text, /, **values):
    """A row whose config.json has these fields."""
    change = lambda folder: change_config(folder, **values)
    return row(key, sent, change, re.escape(text))


def family_row(sent, family, text, /, **values):
    """A row with the config.json of another family."""
    write = lambda folder: write_config(folder, **config_of(family) | values)
    return row('kin-config', sent, write, re.escape(text))


def index_row(key, sent, place):
    def change(folder):
        tensors = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).rename(folder.parent / 'other.safetensors')
        name = place.format(parent=folder.parent)
        (folder / INDEX).write_text(json.dumps({'weight_map': dict.fromkeys(tensors, name)}))

    return row(key, sent, change, 'which is no file of the folder')


def file_row(sent, file):
    rename = lambda folder: (folder / WEIGHTS).rename(folder / file)
    message = 'holds neither model.safetensors nor.*copy the folder again.*save_pretrained'
    return row('kin-files', sent, rename, message)


def number_row(dtype, number):
    def spoil(tensors):
        tensors[KERNEL] = tensors[KERNEL].astype(dtype)
        tensors[KERNEL][-1, -1] = number

    change = lambda folder: change_tensors(folder / WEIGHTS, spoil)
    return row('new-numbers', f'a weight of {number:g} in {dtype}', change, re.escape(KERNEL))


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


def dtype_row(dtype, file, what):
    """A row whose first tensor has a dtype of no weights."""

    def change(folder):
        tensors = load_file(folder / file)
        write_raw(folder / file, tensors, sorted(tensors)[0], dtype, DTYPES[dtype])

    return row('new-dtypes', f'{what} of {dtype}', change, f' has dtype {dtype}')


ROTATED = dict(rope_type='default', partial_rotary_factor=0.5)
YARN_TEXT = dict(rope_type='yarn', factor=2.0)
ORIGINAL = "original_max_position_embeddings='24' must be a positive number"
REFUSED = [
    config_row('new-config', 'layers 10^7', 'num_hidden_layers=10000000', num_hidden_layers=10**7),
    config_row('new-config', 'vocabulary 4·10^8', 'and (400000000, 32) in a', vocab_size=4 * 10**8),
    config_row(
        'new-config',
        'heads 10^9',
        'o_proj.weight is (32, 32), and (32, 8',
        num_attention_heads=10**9,
    ),
    *[
        config_row('kin-config', sent, text, **{field: value})
        for sent, text, field, value in [
            ('type of another class', "model_type='llama'", 'model_type', 'llama'),
            ('cap of logits', 'softcapping=30.0', 'final_logit_softcapping', 30.0),
            ('quantised', 'quantization_config', 'quantization_config', {'bits': 4}),
            ('scaled residuals', 'residual_multiplier', 'residual_multiplier', 0.2),
            ('layers without positions', 'no_rope_layers', 'no_rope_layers', [1, 0]),
            ('pairs of neighbours', 'rope_interleaved', 'rope_interleaved', True),
            ('a cap of 0', 'softcapping=0.0', 'attn_logit_softcapping', 0.0),
            ('experts', 'num_local_experts=8', 'num_local_experts', 8),
            ('fields per layer', 'per_layer_config', 'per_layer_config', {'0': {}}),
            (
                'part of the channels rotated',
                'partial_rotary_factor is not supported',
                'rope_parameters',
                ROTATED,
            ),
            (
                'kind of positions unknown',
                "rope_type='dynamic'",
                'rope_scaling',
                dict(type='dynamic', factor=2.0),
            ),
            ('base of 1', 'must exceed 1', 'rope_theta', 1),
        ]
    ],
    config_row(
        'kin-config',
        'original length as a text',
        ORIGINAL,
        original_max_position_embeddings='24',
        rope_scaling=YARN_TEXT,
    ),
    # What versions of transformers read differently.
    family_row(
        'one object of positions where layers have two',
        'olmo3',
        'rope_parameters.factor has no effect',
        rope_parameters=dict(rope_type='yarn', factor=4.0),
    ),
    family_row(
        'older name of the kind where layers have two',
        'gemma3',
        'rope_parameters.factor is not supported',
        rope_parameters=None,
        rope_scaling=dict(type='linear', factor=4.0),
    ),
    family_row(
        'one base where versions differ',
        'olmo3',
        'rope_theta=10000.0 is not supported (only 500000)',
        rope_parameters=None,
        rope_theta=1e4,
    ),
    family_row('windows without a size', 'gemma3', 'sliding_window is null', sliding_window=None),
    # Files.
    index_row('J', 'an index that names a file outside the folder', '../other.safetensors'),
    index_row('J', 'an index that names a file by its whole path', '{parent}/other.safetensors'),
    index_row('kin-index', 'an index that names a file in a folder', 'part/other.safetensors'),
    index_row('kin-index', 'an index that names the folder above', '..'),
    file_row('weights of PyTorch', 'pytorch_model.bin'),
    file_row('weights of llama.cpp', 'model-q4.gguf'),
    file_row('weights of another name', 'consolidated.safetensors'),
    file_row('no weights', 'README.md'),
    # Numbers.
    *[dtype_row(dtype, WEIGHTS, 'weights') for dtype in DTYPES],
    number_row('float32', 1e20),
    number_row('float64', 1e300),
    number_row('float32', -1e8),
    number_row('bfloat16', 1e30),
    number_row('float16', np.inf),
    row(
        'third-3',
        'a head that is missing',
        lambda folder: change_config(folder, tie_word_embeddings=False),
        'lm_head.weight is not there.*; take the config.json',
    ),
]


@pytest.mark.parametrize('change,message', REFUSED)
def test_a_folder_that_is_not_computed_is_refused(folder, change, message, recwarn):
    change(folder)
    line = refused(hf.load, folder)
    assert re.search(message, line), line
    assert not recwarn.list


@pytest.mark.fault('kin-config', 'fields that the class does not have')
def test_fields_that_the_class_does_not_have_are_named_once(folder, capsys):
    harmless = dict(
        unsloth_version='2025.1', auto_map={'AutoModel': 'x.y'}, _private=1, use_x=False
    )
    change_config(folder, rope_ratio=8, query_pre_attn_scalar=4, temperature=0.7, **harmless)
    for _ in range(2):
        assert hf.read_config(folder).query_scale == 1
    (warning,) = capsys.readouterr().err.splitlines()
    assert 'config.json: ignored' in warning
    assert warning.endswith('query_pre_attn_scalar=4, rope_ratio=8')


# Positions


YARN = dict(rope_type='yarn', factor=4.0, original_max_position_embeddings=1024)


@pytest.mark.fault('third-19', 'a context beyond the positions of the model')
def test_a_context_beyond_the_positions_is_refused(folder):
    assert shape.check_context(folder, 2048, 'sampler.context') == ''
    line = refused(shape.check_context, folder, 2049, 'sampler.context')
    assert 'sampler.context=2049 exceeds max_position_embeddings=2048' in line


@pytest.mark.parametrize(
    'scaling',
    [
        row('third-19', 'a context up to which YaRN extends the positions', YARN),
        row('third-19', 'positions with linear scaling', dict(type='linear', factor=2.0)),
    ],
)
def test_a_context_within_extended_positions_is_said(folder, scaling):
    change_config(folder, rope_scaling=scaling)
    line = shape.check_context(folder, 4096, 'sampler.context')
    assert 'the rotary scaling extends the positions to 4096' in line
    refused(shape.check_context, folder, 4097, 'sampler.context')


def whole_model(**values):
    """config.json of a decoder beside an encoder of images."""
    return dict(
        architectures=['Gemma3ForConditionalGeneration'], text_config=config_of('gemma3') | values
    )


@pytest.mark.fault('third-19', 'positions of the decoder beside an encoder of images')
def test_positions_of_a_decoder_in_a_section_limit_the_context(tmp_path):
    write_config(tmp_path, **whole_model())
    (tmp_path / 'tokenizer.json').write_text('{}')
    assert policy_settings.settings(tmp_path).sampler.context == 256


# Names


@pytest.mark.parametrize(
    'name',
    [
        row('J', f'the name {name}', name)
        for name in ('hf://a/b/../..', 'hf://a/b/x/../y.jsonl', 'hf://../b/x', 'hf://a/b//x')
    ],
)
def test_names_on_the_hub_stay_in_their_folder(name):
    with pytest.raises(RetrievalError):
        downloads.check_name(name, is_file=True)
    downloads.check_name('hf://a/b.c/.x/y..z.jsonl', is_file=True)


@pytest.mark.parametrize('name', ['hf://a/..', 'hf://../b', 'hf://./b'])
def test_models_on_the_hub_have_names(name):
    with pytest.raises(RetrievalError, match='names no model'):
        downloads.check_name(name)
    downloads.check_name('hf://a.b/.c')


# Heads


@pytest.mark.fault('third-3', 'a head beside an encoder of images, called tied by the whole model')
def test_the_head_of_a_decoder_in_another_model_is_kept(tmp_path):
    _, whole = tiny.make_wrapped_model()
    whole.save_pretrained(str(tmp_path))
    head = np.random.default_rng(0).normal(size=(80, 48)).astype('f')
    change_tensors(tmp_path / WEIGHTS, lambda tensors: tensors.update({'lm_head.weight': head}))
    config = hf.read_config(tmp_path)
    assert not config.tied
    params = hf.load(tmp_path, config)
    hf.save(tmp_path / 'out', config, params, like=tmp_path)
    written = json.loads((tmp_path / 'out' / 'config.json').read_text())
    assert written['tie_word_embeddings'] is False
    stored = load_file(tmp_path / 'out' / 'model.safetensors')
    np.testing.assert_array_equal(stored['lm_head.weight'], head)


@pytest.mark.fault('third-3', 'flags of two sections that differ')
@pytest.mark.parametrize('whole_flag,tied', [(True, True), (None, True), (False, False)])
def test_the_flag_of_the_whole_model_decides(tmp_path, whole_flag, tied):
    config = whole_model(tie_word_embeddings=not tied) | {'tie_word_embeddings': whole_flag}
    assert hf.read_config(write_config(tmp_path, **config)).tied == tied


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


def peft_row(sent, text, /, **values):
    """A row whose adapter_config.json has these fields."""
    change = lambda adapter: change_json(adapter / CONFIG_FILE, **values)
    return row('kin-peft', sent, change, re.escape(text))


def factor_row(sent, number, alpha, text):
    def fill(tensors):
        for array in tensors.values():
            array.fill(number)

    def change(adapter):
        change_tensors(adapter / WEIGHTS_FILE, fill)
        change_json(adapter / CONFIG_FILE, lora_alpha=alpha)

    return row('new-numbers', sent, change, f'{WEIGHTS_FILE}.*{re.escape(text)}')


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
    'target_parameters': ['x'],
    'trainable_token_indices': [3],
    'use_bdlora': {'x': 1},
    'use_dora': True,
    'use_qalora': True,
    'use_rslora': True,
    'velora_config': {'x': 1},
}
REFUSED_ADAPTERS = [
    *[dtype_row(dtype, WEIGHTS_FILE, 'factors') for dtype in DTYPES],
    factor_row('entries of 1e20', 1e20, 6.0, 'beyond 1e+06'),
    factor_row('entries of 10^5 in both factors', 1e5, 6.0, 'change weights by up to'),
    factor_row('alpha of 1e300', 1.0, 1e300, 'change weights by up to 1e+300'),
    factor_row('entries of NaN', np.nan, 6.0, 'not finite'),
    *[peft_row(name, f'{name}=', **{name: value}) for name, value in CHANGES.items()],
    peft_row('no modules', 'lora_A.weight is (', target_modules=[]),
    peft_row(
        'modules that are numbers',
        "target_modules: no layer of this model has '1'",
        target_modules=[1],
    ),
    peft_row('a rank of true', 'r=True; write', r=True),
    peft_row('a base that is a number', 'path=5', base_model_name_or_path=5),
    peft_row('no base', 'path=None', base_model_name_or_path=None),
    row(
        'new-adapters',
        'a pickled adapter',
        lambda adapter: (adapter / WEIGHTS_FILE).rename(adapter / 'adapter_model.bin'),
        'load the adapter with peft and write it with save_pretrained',
    ),
]


@pytest.mark.parametrize('change,message', REFUSED_ADAPTERS)
def test_an_adapter_that_is_not_computed_is_refused(adapter, change, message):
    change(adapter)
    line = refused(hf.load, adapter)
    assert re.search(message, line) and 'adapter_' in line, line


def test_a_check_of_a_config_compares_the_tensors_of_an_adapter(adapter):
    config = packaged_config('drzero')
    config.policy.path = str(adapter)
    mistakes = []
    check.check_policy(config, mistakes)
    assert not any('q_proj' in line for line in mistakes)
    change_json(adapter / CONFIG_FILE, r=4)
    check.check_policy(config, mistakes)
    line = next(line for line in mistakes if 'q_proj' in line)
    assert 'q_proj.lora_A.weight is (3, ' in line and ' and (4, ' in line and WEIGHTS_FILE in line


def test_every_field_of_peft_is_refused_or_without_effect():
    """Fails where a version of PEFT adds a field: say here or in adapter_config.py what it means."""
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    unknown = fields - set(CHANGES) - adapter_config.WITHOUT_EFFECT
    assert not unknown


@pytest.mark.fault('new-adapters', 'an adapter_config.json that is no object')
@pytest.mark.parametrize('text', ['', '{', '5', '[' * 100_000])
def test_an_adapter_config_that_is_none_is_named_by_every_reader(adapter, text):
    (adapter / CONFIG_FILE).write_text(text)
    for read in (hf.load, open_codec):
        line = refused(read, adapter)
        assert f'{CONFIG_FILE}: cannot be read' in line


@pytest.mark.fault('new-adapters', 'an adapter whose base is an adapter')
def test_an_adapter_over_an_adapter_is_refused(adapter, tmp_path):
    second = copy_of(adapter, tmp_path / 'second')
    change_json(second / CONFIG_FILE, base_model_name_or_path=str(adapter))
    line = refused(hf.load, second)
    assert 'is an adapter itself' in line


def test_a_copy_of_the_start_of_the_quickstart_is_asked_with_its_prompts(tmp_path):
    copy = shutil.copytree(PARTS_CHECKPOINT, tmp_path / 'copy')
    config = policy_settings.settings(copy)
    assert (config.prompts, config.tools.syntax) == ('numbered', 'search_r1')
    assert config.sampler.context == 1024
