"""Secrets in what people read are hidden; other texts stay as they are."""

import pytest

from zeroplay_jax.retrieval.masking import hide, hide_known, secrets_of
from zeroplay_jax.retrieval.types import UserError

HIDDEN = {
    'no http://me:pass@host:80/v1 here': 'no http://***@host:80/v1 here',
    'http://p@ss:w@rd@host': 'http://***@host',
    'http://me:pa/ss@host/x': 'http://***@host/x',
    'https://h/v1?api_key=abc&page=2#m': 'https://h/v1?api_key=***&page=2#m',
    'https://h/?x=1&X-Amz-Signature=ab%2F, then': 'https://h/?x=1&X-Amz-Signature=***, then',
    'https://h/?sig=a;token=b': 'https://h/?sig=***;token=***',
    'http://user:p@ss/w@host': 'http://***@host',
    'http://user:p@ss/w@host.example:80/v1': 'http://***@host.example:80/v1',
    'http://user:pass@host.example/@scope/x': 'http://***@host.example/@scope/x',
    'http://user:pass@[::1]:80/x': 'http://***@[::1]:80/x',
    'https://h/x#access_token=abc': 'https://h/x#access_token=***',
    'https://h/?pwd=a&jwt=b&sas=c&apikey=d': 'https://h/?pwd=***&jwt=***&sas=***&apikey=***',
    'cannot POST /v1?api_key=abc': 'cannot POST /v1?api_key=***',
    'wrong key: "sk-abcdefgh12345678".': 'wrong key: "sk-***".',
}
KEPT = [
    'http://127.0.0.1:8000/a@b, mail me@host',
    'http://host:80?user=a@b&tokenizer=x&max_tokens=8&keyword=2',
    'https://host/@scope/package',
    'http://[::1]:80/x@y',
    'hf-internal-testing/tiny, http://xai-search-server:8000, task-of-12345678901234567',
    'what is a key=value pair? A token = a word.',
]


@pytest.mark.parametrize('text', HIDDEN)
@pytest.mark.fault('nov29-C4', 'addresses with passwords, keys and tokens')
def test_secrets_of_addresses_are_hidden_in_every_line(text):
    assert hide(text) == HIDDEN[text]
    assert str(UserError(text)) == HIDDEN[text]


@pytest.mark.parametrize('text', KEPT)
def test_other_texts_stay(text):
    assert hide(text) == text


def test_known_secrets_are_hidden_in_any_text():
    headers = {'Authorization': 'Bearer key-of-mine', 'X-Api-Key': 'short', 'Accept': 'text/plain'}
    headers['X-Auth'] = 'key-of-mine-and-more'
    address = 'https://me:pass%20word@host/?token=token-of-mine'
    secrets = secrets_of(headers, address=address)
    # The third one is "me:pass word" in base64, as a request has it.
    for secret in (
        'key-of-mine',
        'key-of-mine-and-more',
        'pass word',
        'bWU6cGFzcyB3b3Jk',
        'token-of-mine',
    ):
        assert hide(f'Wrong: {secret}.', secrets) == 'Wrong: ***.'
    assert hide('A short text/plain.', secrets) == 'A short text/plain.'


def test_secrets_are_hidden_as_servers_quote_them():
    secrets = secrets_of(
        {'Authorization': 'Bearer a"key/of\\mine'},
        address='http://u:p%40ss%2fword@h/?key=a%2fkey-of',
    )
    for quoted in ('a\\"key/of\\\\mine', 'a%22key%2Fof%5Cmine', 'p%40ss%2fword', 'p%40ss%2Fword'):
        assert hide_known(f'Wrong: {quoted}.', secrets) == 'Wrong: ***.'
    assert hide_known(r'{"error": "a\"key\/of\\mine"}', secrets) == '{"error": "***"}'
    assert hide_known('Wrong: a%2Fkey-of.', secrets) == 'Wrong: ***.'


def test_the_folder_of_a_process_is_no_secret():
    assert secrets_of({'PWD': '/data/of/mine', 'DB_PWD': 'password-of-mine'}) == (
        'password-of-mine',
    )
