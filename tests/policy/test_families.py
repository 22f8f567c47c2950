"""Every family against PyTorch: full sequences, packed rows, the sampler's decoding; and every feature matters."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import tiny
import torch
import transformers

from zeroplay_jax.policy import config_fields, families, hf, rope, sharding, transformer
from zeroplay_jax.rollout.sampler import FILL, PutRow, Sampler, SamplerConfig

TOLERANCE = 2e-4
LENGTHS = (96, 61, 40)


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


def their_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens[None], dtype=torch.long)).logits[0].numpy()


@functools.partial(tiny.jit, static_argnums=0)
def our_logits(config, params, tokens, positions, segment):
    x = transformer.hidden(config, params, tokens, positions, segment)
    return transformer.logits(config, params, x.reshape(-1, x.shape[-1])).reshape(*tokens.shape, -1)


score = tiny.jit(transformer.score, static_argnums=0)


def alone(config, params, tokens):
    return our_logits(
        config, params, tokens[None], np.arange(len(tokens))[None], np.ones((1, len(tokens)), int)
    )[0]


def test_right_padded_and_packed_logits_are_those_of_transformers(case):
    _, model, config, params = case
    rows = sequences(config)
    longest = max(LENGTHS)
    padded = np.stack([np.pad(row, (0, longest - len(row))) for row in rows])
    valid = np.arange(longest) < np.array(LENGTHS)[:, None]
    with torch.no_grad():
        mask = torch.tensor(valid, dtype=torch.long)
        theirs = model(torch.tensor(padded, dtype=torch.long), attention_mask=mask).logits.numpy()
    assert 1 < np.abs(theirs[valid]).max() < 30 and theirs[valid].std() > 1
    positions = np.broadcast_to(np.arange(longest), padded.shape)
    ours = our_logits(config, params, padded, positions, valid.astype(np.int32))
    assert np.abs(ours - theirs)[valid].max() <= TOLERANCE

    empty = np.zeros(7, np.int32)
    tokens = np.concatenate([*rows, empty])[None]
    positions = np.concatenate([*map(np.arange, LENGTHS), empty])[None]
    segment = np.repeat([1, 2, 3, 0], [*LENGTHS, 7])[None]
    packed = our_logits(config, params, tokens, positions, segment)[0]
    apart = np.split(packed[: sum(LENGTHS)], np.cumsum(LENGTHS)[:-1])
    for row, ours in zip(rows, apart):
        assert np.abs(ours - their_logits(model, row)).max() <= TOLERANCE


def without_bias(config, params):
    zero = lambda path, x: x * 0 if path[-1].key == 'bias' else x
    return config, jax.tree_util.tree_map_with_path(zero, params)


LEFT_OUT = {
    'bias': without_bias,
    'qk_norm': lambda config, params: (dataclasses.replace(config, qk_norm='none'), params),
    'window': lambda config, params: (dataclasses.replace(config, windows=()), params),
    'rope_scaling': lambda config, params: (dataclasses.replace(config, rope_scaling=None), params),
    'attention_factor': lambda config, params: (
        dataclasses.replace(
            config, rope_scaling=dataclasses.replace(config.rope_scaling, attention_factor=1.0)
        ),
        params,
    ),
    'plain_sliding_layers': lambda config, params: (
        dataclasses.replace(config, scale_sliding=True),
        params,
    ),
    'norms_after': lambda config, params: (
        dataclasses.replace(config, norms='before'),
        params
        | {
            k: v | {'input_norm': v['post_mlp_norm']}
            for k, v in params.items()
            if k.startswith('layer')
        },
    ),
}
LEFT_OUT |= {
    name: lambda config, params, name=name, value=value: (
        dataclasses.replace(config, **{name: value}),
        params,
    )
    for name, value in [
        ('norm_offset', 0.0),
        ('activation', 'silu'),
        ('scale_embedding', False),
        ('query_scale', 1.0),
        ('sliding_theta', None),
    ]
}
FEATURES = {
    'qwen2': ('bias',),
    'qwen2_tied_sliding': ('bias', 'window'),
    'qwen3': ('qk_norm',),
    'qwen3_yarn': ('qk_norm', 'rope_scaling', 'attention_factor'),
    'llama3': ('rope_scaling',),
    'olmo3': (
        'qk_norm',
        'window',
        'rope_scaling',
        'attention_factor',
        'plain_sliding_layers',
        'norms_after',
    ),
    # The others are those of OLMo-3.
    'gemma3': (
        'rope_scaling',
        'norms_after',
        'norm_offset',
        'activation',
        'scale_embedding',
        'query_scale',
        'sliding_theta',
    ),
}


def test_a_feature_left_out_shows(case):
    name, model, config, params = case
    row = sequences(config)[0]
    theirs = their_logits(model, row)
    for feature in FEATURES[name]:
        gap = np.abs(alone(*LEFT_OUT[feature](config, params), row) - theirs).max()
        assert gap >= 100 * TOLERANCE, f'{feature}: {gap}'


def fill_and_decode(sampler, params, goal):
    """Runs the programs until slot s holds goal[s] tokens; returns what was sampled, in order, with log-probs."""
    tokens, logp = ([[] for _ in goal] for _ in range(2))
    while True:
        phase, length = np.asarray(sampler.state.status), np.asarray(sampler.state.length)
        fill = np.flatnonzero(phase == FILL).tolist()
        if fill:
            sampler.extend(params, fill)
        elif (length < goal).any():
            burst = sampler.decode(params)
            for s, n in enumerate(np.asarray(burst.count)):
                tokens[s] += np.asarray(burst.tokens)[s, :n].tolist()
                logp[s] += np.asarray(burst.logp)[s, :n].tolist()
        else:
            return tokens, logp


# Those left to the long tests have features that the others have, apart or together.
@pytest.mark.parametrize(
    'case',
    [
        pytest.param(
            f, marks=pytest.mark.long if f in ('qwen2_tied_sliding', 'qwen3', 'olmo3') else ()
        )
        for f in tiny.FAMILIES
    ],
    indirect=True,
)
def test_the_sampler_decodes_what_generate_does_with_the_scores_of_a_full_forward(case):
    """Slot 0 is greedy for 64 tokens; slot 1 samples, reads an observation, and samples on. Chunks cross the window."""
    _, model, config, params = case
    shape = dict(slots=2, context=100, chunk=12, fill_rows=2, burst=8, put_rows=2, put_tokens=32)
    sampler = Sampler(config, SamplerConfig(**shape), sharding.make_mesh())
    rng = np.random.default_rng(4)
    prompt, other, observation = (
        rng.integers(0, config.vocab_size, n).astype(np.int32) for n in (20, 25, 27)
    )
    key = np.array([1, 2], np.uint32)
    sampler.put([PutRow(0, prompt, 0, 84, 0.0, key), PutRow(1, other, 0, 45, 1.0, key)])
    greedy, greedy_logp = fill_and_decode(sampler, params, np.array([84, 45]))
    sampler.put([PutRow(1, observation, 45, 92, 1.0, key)])
    more, more_logp = fill_and_decode(sampler, params, np.array([84, 92]))

    with torch.no_grad():
        options = dict(max_new_tokens=64, do_sample=False)
        theirs = model.generate(torch.tensor(prompt[None], dtype=torch.long), **options)[
            0, 20:
        ].tolist()
    assert greedy[0] == theirs and len(theirs) == 64

    rows = [np.array([*prompt, *greedy[0]]), np.array([*other, *greedy[1], *observation, *more[1]])]
    for row, sampled in zip(
        rows, ([(20, greedy_logp[0])], [(25, greedy_logp[1]), (72, more_logp[1])])
    ):
        positions = np.arange(len(row))[None]
        full = score(
            config, params, row[None].astype(np.int32), positions, np.ones_like(positions)
        )[0]
        for start, logp in sampled:
            assert np.abs(np.asarray(full)[0, start : start + len(logp)] - logp).max() <= 1e-4
    assert len(more_logp[1]) == 20


# config.json


def write(path, raw):
    path.mkdir(exist_ok=True)
    (path / 'config.json').write_text(json.dumps(raw))
    return path


def newer(family, **fields):
    """config.json as transformers 5 spells it."""
    return tiny.make_torch_model(family, **fields).config.to_dict() | {
        'architectures': [
            families.FAMILIES[family.split('_')[0].replace('llama3', 'llama')].architecture
        ]
    }


@pytest.mark.fault('kin-faces', 'config.json without rms_norm_eps')
@pytest.mark.parametrize('name', families.FAMILIES)
def test_an_epsilon_that_is_left_out_is_that_of_transformers(tmp_path, name, user_reads):
    raw = newer('llama3' if name == 'llama' else name)
    del raw['rms_norm_eps']
    default = transformers.AutoConfig.for_model(raw['model_type']).rms_norm_eps
    assert hf.read_config(write(tmp_path / 'policy', raw)).norm_eps == default
    user_reads(f'right: {default}')


def older(raw):
    """The same in the spelling of transformers 4."""
    raw = dict(raw)
    raw['torch_dtype'] = raw.pop('dtype')
    parameters = raw.pop('rope_parameters')
    full = dict(parameters.get('full_attention', parameters))
    raw['rope_theta'] = full.pop('rope_theta')
    if raw['model_type'] == 'gemma3_text':
        raw['rope_local_base_freq'] = parameters['sliding_attention']['rope_theta']
    raw['rope_scaling'] = None if full['rope_type'] == 'default' else full
    return raw


@pytest.mark.parametrize('family', tiny.FAMILIES)
def test_both_spellings_say_the_same(family, tmp_path):
    raw = newer(family)
    assert 'rope_parameters' in raw and 'rope_theta' not in raw and 'dtype' in raw
    old = older(raw)
    assert 'rope_parameters' not in old and 'rope_theta' in old
    assert hf.read_config(write(tmp_path / 'new', raw)) == hf.read_config(
        write(tmp_path / 'old', old)
    )


def test_published_fields_are_read_as_meant(tmp_path):
    """The fields of Llama-3.1-8B and of OLMo-3-7B, as their folders spell them, and Qwen's layer rule."""
    llama = older(newer('llama3')) | dict(
        rope_scaling=dict(
            factor=8.0,
            high_freq_factor=4.0,
            low_freq_factor=1.0,
            original_max_position_embeddings=8192,
            rope_type='llama3',
        ),
        num_attention_heads=32,
        num_key_value_heads=8,
        hidden_size=4096,
        head_dim=None,
    )
    config = hf.read_config(write(tmp_path / 'llama', llama))
    assert config.rope_scaling == rope.Llama3(8.0, 1.0, 4.0, 8192) and config.rope_theta == 500000.0
    assert config.head_dim == 128 and config.windows == ()

    olmo = older(newer('olmo3')) | dict(
        num_hidden_layers=8,
        layer_types=None,
        sliding_window=4096,
        rope_scaling=dict(rope_type='yarn', factor=8.0, original_max_position_embeddings=8192),
    )
    config = hf.read_config(write(tmp_path / 'olmo', olmo))
    assert config.windows == (4096, 4096, 4096, 0) * 2 and not config.scale_sliding
    assert config.rope_scaling.attention_factor == pytest.approx(
        1.2079441541679836
    )  # what the published folder says

    # Gemma-3-4B leaves out what has the default of transformers; its decoder is one part of the model.
    text = dict(
        model_type='gemma3_text',
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=34,
        rope_scaling=dict(factor=8.0, rope_type='linear'),
        sliding_window=1024,
    )
    gemma = dict(architectures=['Gemma3ForConditionalGeneration'], text_config=text)
    folder = write(tmp_path / 'gemma', gemma | dict(vision_config=dict(hidden_size=1152)))
    config = hf.read_config(folder)
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab_size) == (
        8,
        4,
        256,
        262208,
    )
    assert config.windows == ((1024,) * 5 + (0,)) * 5 + (1024,) * 4 and config.tied
    assert (config.rope_theta, config.sliding_theta) == (1e6, 1e4) and config.query_scale == 1
    assert config.rope_scaling == rope.Linear(8.0) and not config.scale_sliding
    # The 27B model scales its scores by its width per head, which is not the size of a head.
    text |= dict(query_pre_attn_scalar=168, head_dim=128, num_attention_heads=32)
    write(folder, gemma)
    assert hf.read_config(folder).query_scale == pytest.approx((128 / 168) ** 0.5)

    qwen = older(newer('qwen2')) | dict(
        layer_types=None, use_sliding_window=True, max_window_layers=1
    )
    assert hf.read_config(write(tmp_path / 'qwen', qwen | dict(sliding_window=9))).windows == (0, 9)
    assert (
        hf.read_config(write(tmp_path / 'qwen', qwen | dict(use_sliding_window=False))).windows
        == ()
    )


@pytest.mark.parametrize(
    'family,change,message',
    [
        (
            'qwen3',
            dict(architectures=['Qwen3MoeForCausalLM']),
            r"architectures=\['Qwen3MoeForCausalLM'\]",
        ),
        ('qwen3', dict(architectures=None), 'architectures=None'),
        ('qwen3', dict(num_experts=8), 'num_experts=8'),
        ('qwen3', dict(attention_bias=True), 'attention_bias=True'),
        ('llama3', dict(mlp_bias=True), 'mlp_bias=True'),
        ('qwen2', dict(hidden_act='gelu'), "hidden_act='gelu'"),
        ('qwen2', dict(quantization_config=dict(bits=4)), 'quantization_config'),
        (
            'qwen2',
            dict(rope_parameters=dict(rope_type='longrope', rope_theta=1e4)),
            "rope_parameters.rope_type='longrope'",
        ),
        (
            'qwen2',
            dict(rope_parameters=None, rope_scaling=dict(type='mrope')),
            "rope_scaling.rope_type='mrope'",
        ),
        (
            'qwen2',
            dict(rope_parameters=dict(rope_type='default', mrope_section=[1])),
            'mrope_section',
        ),
        ('qwen2', dict(rope_parameters='yarn'), "rope_parameters='yarn' must be an object"),
        (
            'qwen3_yarn',
            dict(rope_parameters=dict(rope_type='yarn', factor=2.0, mscale=0.7)),
            'mscale',
        ),
        (
            'llama3',
            dict(rope_parameters=dict(rope_type='llama3', factor=8.0)),
            'rope_parameters.low_freq_factor is missing',
        ),
        ('llama3', dict(partial_rotary_factor=0.5), 'partial_rotary_factor=0.5'),
        ('olmo3', dict(layer_types=['chunked_attention', 'full_attention']), 'chunked_attention'),
        (
            'olmo3',
            dict(layer_types=['full_attention']),
            'layer_types has 1 entries for num_hidden_layers=2',
        ),
        ('olmo3', dict(sliding_window=0), 'sliding_window=0 must be a positive int'),
        ('qwen2', dict(layer_types=['sliding_attention'] * 2), 'use_sliding_window is not true'),
        ('qwen2', dict(hidden_size=None), 'hidden_size is missing'),
        ('qwen2', dict(vocab_size='80'), "vocab_size='80' must be a positive int"),
        (
            'qwen2',
            dict(num_key_value_heads=3),
            'num_attention_heads=4 is not a multiple of num_key_value_heads=3',
        ),
        ('qwen3', dict(head_dim=15), 'head_dim=15 must be even'),
        ('qwen3', dict(rms_norm_eps=float('nan')), 'rms_norm_eps=nan must be a positive float'),
        ('qwen3', dict(rms_norm_eps=float('inf')), 'rms_norm_eps=inf must be a positive float'),
        ('qwen3', dict(rms_norm_eps=10**400), 'rms_norm_eps=inf must be a positive float'),
        ('qwen3', dict(tie_word_embeddings='yes'), "tie_word_embeddings='yes' must be true or"),
        ('qwen3', dict(tie_word_embeddings=1), 'tie_word_embeddings=1 must be true or false'),
        ('qwen2', dict(architectures=5), 'architectures=5 is not supported'),
        ('gemma3', dict(final_logit_softcapping=30.0), 'final_logit_softcapping=30.0'),
        ('gemma3', dict(use_bidirectional_attention=True), 'use_bidirectional_attention=True'),
        ('gemma3', dict(hidden_activation='gelu'), "only 'gelu_pytorch_tanh'"),
        (
            'qwen3',
            dict(architectures=['Qwen3_5ForCausalLM']),
            r'not supported: its gated delta-net layers \(linear attention\)',
        ),
        ('olmo3', dict(layer_types=5), 'layer_types must be a list of texts'),
        ('olmo3', dict(layer_types=[[], 1]), 'layer_types must be a list of texts'),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_field_with_a_way_out(
    tmp_path, family, change, message
):
    folder = write(tmp_path / 'policy', newer(family) | change)
    with pytest.raises(hf.CheckpointError, match=message) as caught:
        hf.read_config(folder)
    line = str(caught.value)
    ways = [config_fields.OTHER_CONFIG, config_fields.OTHER_CHECKPOINT, config_fields.SUPPORTED]
    assert line.endswith((*ways, 'correct the wrong one'))
    families = 'supported: Qwen2ForCausalLM, Qwen3ForCausalLM, LlamaForCausalLM, Olmo3ForCausalLM'
    assert (families in line) == ('architectures=' in line)
    assert 'config.json' in line and '\n' not in line


def test_the_decoder_of_a_model_with_other_parts_is_read_and_written_alone(tmp_path):
    """Gemma 3 from 4B on: the folder has an encoder of images beside the decoder."""
    text, whole = tiny.make_wrapped_model()
    whole.save_pretrained(str(tmp_path / 'whole'))
    row = sequences(hf.read_config(tmp_path / 'whole'))[0]
    theirs = their_logits(text, row)
    model, params = hf.read_config(tmp_path / 'whole'), hf.load(tmp_path / 'whole')
    assert np.abs(alone(model, params, row) - theirs).max() <= TOLERANCE
    hf.save(tmp_path / 'written', model, params, like=tmp_path / 'whole')
    again = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / 'written')).eval()
    assert type(again).__name__ == 'Gemma3ForCausalLM'
    assert np.abs(their_logits(again, row) - theirs).max() <= TOLERANCE
    assert hf.read_config(tmp_path / 'written') == model


@pytest.mark.parametrize('text', ['', '{', '[1]', '[' * 100_000])
def test_a_config_that_is_no_object_is_refused(tmp_path, text):
    (tmp_path / 'config.json').write_text(text)
    with pytest.raises(hf.CheckpointError, match='cannot be read as a model config'):
        hf.read_config(tmp_path)
