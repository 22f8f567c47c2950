"""Secrets in what people read are hidden; other texts stay as they are."""

import pathlib

from refused_calls import check_table

from zeroplay_jax.retrieval.masking import hide, hide_known, secrets_of
from zeroplay_jax.retrieval.types import UserError


def test_secrets_of_addresses_are_hidden_in_every_line():
    names = {'UserError': UserError, 'hide': hide}
    check_table(pathlib.Path(__file__).parent / 'secrets.txt', names, error=())


def test_known_secrets_are_hidden_in_any_text():
    headers = {'Authorization': 'Bearer key-of-mine', 'X-Api-Key': 'short', 'Accept': 'text/plain'}
    headers |= {'X-Auth': 'key-of-mine-and-more', 'PWD': '/data/of/mine'}
    secrets = secrets_of(headers, address='https://me:pass%20word@host/?token=token-of-mine')
    # The last one is "me:pass word" in base64, as a request has it.
    known = 'key-of-mine-and-more, key-of-mine, pass word, token-of-mine, bWU6cGFzcyB3b3Jk'
    assert hide(known, secrets) == '***, ***, ***, ***, ***'
    kept = 'A short text/plain in /data/of/mine.'
    assert hide(kept, secrets) == kept


def test_secrets_are_hidden_as_servers_quote_them():
    secrets = secrets_of(
        {'Authorization': 'Bearer a"key/of\\mine'},
        address='http://u:p%40ss%2fword@h/?key=a%2fkey-of',
    )
    quoted = 'a\\"key/of\\\\mine, a%22key%2Fof%5Cmine, p%40ss%2fword, p%40ss%2Fword, a%2Fkey-of'
    assert hide_known(quoted, secrets) == '***, ***, ***, ***, ***'
    assert hide_known(r'{"error": "a\"key\/of\\mine"}', secrets) == '{"error": "***"}'
