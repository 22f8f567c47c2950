"""A missing path next to one of similar spelling is suggested."""

from zeroplay_jax.retrieval.command import similar_path


def test_the_missing_part_of_a_path_is_replaced(tmp_path, monkeypatch):
    (tmp_path / 'notes' / 'deep').mkdir(parents=True)
    (tmp_path / 'notes' / 'questions.jsonl').touch()
    assert similar_path(tmp_path / 'notes' / 'question.jsonl') == (
        f'; did you mean {tmp_path / "notes" / "questions.jsonl"}?'
    )
    # A folder that is misspelt, and what is in it.
    assert similar_path(tmp_path / 'note' / 'questions.jsonl').endswith('notes/questions.jsonl?')
    assert similar_path(tmp_path / 'note' / 'other.jsonl') == ''
    assert similar_path(tmp_path / 'notes' / 'questions.jsonl') == ''
    assert similar_path(tmp_path / 'nothing like it') == ''
    assert similar_path(tmp_path / 'notes' / 'questions.jsonl' / 'x') == '' == similar_path('')
    monkeypatch.chdir(tmp_path)
    assert similar_path('nots') == '; did you mean notes?'
