"""Tokenizers that cannot be used, that lack tokens or match in other ways; adapters with a tokenizer of their own."""

import json
import random
import shutil

import pytest
import tiny
import tokenizers
import transformers
from hard_texts import check_prompts, hard_text
from refused_calls import refused, row

from zeroplay_jax.configs import drzero
from zeroplay_jax.policy import adapter_config
from zeroplay_jax.rollout.call_syntax import syntax_of
from zeroplay_jax.rollout.tokens import open_codec
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.selfplay.role_environment import role_environment
from zeroplay_jax.tools.search import SearchTool
from zeroplay_jax.types import UserError


@pytest.fixture
def edited(folder, tmp_path):
    """Returns a function: changes of a copy of the folder → the copy."""

    def make(*changes):
        copy = shutil.copytree(folder, tmp_path / 'policy', dirs_exist_ok=True)
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
REFUSED = [
    row(
        'third-2',
        'tokens added to the tokenizer, embedding not resized',
        added('<plan>'),
        "token '<plan>' has id 272.*resize",
    ),
    row(
        'third-2',
        'config.json of another model: fewer ids than the vocabulary',
        fields('config.json', vocab_size=200),
        'has id 200, and the model has the ids 0 to 199',
    ),
    row(
        'new-sizes',
        'vocab_size of 4·10^8',
        fields('config.json', vocab_size=4 * 10**8),
        'vocab_size=400000000',
    ),
    *[
        row('new-tokenizers', 'normalisers that expand a text, tokens of single words', *values)
        for values in [
            (specification(single_word), r"'<\|im_start\|>' has single_word=true"),
            (specification(growing), 'its normaliser replaces or adds text'),
            (specification(prepending), 'its normaliser replaces or adds text'),
        ]
    ],
    row(
        'kin-files',
        'a folder with vocab.json and merges.txt alone',
        without_tokenizer,
        'has no tokenizer.json; write it with',
    ),
    row(
        'kin-tokenizers',
        'BPE that drops merges at random',
        specification(lambda content: content['model'].update(dropout=0.5)),
        'BPE has dropout.*set "dropout" to null',
    ),
    *[
        (fields('tokenizer.json', normalizer={'type': kind}), f'tokenizer reads {change}')
        for kind, change in [
            ('Lowercase', '"I\'LL say .*" as "i\'ll say .*"'),
            ('NFKC', ".* as '§12.5% “so...” "),
            ('StripAccents', '.*choose a checkpoint whose'),
        ]
    ],
    *[
        row(
            'kin-tokenizers',
            'settings of tokenizer_config.json that change ids',
            fields(SETTINGS, **{name: True}),
            f'{name}=true changes the ids',
        )
        for name in ('add_prefix_space', 'split_special_tokens')
    ],
    *[
        row(
            'kin-tokenizer',
            'a tokenizer that is not byte-level',
            of_model(name),
            f'policy.*{name.split()[0]} tokenizer is not byte-level',
        )
        for name in OTHER_MODELS
    ],
    *[
        row(
            'new-templates',
            'a damaged file beside the tokenizer is named itself',
            written(name, content),
            f'policy/{name}: ',
        )
        for name, content in [
            ('generation_config.json', '{"eos'),
            ('generation_config.json', '[1]'),
            ('chat_template.jinja', '{% for'),
            ('config.json', '{'),
        ]
    ],
    *[
        (written('tokenizer.json', content), 'its tokenizer cannot be used .*copy the folder')
        for content in ('{', '{"model": 3}', '[' * 100_000)
    ],
]


@pytest.mark.parametrize(('change', 'message'), REFUSED)
def test_a_tokenizer_that_cannot_be_used_is_refused(edited, change, message):
    folder = edited(change)
    with pytest.raises(UserError, match=message) as refusal:
        open_codec(folder)
    assert '\n' not in str(refusal.value)


def test_settings_that_change_no_ids_are_accepted(edited):
    open_codec(edited(fields(SETTINGS, add_prefix_space=False, split_special_tokens=False)))


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
@pytest.mark.parametrize(
    'flags', [{'lstrip': True}, {'rstrip': True}, {'lstrip': True, 'rstrip': True}]
)
def test_white_space_around_added_tokens_is_taken_as_they_say(edited, flags):
    def change(content):
        for token in content['added_tokens']:
            token.update(flags)

    folder = edited(specification(change))
    codec = open_codec(folder)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    check_prompts(codec, reference, random.Random(0), count=100)


# ---- cut texts ---------------------------------------------------------------------------------------


@pytest.mark.fault('third-22', 'an observation cut inside a character')
@pytest.mark.parametrize('name', ['search_r1', 'qwen', 'olmo'])
def test_a_text_is_cut_between_characters(codec, name):
    syntax = syntax_of(name)
    text = 'a😀é你' * 20
    shown = set()
    for limit in range(70, 90):
        observation = codec.decode(syntax.wrap(codec, text, limit))
        assert '\ufffd' not in observation
        shown.add(observation.count('😀'))
    assert len(shown) > 1


# ---- adapters ----------------------------------------------------------------------------------------


@pytest.fixture
def adapter(folder, tmp_path):
    path = tmp_path / 'adapter'
    path.mkdir()
    content = adapter_config.AdapterConfig(4, 8.0, ('q',), folder).fields()
    (path / 'adapter_config.json').write_text(json.dumps(content))
    return path


def copied(source, target, *names):
    for name in names:
        shutil.copy(source / name, target)


@pytest.mark.fault('third-12', 'an adapter with the tokenizer and template of its base')
def test_equal_files_beside_an_adapter_are_the_same(folder, adapter):
    copied(folder, adapter, 'tokenizer.json', SETTINGS, 'chat_template.jinja')
    # As it was saved after a training with padding.
    truncation = dict(direction='Right', max_length=8, strategy='LongestFirst', stride=0)
    fields('tokenizer.json', truncation=truncation)(adapter)
    assert open_codec(adapter).folder == folder


def with_token(adapter, folder):
    copied(folder, adapter, 'tokenizer.json', SETTINGS)
    added('<plan>')(adapter)


def with_rules(adapter, folder):
    copied(folder, adapter, 'tokenizer.json')
    fields('tokenizer.json', normalizer={'type': 'Lowercase'})(adapter)


def with_template(adapter, folder):
    written('chat_template.jinja', tiny.TEMPLATE + ' ')(adapter)


def with_template_in_config(adapter, folder):
    named = [{'name': 'default', 'template': 'x'}, {'name': 'tool_use', 'template': tiny.TEMPLATE}]
    written(SETTINGS, json.dumps({'chat_template': named}))(adapter)


def damaged(adapter, folder):
    written('adapter_config.json', '{')(adapter)


OTHER = 'an adapter with another tokenizer or template than its base'


@pytest.mark.parametrize(
    ('change', 'difference'),
    [
        row('third-12', OTHER, with_token, 'another tokenizer than its base.*merge'),
        row('third-12', OTHER, with_rules, 'another tokenizer than its base.*merge'),
        row('third-12', OTHER, with_template, 'another chat template.*merge'),
        row('third-12', OTHER, with_template_in_config, 'another chat template.*merge'),
        row(
            'new-templates',
            'messages that name the wrong file: adapter_config.json',
            damaged,
            'adapter_config.json: cannot be read',
        ),
    ],
)
def test_other_files_beside_an_adapter_are_refused(folder, adapter, change, difference):
    change(adapter, folder)
    with pytest.raises(UserError, match=difference):
        open_codec(adapter)


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


@pytest.mark.fault('new-class', 'rules of another class that give the same ids; Olmo 3')
@pytest.mark.parametrize('model_type', ['llama', 'olmo3'])
def test_other_rules_with_the_same_ids_are_accepted(edited, model_type):
    def split_digits(content):
        # As SmolLM2, whose vocabulary has no token of two digits.
        by_digit = {'type': 'Digits', 'individual_digits': True}
        steps = [by_digit, content['pre_tokenizer']]
        content['pre_tokenizer'] = {'type': 'Sequence', 'pretokenizers': steps}
        if model_type == 'olmo3':
            content['normalizer'] = {'type': 'NFC'}

    folder = edited(specification(split_digits), *with_class(model_type, 'GPT2Tokenizer'))
    codec, reference = open_codec(folder), transformers.AutoTokenizer.from_pretrained(str(folder))
    for text in TEXTS:
        assert codec.encode_plain(text) == ids_of(reference, text)
    assert not codec.notes


CLASSES = [
    'Qwen2Tokenizer',
    'GPT2TokenizerFast',
    'CohereTokenizer',
    'PreTrainedTokenizerFast',
    None,
]


@pytest.mark.fault('new-class', 'tokenizer.json beside the class of another tokenizer')
@pytest.mark.parametrize('tokenizer_class', CLASSES)
@pytest.mark.parametrize('model_type', ['qwen2', 'qwen3'])
@pytest.mark.parametrize('normalizer', [None, {'type': 'NFC'}], ids=['plain', 'nfc'])
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
