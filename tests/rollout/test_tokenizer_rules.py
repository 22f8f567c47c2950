"""Tokenizers whose tokens the model lacks or that match in other ways; adapters with a tokenizer of their own."""

import json
import random
import shutil

import pytest
import tiny
import tokenizers
import transformers
from hard_texts import hard_text

from zeroplay_jax.configs import drzero
from zeroplay_jax.policy import adapter_config
from zeroplay_jax.rollout.call_syntax import syntax_of
from zeroplay_jax.rollout.foreign_text import Untrusted
from zeroplay_jax.rollout.tokens import open_codec
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.selfplay.role_environment import role_environment
from zeroplay_jax.tools.search import SearchTool
from zeroplay_jax.types import UserError


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
    return tiny.make_folder(tmp_path_factory.mktemp('rules') / 'policy')


@pytest.fixture
def edited(plain, tmp_path):
    """Returns a function: a function that changes the content of tokenizer.json → folder with it."""

    def make(change):
        folder = shutil.copytree(plain, tmp_path / 'policy', dirs_exist_ok=True)
        path = folder / 'tokenizer.json'
        specification = json.loads(path.read_text())
        change(specification)
        path.write_text(json.dumps(specification))
        return folder

    return make


def add(folder, *tokens, special=False, **flags):
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    added = [tokenizers.AddedToken(t, special=special, normalized=False, **flags) for t in tokens]
    tokenizer.add_tokens(added, special_tokens=special)
    tokenizer.save_pretrained(str(folder))


def size(folder, count):
    fields = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps(fields | {'vocab_size': count}))


@pytest.mark.fault('third-2', 'tokens added to the tokenizer, embedding not resized')
def test_tokens_that_the_model_lacks_are_refused(edited, user_reads):
    folder = edited(lambda specification: None)
    add(folder, '<plan>')
    with pytest.raises(UserError, match="token '<plan>' has id 272.*resize") as refusal:
        open_codec(folder)
    user_reads(refusal.value)


@pytest.mark.fault(
    'third-2', 'special tokens beyond the embedding: refused where a prompt has them'
)
def test_special_tokens_that_the_model_lacks_are_refused_where_they_are_used(edited, user_reads):
    folder = edited(lambda specification: None)
    # As Gemma's placeholder of images, or a token for padding.
    add(folder, '[PAD]', special=True)
    codec = open_codec(folder)
    assert len(codec.token_bytes) == 272
    role, tools = RoleSpec('solver', 'solver'), {'search': SearchTool(search=None)}
    role_environment(drzero.get_config('mini'), role, codec, tools)
    add(folder, '<think>', special=True)
    with pytest.raises(UserError, match="token '<think>' has id 273.*resize") as refusal:
        role_environment(drzero.get_config('mini'), role, open_codec(folder), tools)
    user_reads(refusal.value)


@pytest.mark.fault('third-2', 'config.json of another model: fewer ids than the vocabulary')
def test_a_vocabulary_larger_than_the_model_is_refused(edited, user_reads):
    folder = edited(lambda specification: None)
    size(folder, 200)
    with pytest.raises(
        UserError, match='has id 200, and the model has the ids 0 to 199'
    ) as refusal:
        open_codec(folder)
    user_reads(refusal.value)


@pytest.mark.fault('new-sizes', 'vocab_size of 4·10^8')
def test_a_vocabulary_without_end_is_refused(edited, user_reads):
    folder = edited(lambda specification: None)
    size(folder, 4 * 10**8)
    with pytest.raises(UserError, match='vocab_size=400000000') as refusal:
        open_codec(folder)
    user_reads(refusal.value)


@pytest.mark.fault('kin-flags', 'added tokens with lstrip and rstrip')
@pytest.mark.parametrize(
    'flags', [{'lstrip': True}, {'rstrip': True}, {'lstrip': True, 'rstrip': True}]
)
def test_white_space_around_added_tokens_is_taken_as_they_say(edited, user_reads, flags):
    def change(specification):
        for token in specification['added_tokens']:
            token.update(flags)

    folder = edited(change)
    codec = open_codec(folder)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    rng = random.Random(0)
    for _ in range(100):
        question = hard_text(rng)
        chat = [{'role': 'user', 'content': question}]
        want = reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        chat = [{'role': 'user', 'content': [Untrusted(question)]}]
        assert codec.render(chat).tolist() == list(want), question
    user_reads('right: 100 questions have the ids of apply_chat_template')


def single_word(specification):
    specification['added_tokens'][1]['single_word'] = True


def growing(specification):
    step = {'type': 'Replace', 'pattern': {'String': 'a'}, 'content': 'a' * 10}
    specification['normalizer'] = {'type': 'Sequence', 'normalizers': [step] * 6}


def prepending(specification):
    specification['normalizer'] = {'type': 'Prepend', 'prepend': 'x' * 1000}


@pytest.mark.fault('new-tokenizers', 'normalisers that expand a text, tokens of single words')
@pytest.mark.parametrize(
    ('change', 'reason'),
    [
        (single_word, r"'<\|im_start\|>' has single_word=true"),
        (growing, 'makes up to 1,000,000 characters of one'),
        (prepending, 'makes up to 1,001 characters of one'),
    ],
)
def test_other_tokenizers_are_refused(edited, user_reads, change, reason):
    with pytest.raises(UserError, match=reason) as refusal:
        open_codec(edited(change))
    user_reads(refusal.value)


@pytest.mark.fault('kin-files', 'a folder with vocab.json and merges.txt alone')
def test_a_missing_tokenizer_is_named(edited, user_reads):
    folder = edited(lambda specification: None)
    specification = json.loads((folder / 'tokenizer.json').read_text())
    (folder / 'vocab.json').write_text(json.dumps(specification['model']['vocab']))
    (folder / 'merges.txt').write_text('a b\n')
    (folder / 'tokenizer.json').unlink()
    with pytest.raises(UserError, match='has no tokenizer.json; write it with') as refusal:
        open_codec(folder)
    user_reads(refusal.value)


# ---- cut texts ---------------------------------------------------------------------------------------


@pytest.mark.fault('third-22', 'an observation cut inside a character')
@pytest.mark.parametrize('name', ['search_r1', 'qwen', 'olmo'])
def test_a_text_is_cut_between_characters(plain, user_reads, name):
    codec, syntax = open_codec(plain), syntax_of(name)
    text = 'a😀é你' * 20
    shown = set()
    for limit in range(70, 90):
        observation = codec.decode(syntax.wrap(codec, text, limit))
        assert '\ufffd' not in observation
        shown.add(observation.count('😀'))
    assert len(shown) > 1
    user_reads('right: no observation has half a character')


# ---- adapters ----------------------------------------------------------------------------------------


@pytest.fixture
def adapter(plain, tmp_path):
    folder = tmp_path / 'adapter'
    folder.mkdir()
    fields = adapter_config.AdapterConfig(4, 8.0, ('q',), plain).fields()
    (folder / 'adapter_config.json').write_text(json.dumps(fields))
    return folder


@pytest.mark.fault('third-12', 'an adapter with the tokenizer and template of its base')
def test_equal_files_beside_an_adapter_are_the_same(plain, adapter, user_reads):
    for name in ('tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja'):
        shutil.copy(plain / name, adapter)
    # As it was saved after a training with padding.
    path = adapter / 'tokenizer.json'
    specification = json.loads(path.read_text())
    specification['truncation'] = dict(
        direction='Right', max_length=8, strategy='LongestFirst', stride=0
    )
    path.write_text(json.dumps(specification))
    assert open_codec(adapter).folder == plain
    user_reads('right: the tokenizer of the base')


def with_token(folder, plain):
    for name in ('tokenizer.json', 'tokenizer_config.json'):
        shutil.copy(plain / name, folder)
    add(folder, '<plan>')


def with_rules(folder, plain):
    specification = json.loads((plain / 'tokenizer.json').read_text())
    specification['normalizer'] = {'type': 'Lowercase'}
    (folder / 'tokenizer.json').write_text(json.dumps(specification))


def with_template(folder, plain):
    (folder / 'chat_template.jinja').write_text(tiny.TEMPLATE + ' ')


def with_template_in_config(folder, plain):
    named = [{'name': 'default', 'template': 'x'}, {'name': 'tool_use', 'template': tiny.TEMPLATE}]
    (folder / 'tokenizer_config.json').write_text(json.dumps({'chat_template': named}))


@pytest.mark.fault('third-12', 'an adapter with another tokenizer or template than its base')
@pytest.mark.parametrize(
    ('change', 'difference'),
    [
        (with_token, r"another tokenizer \(token '<plan>' with id 272\)"),
        (with_rules, r'another tokenizer \(other rules'),
        (with_template, 'another chat template'),
        (with_template_in_config, 'another chat template'),
    ],
)
def test_other_files_beside_an_adapter_are_refused(plain, adapter, user_reads, change, difference):
    change(adapter, plain)
    with pytest.raises(UserError, match=difference + '.*merge') as refusal:
        open_codec(adapter)
    user_reads(refusal.value)


@pytest.mark.fault('new-templates', 'messages that name the wrong file: adapter_config.json')
def test_a_damaged_adapter_is_not_called_a_tokenizer(adapter, user_reads):
    (adapter / 'adapter_config.json').write_text('{')
    with pytest.raises(UserError, match='adapter_config.json: cannot be read') as refusal:
        open_codec(adapter)
    user_reads(refusal.value)


@pytest.mark.fault('kin-tokenizers', 'BPE that drops merges at random')
def test_dropout_is_refused(edited, user_reads):
    folder = edited(lambda specification: specification['model'].update(dropout=0.5))
    with pytest.raises(UserError, match='BPE has dropout.*set "dropout" to null') as refusal:
        open_codec(folder)
    user_reads(refusal.value)


@pytest.mark.parametrize('name', ['add_prefix_space', 'split_special_tokens'])
@pytest.mark.fault('kin-tokenizers', 'settings of tokenizer_config.json that change ids')
def test_settings_that_change_ids_are_refused(edited, user_reads, name):
    folder = edited(lambda specification: None)
    path = folder / 'tokenizer_config.json'
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {name: False}))
    open_codec(folder)
    path.write_text(json.dumps(fields | {name: True}))
    with pytest.raises(UserError, match=f'{name}=true changes the ids') as refusal:
        open_codec(folder)
    user_reads(refusal.value)


@pytest.mark.fault('new-class', 'rules of another class that give the same ids; Olmo 3')
@pytest.mark.parametrize(
    ('model_type', 'architecture'), [('llama', 'LlamaForCausalLM'), ('olmo3', 'Olmo3ForCausalLM')]
)
def test_other_rules_with_the_same_ids_are_accepted(edited, user_reads, model_type, architecture):
    def split_digits(specification):
        # As SmolLM2, whose vocabulary has no token of two digits.
        by_digit = {'type': 'Digits', 'individual_digits': True}
        steps = [by_digit, specification['pre_tokenizer']]
        specification['pre_tokenizer'] = {'type': 'Sequence', 'pretokenizers': steps}
        if model_type == 'olmo3':
            specification['normalizer'] = {'type': 'NFC'}

    folder = edited(split_digits)
    for file, fields in (
        ('config.json', {'model_type': model_type, 'architectures': [architecture]}),
        ('tokenizer_config.json', {'tokenizer_class': 'GPT2Tokenizer'}),
    ):
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | fields))
    codec, reference = open_codec(folder), transformers.AutoTokenizer.from_pretrained(str(folder))
    for text in ('1234567 a1b2', "WE'LL say it's", 'e\u0301'):
        assert codec.encode_plain(text) == reference(text, add_special_tokens=False)['input_ids']
    assert not codec.notes
    user_reads('right: the ids of AutoTokenizer')


CLASSES = ['Qwen2Tokenizer', 'GPT2TokenizerFast', 'CohereTokenizer', 'PreTrainedTokenizerFast', '']


@pytest.mark.fault('new-class', 'tokenizer.json beside the class of another tokenizer')
@pytest.mark.parametrize('tokenizer_class', CLASSES)
@pytest.mark.parametrize('model_type', ['qwen2', 'qwen3'])
@pytest.mark.parametrize('normalizer', [None, {'type': 'NFC'}], ids=['plain', 'nfc'])
def test_ids_are_those_of_auto_tokenizer_or_the_difference_is_said(
    edited, user_reads, tokenizer_class, model_type, normalizer
):
    folder = edited(lambda specification: specification.update(normalizer=normalizer))
    config = json.loads((folder / 'config.json').read_text())
    names = {'qwen2': 'Qwen2ForCausalLM', 'qwen3': 'Qwen3ForCausalLM'}
    config |= {'model_type': model_type, 'architectures': [names[model_type]]}
    (folder / 'config.json').write_text(json.dumps(config))
    settings = json.loads((folder / 'tokenizer_config.json').read_text())
    settings.pop('tokenizer_class')
    if tokenizer_class:
        settings['tokenizer_class'] = tokenizer_class
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings))

    reference = transformers.AutoTokenizer.from_pretrained(str(folder))
    rng = random.Random(0)
    texts = ['1234567 a1b2', "WE'LL say it's", 'e\u0301', *(hard_text(rng) for _ in range(50))]
    try:
        codec = open_codec(folder)
    except UserError as refusal:
        assert 'set "tokenizer_class" to "PreTrainedTokenizerFast"' in str(refusal)
        user_reads(refusal)
        return
    if codec.notes:
        assert 'here tokenizer.json holds' in codec.notes[0]
        user_reads('said: ' + codec.notes[0])
        reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    for text in texts:
        expected = reference(text, add_special_tokens=False)['input_ids']
        assert codec.encode_plain(text) == expected or any(token in text for token in codec._added)
    user_reads('right: 53 texts have the ids of the tokenizer')
