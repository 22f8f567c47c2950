"""Requests that a page of another site sends to a server of this machine, through a browser that runs here.

A browser sends such requests to any address, and the owner of a site can have its name point to this machine.
"""

import re

# By which programs ask a server that listens on one of them.
NAMES = ('localhost', '127.0.0.1', '::1', '[::1]')
_PORT = re.compile(r':\d*$')


def refusal(headers, is_local: bool = True) -> str:
    """Returns why a request is refused; '' if it is not.

    Args:
      headers: those of the request, a mapping. Browsers send "Origin" for a page; most programs do not.
      is_local: whether the server listens on the loopback interface alone.
    """
    name = _PORT.sub('', headers.get('host', '')).lower()
    if is_local and name not in ('', *NAMES):
        return 'the address names another machine; ask localhost, or start a search server with --host 0.0.0.0'
    origin = headers.get('origin')
    if origin and _PORT.sub('', origin.partition('://')[2]) not in (name, *NAMES):
        return 'a page of another site sent the request'
    return ''
