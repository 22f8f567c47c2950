"""Tokenizers that cannot be used, that lack tokens or match in other ways; adapters with a tokenizer of their own."""

import json
import pathlib
import random
import shutil

import pytest
import tiny
import tokenizers
import transformers
from hard_texts import check_prompts, hard_text
from refused_calls import check_table, refused

from zeroplay_jax.configs import drzero
from zeroplay_jax.policy import adapter_config
from zeroplay_jax.rollout.tokens import open_codec
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.selfplay.role_environment import role_environment
from zeroplay_jax.tools.search import SearchTool


@pytest.fixture
def edited(folder, tmp_path):
    """Returns a function: changes of a copy of the folder → the copy."""

    def make(*changes):
        shutil.rmtree(tmp_path / 'policy', ignore_errors=True)
        copy = shutil.copytree(folder, tmp_path / 'policy')
        for change in changes:
            change(copy)
        return copy

    return make


def specification(change):
    """Changes the content of tokenizer.json."""

    def edit(folder):
        path = folder / 'tokenizer.json'
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return edit


def fields(name, **values):
    """Sets fields of a JSON file; None removes one."""

    def edit(folder):
        content = json.loads((folder / name).read_text()) | values
        kept = {field: value for field, value in content.items() if value is not None}
        (folder / name).write_text(json.dumps(kept))

    return edit


def written(name, content):
    return lambda folder: (folder / name).write_text(content)


def added(*tokens, special=False):
    def edit(folder):
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
        entries = [tokenizers.AddedToken(t, special=special, normalized=False) for t in tokens]
        tokenizer.add_tokens(entries, special_tokens=special)
        tokenizer.save_pretrained(str(folder))

    return edit


LETTERS = {letter: number for number, letter in enumerate('<>|_/abcdefghijklmnopqrstuvwxyz')}
OTHER_MODELS = {
    'Unigram': tokenizers.models.Unigram([('<unk>', 0.0), ('a', -1.0)], unk_id=0),
    'BPE of characters': tokenizers.models.BPE(LETTERS, []),
    'BPE with ends of words': tokenizers.models.BPE(LETTERS, [], end_of_word_suffix='</w>'),
    'WordPiece': tokenizers.models.WordPiece(LETTERS | {'[UNK]': 99}),
    'WordLevel': tokenizers.models.WordLevel(LETTERS, unk_token='[UNK]'),
}


def of_model(name):
    def edit(folder):
        tokenizer = tokenizers.Tokenizer(OTHER_MODELS[name])
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.save(str(folder / 'tokenizer.json'))

    return edit


def single_word(content):
    content['added_tokens'][1]['single_word'] = True


def growing(content):
    step = {'type': 'Replace', 'pattern': {'String': 'a'}, 'content': 'a' * 10}
    content['normalizer'] = {'type': 'Sequence', 'normalizers': [step] * 6}


def prepending(content):
    content['normalizer'] = {'type': 'Prepend', 'prepend': 'x' * 1000}


def without_tokenizer(folder):
    content = json.loads((folder / 'tokenizer.json').read_text())
    (folder / 'vocab.json').write_text(json.dumps(content['model']['vocab']))
    (folder / 'merges.txt').write_text('a b\n')
    (folder / 'tokenizer.json').unlink()


SETTINGS = 'tokenizer_config.json'


@pytest.fixture
def adapter(edited, tmp_path):
    """Returns a function: changes of a folder of an adapter → that folder; its base is a copy of the folder."""
    base = edited()

    def make(*changes):
        path = tmp_path / 'adapter'
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        content = adapter_config.AdapterConfig(4, 8.0, ('q',), base).fields()
        (path / 'adapter_config.json').write_text(json.dumps(content))
        for change in changes:
            change(path)
        return path

    return make


def test_tokenizers_that_cannot_be_used_are_refused_as_the_table_says(
    folder, edited, adapter, tmp_path
):
    def copied(*names):
        return lambda target: [shutil.copy(folder / name, target) for name in names]

    def opened(*changes):
        return open_codec(edited(*changes))

    def beside_adapter(*changes):
        edited()
        return open_codec(adapter(*changes))

    calls = dict(opened=opened, beside_adapter=beside_adapter, copied=copied, tiny=tiny)
    table = pathlib.Path(__file__).with_name('wrong_tokenizers.txt')
    check_table(table, globals() | calls, tmp_path)


@pytest.mark.fault(
    'third-2', 'special tokens beyond the embedding: refused where a prompt has them'
)
def test_special_tokens_that_the_model_lacks_are_refused_where_they_are_used(edited):
    # As Gemma's placeholder of images, or a token for padding.
    codec = open_codec(edited(added('[PAD]', special=True)))
    assert len(codec.token_bytes) == 272
    config, role = drzero.get_config('mini'), RoleSpec('solver', 'solver')
    tools = {'search': SearchTool(search=None)}
    role_environment(config, role, codec, tools)
    added('<think>', special=True)(codec.folder)
    line = refused(role_environment, config, role, open_codec(codec.folder), tools)
    assert "token '<think>' has id 273" in line and 'resize' in line


@pytest.mark.fault('kin-flags', 'added tokens with lstrip and rstrip')
@pytest.mark.parametrize('flags', [{'lstrip': True}, {'lstrip': True, 'rstrip': True}])
def test_white_space_around_added_tokens_is_taken_as_they_say(edited, flags):
    def change(content):
        for token in content['added_tokens']:
            token.update(flags)

    folder = edited(specification(change))
    codec = open_codec(folder)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    check_prompts(codec, reference, random.Random(0), count=100)


# ---- classes of other models -------------------------------------------------------------------------


def with_class(model_type, tokenizer_class):
    architecture = dict(qwen2='Qwen2', qwen3='Qwen3', llama='Llama', olmo3='Olmo3')[model_type]
    architectures = [f'{architecture}ForCausalLM']
    # That of OLMo-3, which is not read with another one at the top level.
    family = dict(model_type=model_type, architectures=architectures, rope_theta=500000.0)
    config = fields('config.json', **family)
    return config, fields(SETTINGS, tokenizer_class=tokenizer_class)


def ids_of(reference, text):
    return reference(text, add_special_tokens=False)['input_ids']


TEXTS = ['1234567 a1b2', "WE'LL say it's", 'e\u0301']


@pytest.mark.fault('new-class', 'tokenizer.json beside the class of another tokenizer')
@pytest.mark.parametrize(
    'tokenizer_class', ['Qwen2Tokenizer', 'CohereTokenizer', 'PreTrainedTokenizerFast', None]
)
@pytest.mark.parametrize('model_type,normalizer', [('qwen2', {'type': 'NFC'}), ('qwen3', None)])
def test_ids_are_those_of_auto_tokenizer_or_the_difference_is_said(
    edited, tokenizer_class, model_type, normalizer
):
    rules = specification(lambda content: content.update(normalizer=normalizer))
    folder = edited(rules, *with_class(model_type, tokenizer_class))
    reference = transformers.AutoTokenizer.from_pretrained(str(folder))
    codec = open_codec(folder)
    if codec.notes:
        assert 'here tokenizer.json holds' in codec.notes[0]
        reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    rng = random.Random(0)
    for text in [*TEXTS, *(hard_text(rng) for _ in range(50))]:
        expected = ids_of(reference, text)
        assert codec.encode_plain(text) == expected or any(token in text for token in codec._added)
