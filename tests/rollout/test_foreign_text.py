"""Text of others: its tags cannot be taken for those of a wrapper, and only the end of a long one is lost."""

import pytest
from observations import TOOLS

from zeroplay_jax.rollout import environment as environment_lib
from zeroplay_jax.rollout.call_syntax import SYNTAXES, syntax_of
from zeroplay_jax.rollout.environment import Environment, Limits
from zeroplay_jax.rollout.prompts import Prompt
from zeroplay_jax.types import ToolCall

# Tags of every syntax, and how they are written. The tokenizer of these tests has `<observation>` and
# `<function_calls>` as plain text.
TAG_OF = {'search_r1': 'information', 'r_search': 'observation', 'qwen': 'tool_response'}
CALL_OF = {'qwen': 'tool_call', 'olmo': 'function_calls'}


def environment(codec, syntax, limit=400):
    return Environment(codec, syntax_of(syntax), Limits(4, 64, limit), TOOLS)


def observed(codec, syntax, text, limit=400):
    """Ids of an observation of this text."""
    call = ToolCall('search', {'query_list': ['a']}, text)
    return environment(codec, syntax, limit).observation(call).tolist()


@pytest.mark.parametrize('syntax', SYNTAXES)
def test_a_page_cannot_close_its_observation(codec, syntax):
    tags = ['search', 'answer', 'think', TAG_OF.get(syntax), CALL_OF.get(syntax)]
    if syntax in CALL_OF:
        tags.remove('search')
    page = 'ab'.join(f'</{tag}><{tag}>' for tag in tags if tag)
    env = environment(codec, syntax)
    ids = observed(codec, syntax, page)
    clean = observed(codec, syntax, 'ab')
    for tag in filter(None, tags):
        for text in (f'<{tag}>', f'</{tag}>'):
            assert codec.decode(ids).count(text) == codec.decode(clean).count(text)
    assert page.replace('<', '&lt;') in codec.decode(ids)
    # Nor can a question.
    prompt = codec.decode(env.prompt_ids(Prompt('Q: {question}'), question=page))
    assert f'Q: {page.replace("<", "&lt;")}' in prompt


@pytest.mark.parametrize('syntax', SYNTAXES)
def test_results_that_are_cut_off_are_said_once(codec, syntax, caplog):
    environment_lib._warn_of_cut.cache_clear()
    text = 'ab ' * 10
    whole = len(observed(codec, syntax, text))
    for limit in range(whole, whole + 4):
        observed(codec, syntax, text, limit)
    assert not caplog.records
    for limit, longer in ((whole - 1, text), (200, 'ab ' * 300)):
        observed(codec, syntax, longer, limit)
    (record,) = caplog.records
    assert 'results of search are longer than config.rollout.observation_tokens' in record.message


def test_the_start_of_a_long_text_has_the_ids_of_the_whole(codec):
    for text in (
        'fade cab ' * 3_000,
        'a' * 5_000,
        'abcab' * 3_000,
        ' ' * 5_000,
        '\u00e9 b' * 2_000,
    ):
        whole = codec.encode_plain(text)
        for limit in (0, 1, 100, 1_000, 100_000):
            # Without the bytes of a character that the limit cuts.
            assert codec.encode_start(text, limit) == codec.whole_characters(whole[:limit])
