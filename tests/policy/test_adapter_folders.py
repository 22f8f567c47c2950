"""Adapters as PEFT folders: what is written is read back, `peft` computes the same logits, faults are one line."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

from zeroplay_jax import api, ask
from zeroplay_jax.configs import common
from zeroplay_jax.policy import adapter_config, adapter_folders, adapters, hf, transformer
from zeroplay_jax.policy.adapter_config import CONFIG_FILE, WEIGHTS_FILE, AdapterConfig
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT
from zeroplay_jax.settings.schema import LINEARS
from zeroplay_jax.training import policies
from zeroplay_jax.types import UserError

CONFIG = dict(rank=3, alpha=6.0, linears=('down', 'q', 'v'))


@pytest.fixture(scope='module')
def base(tmp_path_factory):
    folder = tiny.make_folder(tmp_path_factory.mktemp('folders') / 'base', letters=tiny.LETTERS)
    model = hf.read_config(folder)
    return folder, model, hf.load(folder, model)


def adapter_of(params, seed):
    adapter = adapters.init(params, CONFIG['linears'], 3, seed, 'role')
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype('f'), adapter)


@pytest.fixture
def folder(base, tmp_path):
    base_folder, model, params = base
    config = AdapterConfig(**CONFIG, base=base_folder)
    adapter_folders.save(tmp_path / 'adapter', model, config, adapter_of(params, 1))
    return tmp_path / 'adapter'


def logits(model, params, ids):
    positions = np.arange(ids.shape[1], dtype=np.int32)[None]
    states = transformer.hidden(model, params, ids, positions, np.ones_like(ids))[0]
    return np.asarray(transformer.logits(model, params, states))


def test_a_folder_is_read_as_it_was_written(base, folder):
    _, model, params = base
    jax.tree.map(
        np.testing.assert_array_equal, adapter_folders.load(folder, model), adapter_of(params, 1)
    )
    assert adapter_config.read(folder) == AdapterConfig(**CONFIG, base=base[0])
    with pytest.raises(FileExistsError):
        adapter_folders.save(folder, model, adapter_config.read(folder), {})


def test_an_adapter_folder_is_loaded_as_its_base_with_the_adapter(base, folder):
    _, model, params = base
    assert hf.read_config(folder) == model
    joined = adapters.join(params | {adapters.SCALE: jnp.full(1, 2.0)}, adapter_of(params, 1))
    ids = np.arange(12, dtype=np.int32)[None]
    ours = logits(model, hf.load(folder), ids)
    np.testing.assert_allclose(ours, logits(model, joined, ids), atol=1e-4)
    assert np.abs(ours - logits(model, params, ids)).max() > 0.1


def test_peft_computes_the_same_logits(base, folder):
    peft = pytest.importorskip('peft')
    import torch
    import transformers

    base_folder, model, _ = base
    ids = np.arange(20, dtype=np.int32)[None] % model.vocab_size
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(base_folder))
    theirs = peft.PeftModel.from_pretrained(theirs, str(folder))
    with torch.no_grad():
        want = theirs(torch.tensor(ids.astype(np.int64))).logits[0].numpy()
    np.testing.assert_allclose(logits(model, hf.load(folder), ids), want, atol=1e-4)
    # What peft writes is read back, too.
    theirs.save_pretrained(str(folder.parent / 'again'))
    again = adapter_folders.load(folder.parent / 'again', model)
    jax.tree.map(np.testing.assert_array_equal, again, adapter_folders.load(folder, model))


@pytest.mark.parametrize('family', [*tiny.FAMILIES, 'with an encoder of images'])
def test_peft_computes_the_same_logits_with_every_family(family, tmp_path):
    peft = pytest.importorskip('peft')
    import torch
    import transformers

    if family == 'with an encoder of images':
        _, theirs = tiny.make_wrapped_model()
    else:
        theirs = tiny.make_torch_model(family)
    theirs.save_pretrained(str(tmp_path / 'base'))
    model = hf.read_config(tmp_path / 'base')
    params = hf.load(tmp_path / 'base', model)
    linears = LINEARS
    trained = adapters.init(params, linears, 3, 0, 'role')
    rng = np.random.default_rng(0)
    trained = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype('f'), trained)
    config = common.get_config()
    config.policy.adapters.update(rank=3, alpha=6.0)
    policies.write_adapter(config, tmp_path / 'base', model, trained, tmp_path / 'adapter')
    ids = np.arange(12, dtype=np.int32)[None]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path / 'base'), attn_implementation='eager'
    )
    theirs = peft.PeftModel.from_pretrained(theirs, str(tmp_path / 'adapter'))
    with torch.no_grad():
        want = theirs(torch.tensor(ids.astype(np.int64))).logits[0].numpy()
    ours = logits(model, hf.load(tmp_path / 'adapter'), ids)
    np.testing.assert_allclose(ours, want, atol=2e-4)
    assert np.abs(ours - logits(model, params, ids)).max() > 0.1
    adapted = [name for name, _ in theirs.named_modules() if name.endswith('lora_A')]
    assert len(adapted) == model.layers * len(linears)


def change_config(**fields):
    def spoil(folder):
        path = folder / CONFIG_FILE
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return spoil


def change_tensors(change):
    def spoil(folder):
        tensors = load_file(folder / WEIGHTS_FILE)
        change(tensors, sorted(tensors)[0])
        save_file(tensors, folder / WEIGHTS_FILE)

    return spoil


def cut(folder):
    path = folder / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-8])


FAULTS = [
    (change_config(use_dora=True), 'use_dora=True is not supported'),
    (change_config(peft_type='IA3'), "peft_type='IA3' is not supported"),
    (change_config(rank_pattern={'q': 1}), 'rank_pattern'),
    (change_config(alpha_pattern={'q': 1}), 'alpha_pattern'),
    (change_config(use_rslora=True), 'use_rslora=True is not supported'),
    (change_config(fan_in_fan_out=True), 'fan_in_fan_out=True is not supported'),
    (change_config(bias='all'), "bias='all' is not supported"),
    (change_config(lora_bias=True), 'lora_bias=True is not supported'),
    (change_config(modules_to_save=['lm_head']), 'modules_to_save'),
    (change_config(layers_to_transform=[0]), 'layers_to_transform'),
    (change_config(layer_replication=[[0, 1]]), 'layer_replication'),
    (change_config(target_parameters=['x']), 'target_parameters'),
    (change_config(init_lora_weights='pissa'), "init_lora_weights='pissa' is not supported"),
    (change_config(alora_invocation_tokens=[1]), 'alora_invocation_tokens=[1] is not supported'),
    (change_config(a_field_of_the_future=0.5), 'a_field_of_the_future=0.5 is not supported'),
    (change_config(r=3.7), 'r=3.7 is not a whole number above 0'),
    (change_config(r=-3), 'r=-3 is not a whole number above 0'),
    (change_config(lora_alpha=0), 'above 0; write the one of its training'),
    (change_config(use_dora=True), 'merge the adapter into its base with merge_and_unload of PEFT'),
    (
        change_tensors(
            lambda t, name: t.update({'base_model.model.model.embed_tokens.weight': t[name]})
        ),
        'save the adapter with save_embedding_layers=False',
    ),
    (
        change_tensors(lambda t, name: t.pop(name)),
        'or merge one of some layers alone into its base',
    ),
    (change_config(lora_alpha=float('nan')), 'lora_alpha=nan is not a finite number'),
    (change_config(target_modules={'q_proj': 1}), 'list the names of the modules'),
    (change_config(target_modules=['q_proj', 'embed_tokens']), "has 'embed_tokens'"),
    (change_config(r='three'), "r='three' is not a whole number"),
    (change_config(lora_alpha='three'), "lora_alpha='three' is not a finite number"),
    (change_config(r=4), 'must have shape (4,'),
    (change_config(base_model_name_or_path='/nowhere'), 'is no folder here'),
    (change_tensors(lambda t, name: t.pop(name)), 'is missing in a model of 2 layers'),
    (change_tensors(lambda t, name: t.update(extra=t[name])), 'tensor extra has no place'),
    (change_tensors(lambda t, name: t[name].fill(np.nan)), 'has numbers that are not finite'),
    (cut, 'copy it again'),
    (lambda folder: (folder / WEIGHTS_FILE).unlink(), 'has no adapter_model.safetensors'),
]


def test_the_built_in_base_is_found_where_the_clone_of_the_training_is_gone(folder, capsys):
    change_config(base_model_name_or_path='/gone/clone/zeroplay_jax/mini/base')(folder)
    for _ in range(2):
        assert adapter_config.base_folder(folder) == BUILT_IN_CHECKPOINT
    warning = capsys.readouterr().err
    assert (
        warning.startswith(f'warning: {folder}/adapter_config.json: ') and warning.count('\n') == 1
    )
    assert "'/gone/clone/zeroplay_jax/mini/base' is not there" in warning
    assert warning.endswith(f' to {BUILT_IN_CHECKPOINT}\n')


@pytest.mark.parametrize(
    'fields',
    [
        {'target_modules': r'model\.layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj'},
        {'exclude_modules': r'.*vision_tower.*', 'ensure_weight_tying': True},
        {'init_lora_weights': 'eva', 'eva_config': {'rho': 1.0}},
    ],
)
def test_fields_that_say_how_an_adapter_was_made_change_nothing(base, folder, fields):
    _, model, params = base
    change_config(**fields)(folder)
    assert adapter_config.read(folder) == AdapterConfig(**CONFIG, base=base[0])
    jax.tree.map(
        np.testing.assert_array_equal, adapter_folders.load(folder, model), adapter_of(params, 1)
    )


def test_older_names_of_a_decoder_beside_an_encoder_are_read(base, folder):
    _, model, params = base
    path = folder / WEIGHTS_FILE
    renamed = {}
    for name, array in load_file(path).items():
        renamed[name.replace('.model.layers.', '.language_model.model.layers.')] = array
    save_file(renamed, path)
    jax.tree.map(
        np.testing.assert_array_equal, adapter_folders.load(folder, model), adapter_of(params, 1)
    )


@pytest.mark.parametrize('spoil,text', FAULTS, ids=[text for _, text in FAULTS])
def test_a_folder_that_does_not_fit_is_one_line(folder, spoil, text):
    spoil(folder)
    with pytest.raises(UserError) as caught:
        hf.load(folder)
    assert text in str(caught.value) and '\n' not in str(caught.value)


def test_bfloat16_bases_keep_float32_norms(base):
    folder, model, params = base
    narrow = hf.load(folder, dataclasses.replace(model, dtype='bfloat16'), matrix_dtype='bfloat16')
    want = transformer.published(dataclasses.replace(model, dtype='bfloat16'), params)
    jax.tree.map(np.testing.assert_array_equal, narrow, want)
    assert narrow['final_norm']['scale'].dtype == np.float32


def test_an_adapter_of_a_run_is_asked_and_loaded_with_the_settings_of_the_run(tmp_path):
    config = AdapterConfig(**CONFIG, base=BUILT_IN_CHECKPOINT)
    model = hf.read_config(BUILT_IN_CHECKPOINT)
    trained = adapters.init(hf.load(BUILT_IN_CHECKPOINT), CONFIG['linears'], 3, 0, 'role')
    folder = tmp_path / 'run' / 'policy' / 'solver'
    folder.parent.mkdir(parents=True)
    adapter_folders.save(folder, model, config, trained)
    assert ask._policy_folder(str(folder)) == folder
    with pytest.raises(UserError, match=f'name a policy in it: {folder}'):
        ask._policy_folder(str(tmp_path / 'run'))
    # A folder without a run has the settings of the base's tokenizer.
    assert api._settings_of(folder).sampler.context == common.get_config().sampler.context
    run = common.get_config()
    run.sampler.context = 320
    (tmp_path / 'run' / 'config.json').write_text(run.to_json())
    assert api._settings_of(folder).sampler.context == 320
