"""What games start from: hop counts in the exact ratio, endless decks, files in any of the usual forms."""

import collections
import json
import pathlib

import pytest
from input_files import write
from refused_calls import check_table
from scripted import library

from zeroplay_jax.configs import common
from zeroplay_jax.data import files
from zeroplay_jax.recipes import datasets
from zeroplay_jax.selfplay.schedule import in_epochs
from zeroplay_jax.types import UserError


def test_a_dataset_takes_every_item_once_an_epoch_and_is_a_function_of_the_place():
    dealt = in_epochs(range(7), 0, 21, 3)
    assert (
        all(sorted(dealt[i : i + 7]) == list(range(7)) for i in (0, 7, 14))
        and dealt[:7] != dealt[7:14]
    )
    assert in_epochs(range(7), 5, 6, 3) == dealt[5:11]


def test_a_bad_line_is_named(tmp_path):
    def read(line):
        path = write(tmp_path / 'q.jsonl', {'question': 'Who?', 'answer': 'A'}, line)
        files.read_lines(path, 'question')

    def documents(**changes):
        good = {'title': 'Lomi', 'text': 'A city.', 'hops': 1}
        changed = {name: x for name, x in (good | changes).items() if x is not MISSING}
        files.documents(write(tmp_path / 'd.jsonl', good, changed))

    names = {'read': read, 'documents': documents, 'MISSING': MISSING}
    check_table(pathlib.Path(__file__).parent / 'bad_lines.txt', names, tmp_path)


MISSING = object()


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
        ('latin-1', 'not UTF-8 at byte 28; save it as UTF-8'),
        ('utf-16', 'not UTF-8 at byte 0; save it as UTF-8'),
    ):
        path.write_text(line, encoding=encoding)
        with pytest.raises(UserError, match=rf'q\.jsonl.*: .*{name}'):
            files.read_lines(str(path), 'question')


def test_an_empty_or_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match='holds no line'):
        files.read_lines(write(tmp_path / 'q.jsonl', ''), 'question')
    with pytest.raises(UserError, match='cannot be read'):
        files.read_lines(str(tmp_path / 'none.jsonl'))


def test_answers_get_hop_counts_in_the_exact_ratio():
    config = common.get_config('ssp')
    config.schedule.hop_ratio = (4, 3, 2)
    texts = [f'a{i}' for i in range(18)]

    class Worlds:
        def answers(self):
            return texts

    hidden = datasets.hidden_answers(config, library(worlds=Worlds()))
    assert collections.Counter(item.hops for item in hidden) == {1: 8, 2: 6, 3: 4}
    assert [item.answer for item in hidden] == texts
