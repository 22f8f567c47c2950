"""Random texts that templates and tokenizers are likely to change, and what transformers makes of them."""

from zeroplay_jax.rollout import prompts

_PIECES = (
    *' \t\n\r\x0b\x0c\x1c\x85\u00a0\u2028\u3000',
    *'"\'\\&<>{}[]():,.?!%#',
    *'aZ09éß\u0301\u0130\ufb01你好\U0001f600\u200d\ufeff\ufffd\ue000\ue001\ue002\x00\x7f',
    '\r\n',
    ' \n\n',
    '\\n',
    '\\u00e9',
    '{{ x }}',
    '{% if x %}',
    '{"a": [1, "b"]}',
    '&lt;',
    'Who wrote',
    ' the',
    'ing ',
)


def hard_text(rng, pieces=20):
    return ''.join(rng.choices(_PIECES, k=rng.randrange(1, pieces)))


def template_ids(reference, chat):
    """Ids of a prompt by a tokenizer of transformers."""
    return list(reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


def check_prompts(codec, reference, rng, forms=('{question}',), count=60, tools='x'):
    """Prompts of so many random questions have the ids of the template."""
    for form in forms:
        for _ in range(count):
            question = hard_text(rng)
            content = form.format(question=question, tools=tools)
            want = template_ids(reference, [{'role': 'user', 'content': content}])
            filled = prompts.fill(prompts.Prompt(form), tools=[tools], question=question)
            assert codec.render(filled).tolist() == want, question
