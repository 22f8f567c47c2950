"""What games start from: hop counts in the exact ratio, endless decks, files in any of the usual forms."""

import collections
import json

import pytest
from input_files import library, write

from zeroplay_jax.configs import common
from zeroplay_jax.data import files
from zeroplay_jax.recipes import datasets
from zeroplay_jax.types import UserError


def test_a_dataset_takes_every_item_once_an_epoch_and_is_a_function_of_the_place():
    dealt = datasets.EpochDataset(range(7), seed=3).take(0, 21)
    assert (
        all(sorted(dealt[i : i + 7]) == list(range(7)) for i in (0, 7, 14))
        and dealt[:7] != dealt[7:14]
    )
    assert datasets.EpochDataset(range(7), seed=3).take(5, 6) == dealt[5:11]


@pytest.mark.parametrize(
    'line,problem',
    [
        ('{"question": "x"', "not JSON: Expecting ',' delimiter at character 17"),
        ('[1]', 'a JSON list; write one object per line'),
        ('"x"', 'a JSON text, not an object'),
        ('1e3', 'a JSON number, not an object'),
        ('null', 'a JSON null, not an object'),
        ('{"answer": "x"}', '"question" is missing'),
        ('{"question": 3, "answer": "x"}', '"question" is a JSON number, not a text'),
        ('{"question": true, "answer": "x"}', '"question" is a JSON truth value, not a text'),
        ('{"question": "  ", "answer": "x"}', '"question" is empty'),
        ('{"question": "x"}', 'no answers; write them into one of the fields answers,'),
        ('{"question": "x", "answers": []}', '"answers" has no answer'),
        (
            '{"question": "x", "answer": null}',
            '"answer" is a JSON null, not a text or a list of texts',
        ),
        (
            '{"question": "x", "answers": ["a", ["b"]]}',
            'an answer of "answers" is a JSON list, not a text',
        ),
        ('{"question": "x", "question": "y", "answer": "a"}', "the key 'question' occurs twice"),
        ('{"question": "x", "answer": NaN}', 'NaN is no number'),
        ('{"question": "x", "answers": ["a", " "]}', 'an answer of "answers" is empty'),
        ('[' * 200_000, 'its brackets are nested too deeply'),
        ('9' * 5_000, 'it has a number with too many digits'),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, problem):
    path = write(tmp_path / 'q.jsonl', {'question': 'Who?', 'answer': 'A'}, line)
    with pytest.raises(UserError, match=r'q\.jsonl, line 2: every line must be') as error:
        files.read_lines(path, 'question')
    assert f'({problem}' in str(error.value)


@pytest.mark.parametrize('field', ['question', 'answer'])
def test_half_a_surrogate_pair_is_named_before_the_run(tmp_path, field):
    smile = '{"question": "\\ud83d\\ude00", "answer": "\\\\ud83d"}'
    broken = json.dumps({'question': 'Who?', 'answer': 'A'} | {field: 'caf\ud83d'})
    path = write(tmp_path / 'q.jsonl', smile, broken)
    with pytest.raises(UserError, match=r'q\.jsonl, line 2: .*without its other half'):
        files.read_lines(path, 'question')
    assert (
        files.read_lines(write(tmp_path / 'good.jsonl', smile), 'question')[0]['question'] == '😀'
    )


def test_a_byte_order_mark_is_skipped_and_other_encodings_are_refused(tmp_path):
    path = tmp_path / 'q.jsonl'
    line = json.dumps({'question': 'Wo ist das Café?', 'answer': 'A'}, ensure_ascii=False)
    path.write_text(line, encoding='utf-8-sig')
    assert files.read_lines(str(path), 'question')[0]['question'] == 'Wo ist das Café?'
    for encoding, name in (
        ('latin-1', 'not UTF-8 at byte 28, probably Latin-1'),
        ('utf-16', 'it is UTF-16'),
    ):
        path.write_text(line, encoding=encoding)
        with pytest.raises(UserError, match=rf'q\.jsonl.*: .*{name}.*; save it as UTF-8'):
            files.read_lines(str(path), 'question')


def test_an_empty_or_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match='holds no line'):
        files.read_lines(write(tmp_path / 'q.jsonl', ''), 'question')
    with pytest.raises(UserError, match='cannot be read'):
        files.read_lines(str(tmp_path / 'none.jsonl'))


def test_answers_get_hop_counts_in_the_exact_ratio():
    config = common.get_config()
    config.schedule.hop_ratio = (4, 3, 2)
    texts = [f'a{i}' for i in range(18)]

    class Worlds:
        def answers(self):
            return texts

    hidden = datasets.hidden_answers(config, library(worlds=Worlds()))
    assert collections.Counter(item.hops for item in hidden) == {1: 8, 2: 6, 3: 4}
    assert [item.answer for item in hidden] == texts
