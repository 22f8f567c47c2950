"""Adapters as PEFT folders: what is written is read back, `peft` computes the same logits, faults are one line."""

import dataclasses
import json

import numpy as np
import peft
import pytest
import tiny
import torch
import transformers
from run_records import write_record
from safetensors.numpy import load_file, save_file
from small_policies import adapter_of, equal

from zeroplay_jax import api, ask
from zeroplay_jax.configs import common
from zeroplay_jax.policy import adapter_config, adapters, hf, transformer
from zeroplay_jax.policy.adapter_config import CONFIG_FILE, WEIGHTS_FILE, AdapterConfig
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT
from zeroplay_jax.settings.schema import LINEARS
from zeroplay_jax.training import policies
from zeroplay_jax.types import UserError

CONFIG = dict(rank=3, alpha=6.0, linears=('down', 'q', 'v'))


@pytest.fixture(scope='module')
def base(published):
    model = hf.read_config(published)
    return published, model, hf.load(published, model)


def small_adapter(params):
    return adapter_of(params, CONFIG['linears'], 1)


@pytest.fixture
def folder(base, tmp_path):
    base_folder, model, params = base
    config = AdapterConfig(**CONFIG, base=base_folder)
    hf.save_adapter(tmp_path / 'adapter', model, config, small_adapter(params))
    return tmp_path / 'adapter'


def logits(model, params, ids):
    positions = np.arange(ids.shape[1], dtype=np.int32)[None]
    states = transformer.hidden(model, params, ids, positions, np.ones_like(ids))[0]
    return np.asarray(transformer.logits(model, params, states))


def test_a_folder_is_read_as_it_was_written(base, folder):
    _, model, params = base
    equal(hf.load_adapter(folder, model), small_adapter(params))
    assert adapter_config.read(folder) == AdapterConfig(**CONFIG, base=base[0])
    with pytest.raises(FileExistsError):
        hf.save_adapter(folder, model, adapter_config.read(folder), {})


@pytest.mark.parametrize('family', [*tiny.FAMILIES, 'with an encoder of images'])
def test_peft_computes_the_same_logits_with_every_family(family, tmp_path):
    base, out = tmp_path / 'base', tmp_path / 'adapter'
    if family == 'with an encoder of images':
        _, theirs = tiny.make_wrapped_model()
    else:
        theirs = tiny.make_torch_model(family)
    theirs.save_pretrained(str(base))
    model = hf.read_config(base)
    params = hf.load(base, model)
    trained = adapter_of(params)
    config = common.get_config()
    config.policy.adapters.update(rank=3, alpha=6.0)
    policies.write_adapter(config, base, model, trained, out)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        str(base), attn_implementation='eager'
    )
    theirs = peft.PeftModel.from_pretrained(theirs, str(out))
    ids = np.arange(12, dtype=np.int32)[None]
    with torch.no_grad():
        want = theirs(torch.tensor(ids.astype(np.int64))).logits[0].numpy()
    assert hf.read_config(out) == model
    ours = logits(model, hf.load(out), ids)
    np.testing.assert_allclose(ours, want, atol=2e-4)
    assert np.abs(ours - logits(model, params, ids)).max() > 0.1
    adapted = [name for name, _ in theirs.named_modules() if name.endswith('lora_A')]
    assert len(adapted) == model.layers * len(LINEARS)
    # What peft writes is read back, too.
    theirs.save_pretrained(str(tmp_path / 'again'))
    equal(hf.load_adapter(tmp_path / 'again', model), trained)


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


def with_embedding(tensors, name):
    tensors['base_model.model.model.embed_tokens.weight'] = tensors[name]


def without_one(tensors, name):
    del tensors[name]


def with_one_more(tensors, name):
    tensors['extra'] = tensors[name]


def with_nan(tensors, name):
    tensors[name].fill(np.nan)


# Fields that change what an adapter computes are in test_folders_of_others.py.
FAULTS = [
    (change_config(a_field_of_the_future=0.5), 'a_field_of_the_future=0.5 is not supported'),
    (change_config(r=3.7), 'r=3.7 is not a whole number above 0'),
    (change_config(r=-3), 'r=-3 is not a whole number above 0'),
    (change_config(r='three'), "r='three' is not a whole number"),
    (change_config(r=4), 'must have shape (4,'),
    (change_config(lora_alpha=0), 'above 0; write the one of its training'),
    (change_config(lora_alpha=float('nan')), 'lora_alpha=nan is not a finite number'),
    (change_config(lora_alpha='three'), "lora_alpha='three' is not a finite number"),
    (change_config(use_dora=True), 'merge the adapter into its base with merge_and_unload of PEFT'),
    (change_config(target_modules={'q_proj': 1}), 'list the names of the modules'),
    (change_config(target_modules=['q_proj', 'embed_tokens']), "has 'embed_tokens'"),
    (change_config(base_model_name_or_path='/nowhere'), 'is no folder here'),
    (change_tensors(with_embedding), 'save the adapter with save_embedding_layers=False'),
    (change_tensors(without_one), 'or merge one of some layers alone into its base'),
    (change_tensors(without_one), 'is missing in a model of 2 layers'),
    (change_tensors(with_one_more), 'tensor extra has no place'),
    (change_tensors(with_nan), 'has numbers that are not finite'),
    (cut, 'copy it again'),
    (lambda folder: (folder / WEIGHTS_FILE).unlink(), 'has no adapter_model.safetensors'),
]


def test_the_built_in_base_is_found_where_the_clone_of_the_training_is_gone(folder, capsys):
    change_config(base_model_name_or_path='/gone/clone/zeroplay_jax/mini/base')(folder)
    for _ in range(2):
        assert adapter_config.base_folder(folder) == BUILT_IN_CHECKPOINT
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(f'warning: {folder}/adapter_config.json: ')
    assert "'/gone/clone/zeroplay_jax/mini/base' is not there" in warning
    assert warning.endswith(f' to {BUILT_IN_CHECKPOINT}')


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
    equal(hf.load_adapter(folder, model), small_adapter(params))


def test_older_names_of_a_decoder_beside_an_encoder_are_read(base, folder):
    _, model, params = base
    path = folder / WEIGHTS_FILE
    renamed = {}
    for name, array in load_file(path).items():
        renamed[name.replace('.model.layers.', '.language_model.model.layers.')] = array
    save_file(renamed, path)
    equal(hf.load_adapter(folder, model), small_adapter(params))


@pytest.mark.parametrize('spoil,text', FAULTS, ids=[text for _, text in FAULTS])
def test_a_folder_that_does_not_fit_is_one_line(folder, spoil, text):
    spoil(folder)
    with pytest.raises(UserError) as caught:
        hf.load(folder)
    assert text in str(caught.value) and '\n' not in str(caught.value)


def test_bfloat16_bases_keep_float32_norms(base):
    folder, model, params = base
    model = dataclasses.replace(model, dtype='bfloat16')
    narrow = hf.load(folder, model, matrix_dtype='bfloat16')
    equal(narrow, transformer.published(model, params))
    assert narrow['final_norm']['scale'].dtype == np.float32


def test_an_adapter_of_a_run_is_asked_and_loaded_with_the_settings_of_the_run(tmp_path):
    config = AdapterConfig(**CONFIG, base=BUILT_IN_CHECKPOINT)
    model = hf.read_config(BUILT_IN_CHECKPOINT)
    trained = adapters.init(hf.load(BUILT_IN_CHECKPOINT), CONFIG['linears'], 3, 0, 'role')
    folder = tmp_path / 'run' / 'policy' / 'solver'
    folder.parent.mkdir(parents=True)
    hf.save_adapter(folder, model, config, trained)
    assert ask._policy_folder(str(folder)) == folder
    with pytest.raises(UserError, match=f'name a policy in it: {folder}'):
        ask._policy_folder(str(tmp_path / 'run'))
    # A folder without a run has the settings of the base's tokenizer.
    assert api._settings_of(folder).sampler.context == common.get_config().sampler.context
    run = common.get_config()
    run.sampler.context = 320
    write_record(tmp_path / 'run', run)
    assert api._settings_of(folder).sampler.context == 320
