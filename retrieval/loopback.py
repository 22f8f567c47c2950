"""Requests that a page of another site sends to a server of this machine, through a browser that runs here.

A browser sends such requests to any address, and the owner of a site can have its name point to this machine.
"""

from __future__ import annotations

import contextlib
import ipaddress
import urllib.parse


def is_loopback(name: str) -> bool:
    """Returns whether a name or address is the one by which a machine names itself."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name == 'localhost'


def refusal(host: str, origin: str, is_local: bool = True) -> str:
    """Returns why a request is refused; '' if it is not.

    Args:
      host: its header of this name; '' if it has none.
      origin: the same. Browsers send it; most programs do not.
      is_local: whether the server listens on the loopback interface alone.
    """
    name = _name(f'//{host}')
    if is_local and host and not is_loopback(name):
        return (
            'the address of the request names another machine, and this server answers its own alone; ask localhost, '
            'or start a search server with --host 0.0.0.0'
        )
    site = _name(origin)
    if origin and site != name and not is_loopback(site):
        return 'a page of another site sent the request'
    return ''


def _name(address: str) -> str:
    """Returns the name of the machine in an address; '' for an address without one."""
    with contextlib.suppress(ValueError):
        return urllib.parse.urlsplit(address).hostname or ''
    return ''
