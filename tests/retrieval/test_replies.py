"""Replies of search servers: the forms of Search-R1's servers and of others are read right, or the field is named."""

import json
import pathlib

import pytest
from refusals import faults, refused

from zeroplay_jax.retrieval.client import Client, Http

# "read": names and rows of forms that are read; "refused" and "rows": passages and replies, with the reason.
CASES = json.loads((pathlib.Path(__file__).parent / 'replies.json').read_text(encoding='utf-8'))


def client_of(fake, row):
    """Returns a client of a server that answers one query with this row, as often as it is asked."""
    body = row if isinstance(row, bytes) else json.dumps({'result': [row]}).encode()
    fake.script = [(200, body)] * 4
    return Client(Http(fake.url, pause=0.001, timeout=10.0, retries=0, patience=0.0))


@pytest.mark.parametrize('name', faults('third-8', CASES['read']))
def test_a_passage_of_a_search_server_is_read(fake, name):
    (passage,) = client_of(fake, [CASES['read'][name]]).retrieve(['q'], 3)[0]
    assert (passage['title'], passage['text']) == ('Lomi', 'Lomi is a city.')
    assert (passage['id'] == '7') != (name in CASES['without_id'])
    assert passage['id'] and isinstance(passage['score'], float)


@pytest.mark.parametrize('name', faults('F4', CASES['refused']))
def test_the_field_that_cannot_be_used_is_named(fake, name):
    item, reason = CASES['refused'][name]
    client = client_of(fake, [item])
    assert client.retrieve(['q'], 1) == [None]
    with refused(f'not of the protocol .*passage 1.*{reason}'):
        client.check_failure_rate()


@pytest.mark.parametrize('name', faults('G', CASES['rows']))
def test_a_row_of_another_form_is_not_an_empty_one(fake, name):
    body, reason = CASES['rows'][name]
    client = client_of(fake, body.encode())
    assert client.retrieve(['q'], 1) == [None]
    with refused(reason):
        client.check_failure_rate()


NO_FAILURES = [
    {'error': None, 'errors': [None], 'timed_out': False, '_shards': {'total': 5, 'failed': 0}},
    {'error': False, 'errors': [], 'success': True, 'status': 'ok', 'code': 0},
    {
        'error': '',
        'errors': None,
        'success': 'true',
        'status': 'success',
        'code': '200',
        'status_code': 20000,
    },
    {'error': 'false', 'errors': {}, 'success': 1, 'status': 200, 'timed_out': 'false'},
    {'error': '0', 'errors': 'none', 'status': 'failover', '_shards': {'failed': '0'}},
]


@pytest.mark.parametrize('fields', NO_FAILURES)
def test_no_error_beside_the_results_is_no_failure(fake, fields):
    reply = json.dumps({'result': [[]]} | fields).encode()
    assert client_of(fake, reply).retrieve(['q'], 1) == [[]]


@pytest.mark.fault('G', '50 passages for topk=3')
def test_no_more_passages_than_asked_for_are_passed_on(fake):
    items = [{'document': {'id': str(n), 'contents': f'"T"\n{n}'}} for n in range(50)]
    passages = client_of(fake, items).retrieve(['q'], 3)[0]
    assert [passage['id'] for passage in passages] == ['0', '1', '2']


@pytest.mark.fault('kin-ids', 'two passages without id')
def test_passages_without_ids_are_told_apart(fake):
    items = [{'document': {'contents': text}} for text in ('one', 'two', 'one')]
    first, second, third = client_of(fake, items).retrieve(['q'], 3)[0]
    assert first['id'] == third['id'] != second['id']


@pytest.mark.fault('kin-blank', 'passages without any text')
def test_a_passage_without_any_text_is_none(fake):
    assert client_of(fake, [{'document': {'id': '7', 'contents': ' '}}]).retrieve(['q'], 3) == [[]]
