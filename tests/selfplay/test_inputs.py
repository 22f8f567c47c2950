"""What games start from: hop counts in the exact ratio, endless decks, files in any of the usual forms."""

import collections
import pathlib
import types

from input_files import write
from refused_calls import check_table
from scripted import library

from zeroplay_jax.configs import common
from zeroplay_jax.data import files
from zeroplay_jax.recipes import datasets
from zeroplay_jax.selfplay.schedule import in_epochs


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

    def encoded(encoding, text='{"question": "Wo ist das Café?", "answer": "A"}'):
        path = tmp_path / 'q.jsonl'
        path.write_text(text, encoding=encoding)
        return files.read_lines(str(path), 'question')[0]['question']

    names = {'read': read, 'documents': documents, 'encoded': encoded, 'MISSING': MISSING}
    check_table(pathlib.Path(__file__).parent / 'bad_lines.txt', names, tmp_path)


MISSING = object()


def test_hidden_answers_get_hop_counts_in_the_exact_ratio_and_in_mixed_order():
    config = common.get_config('ssp')
    config.schedule.hop_ratio = (4, 3, 2)
    texts = [f'a{i}' for i in range(18)]
    worlds = types.SimpleNamespace(answers=lambda: texts)
    hidden = datasets.hidden_answers(config, library(worlds=worlds))
    hops = [item.hops for item in hidden]
    assert collections.Counter(hops) == {1: 8, 2: 6, 3: 4} and hops != sorted(hops)
    assert [item.answer for item in hidden] == texts
