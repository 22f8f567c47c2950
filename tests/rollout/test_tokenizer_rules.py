"""Tokenizers that cannot be used, that lack tokens or match in other ways; adapters with a tokenizer of their own."""

import json
import pathlib
import random
import shutil

import pytest
import tiny
import tokenizers
import transformers
from hard_texts import check_prompts
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
    """Sets fields of a JSON file."""

    def edit(folder):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | values))

    return edit


def written(name, content):
    return lambda folder: (folder / name).write_text(content)


def without(name):
    return lambda folder: (folder / name).unlink()


def added(token, special=False):
    def edit(folder):
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
        entry = tokenizers.AddedToken(token, special=special, normalized=False)
        tokenizer.add_tokens([entry], special_tokens=special)
        tokenizer.save_pretrained(str(folder))

    return edit


def of_words(folder):
    words = tokenizers.models.WordLevel({'a': 0, '[UNK]': 1}, unk_token='[UNK]')
    tokenizers.Tokenizer(words).save(str(folder / 'tokenizer.json'))


SETTINGS = 'tokenizer_config.json'


def test_tokenizers_that_cannot_be_used_are_refused_as_the_table_says(folder, edited, tmp_path):
    def copied(*names):
        return lambda target: [shutil.copy(folder / name, target) for name in names]

    def opened(*changes):
        return open_codec(edited(*changes))

    def beside_adapter(*changes):
        path = tmp_path / 'adapter'
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        content = adapter_config.AdapterConfig(4, 8.0, ('q',), edited()).fields()
        written('adapter_config.json', json.dumps(content))(path)
        for change in changes:
            change(path)
        return open_codec(path)

    calls = dict(opened=opened, beside_adapter=beside_adapter, copied=copied, tiny=tiny)
    table = pathlib.Path(__file__).with_name('wrong_tokenizers.txt')
    check_table(table, globals() | calls, tmp_path)


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


def test_white_space_around_added_tokens_is_taken_as_they_say(edited):
    def change(content):
        for number, token in enumerate(content['added_tokens']):
            token.update(lstrip=True, rstrip=number % 2 == 0)

    folder = edited(specification(change))
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    check_prompts(open_codec(folder), reference, random.Random(0), count=100)
