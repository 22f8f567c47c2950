import pytest
import transformers

from tools.checkpoints import tokenizer as tokenizer_lib
from zeroplay_jax.mini import world

pytestmark = pytest.mark.results


@pytest.fixture(scope='module')
def tokenizer():
    return tokenizer_lib.train(['Question: {question}'])


def test_any_text_round_trips(tokenizer):
    for text in (
        'Gumu was born in Lomi.',
        ' ofnon',
        'Ünïcödé 東京 🙂\n\tx  y',
        '',
        '12 (34)',
        'don’t',
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_names_are_spelt_the_same_everywhere_and_short(tokenizer):
    lengths = []
    for title in world.World(0, 'evaluation').titles:
        name = tokenizer.encode(f' {title}').ids
        lengths.append(len(name))
        for before, after in (
            ('<search>', '</search>'),
            ('of', '?'),
            ('(Title:', ')'),
            ('in', '.'),
        ):
            ids = tokenizer.encode(f'{before} {title}{after}').ids
            assert ids[-len(name) - 1 : -1] == name or ids[-len(name) :] == name
    assert set(lengths) == {2}


def test_added_tokens(tokenizer):
    assert tokenizer.get_vocab_size() <= tokenizer_lib.SIZE
    for tag in (*tokenizer_lib.TAGS, tokenizer_lib.PAD, tokenizer_lib.START, tokenizer_lib.END):
        assert tokenizer.encode(tag).tokens == [tag]
    special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
    assert special == {tokenizer_lib.PAD, tokenizer_lib.START, tokenizer_lib.END}


def test_folder_loads_in_transformers(tokenizer, tmp_path):
    tokenizer_lib.write(tmp_path, tokenizer)
    loaded = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    chat = [{'role': 'user', 'content': 'Question: What is the job of Gumu?'}]
    text = loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        '<|im_start|>user\nQuestion: What is the job of Gumu?<|im_end|>\n<|im_start|>assistant\n'
    )
    assert loaded(text, add_special_tokens=False)['input_ids'] == tokenizer.encode(text).ids
    assert (loaded.eos_token, loaded.pad_token) == (tokenizer_lib.END, tokenizer_lib.PAD)
