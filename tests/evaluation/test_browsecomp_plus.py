"""BrowseComp-Plus in the form that its publisher's script writes, on a sample of our own."""

import json

from zeroplay_jax.data import files


def test_the_set_has_a_name_where_its_script_wrote_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = 'Who taught the person who founded the company that is called Mimi?'
    documents = [{'docid': '7', 'text': 'Ann was taught by Bob.', 'url': 'https://a.test'}]
    line = {'query_id': '769', 'query': text, 'answer': 'Bob', 'gold_docs': documents}
    (tmp_path / 'data').mkdir()
    path = tmp_path / 'data' / 'browsecomp_plus_decrypted.jsonl'
    path.write_text(json.dumps(line))
    for name in ('browsecomp-plus', str(path)):
        (question,) = files.load_set(name)
        assert (question.text, question.answers) == (text, ('Bob',))
