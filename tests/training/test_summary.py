"""The text of summary.json."""

import json

from zeroplay_jax.training.ending import summary_json


def test_lists_of_numbers_take_one_line():
    summary = {
        'difference': [0.69, -1e-05, 3],
        'results': {'before': {'1': [1, 0, 1]}},
        'names': ['one, 2', '[3, 4]'],
        'empty': [],
    }
    text = summary_json(summary)
    assert json.loads(text) == summary
    assert '"difference": [ 0.69, -1e-05, 3 ]' in text
    assert '"1": [ 1, 0, 1 ]' in text
    assert text.endswith('}\n')
