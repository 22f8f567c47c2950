"""Prompts and observations with the tokenizers and chat templates of public models have the ids of `transformers`."""

import random

import published_tokenizers
import pytest
import transformers
from hard_texts import check_prompts, hard_text, template_ids

from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.call_syntax import SYNTAXES, MessageSyntax
from zeroplay_jax.rollout.tokens import open_codec

# Role of results and ends of turns of each. Gemma's template knows no tools, Mistral's wants an id for every result.
EXPECTED = {
    'qwen3': ('tool', {'<|im_end|>'}),
    'qwen2_5': ('tool', {'<|im_end|>'}),
    'llama3_2': ('tool', {'<|eot_id|>'}),
    'mistral_nemo': ('user', {'</s>'}),
    'gemma3': ('user', {'<end_of_turn>'}),
}


@pytest.fixture(scope='module', params=EXPECTED)
def published(request):
    folder = published_tokenizers.folder(request.param)
    reference = transformers.AutoTokenizer.from_pretrained(str(folder))
    return request.param, open_codec(folder), reference


def test_prompts_and_ends_of_turns_are_those_of_the_template(published):
    name, codec, reference = published
    _, ends = EXPECTED[name]
    assert {codec.decode([token]) for token in codec.eos_ids} == ends
    forms = ('{question}', *(prompts.select(name)['solver'].user for name in ('mini', 'full')))
    check_prompts(codec, reference, random.Random(0), forms)


@pytest.mark.parametrize('syntax', [s for s in SYNTAXES.values() if isinstance(s, MessageSyntax)])
def test_results_are_those_of_the_template(published, syntax):
    name, codec, reference = published
    role, _ = EXPECTED[name]
    rng = random.Random(1)
    chat = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]
    opening = [*codec.render(chat[:1]), *codec.encode_plain('b')]
    for _ in range(60):
        text = hard_text(rng, 200)
        message = {'role': role, 'content': syntax.message_content(text)}
        whole = template_ids(reference, [*chat, message])
        assert [*opening, *syntax.wrap(codec, text, 10_000)] == whole, text
