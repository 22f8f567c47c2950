"""Random texts that templates and tokenizers are likely to change."""

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
