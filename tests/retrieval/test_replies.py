"""Replies of search servers: the forms of Search-R1's servers and of others are read right, or the field is named."""

import json
import pathlib

from refused_calls import check_table

from zeroplay_jax.retrieval.client import Client, Http


def test_replies_are_read_or_refused_as_the_table_says(fake):
    def reply(body):
        """(id, title, text, score) of the passages of a query, or why there are none."""
        fake.script = [(200, body if isinstance(body, bytes) else json.dumps(body).encode())]
        client = Client(Http(fake.url, retries=0, patience=0.0))
        (passages,) = client.retrieve(['q'], 3)
        if passages is None:
            return client.last_failure
        return [tuple(passage.values()) for passage in passages]

    def row(*items):
        return reply({'result': [items]})

    check_table(pathlib.Path(__file__).parent / 'replies.txt', locals(), fake.url)
