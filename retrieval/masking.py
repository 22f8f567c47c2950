"""Hides passwords, keys and tokens in what people read: errors, logs and records."""

from __future__ import annotations

import base64
import itertools
import json
import re
import urllib.parse
from collections.abc import Iterable, Mapping

# Names of variables, headers, entries of `env` and parameters of addresses whose values are secrets. Other values, such
# as a time zone or the path of a repository, stand in results, which the policy has to read as they are.
SECRET_NAME = re.compile(
    r'keys?(?![a-z])|(?<!max_)token(?!iz)|secret|passw|passphrase|auth(?!ors?(?![a-z]))|credential|cookie|bearer|'
    r'signature|(?<![a-z])(pat|dsn|sig|sas|jwt|pass|pwd)(?![a-z])',
    re.IGNORECASE,
)
# Shorter values are words such as 'true'.
_MIN_CHARACTERS = 8
# 'user:password@' of an address. A password may have a '/' or '@' that its user forgot to escape; what is before a
# name with a dot or a port is none.
_USER = re.compile(
    r'(?<=://)(?:[^\s/?#@:[]{0,400}:(?!\d+[/?#])(?:[^\s@]|@(?![\w-]{0,99}[.:\[])){0,400}|[^\s/?#]{0,400})@'
)
_PARAMETER = re.compile(
    rf'([?&;#][^\s?&;=#]{{0,99}}(?:{SECRET_NAME.pattern})[^\s?&;=#]{{0,99}}=)[^\s&;#\'")]*[^\s&;#\'"),.:]',
    re.IGNORECASE,
)
# What services call keys by, wherever it stands: a server may quote one that is not ours.
_KEY = re.compile(r'\b(sk-|hf_|ghp_|gsk_)(?=[\w-]*\d)\w[\w-]{15,}')


def hide(text: str, secrets: Iterable[str] = ()) -> str:
    """Returns a text without the secrets of the addresses in it, and without the keys of well-known services.

    Args:
      secrets: further ones, as of `secrets_of`.
    """
    text = _PARAMETER.sub(r'\1***', _USER.sub('***@', text))
    text = _KEY.sub(r'\1***', text)
    return hide_known(text, secrets)


def hide_known(text: str, secrets: Iterable[str]) -> str:
    """Returns a text without these secrets, such as a result whose addresses a policy reads as they are."""
    for secret in secrets:
        text = text.replace(secret, '***')
    return text


def secrets_of(*named: Mapping[str, str], address: str = '') -> tuple[str, ...]:
    """Returns the secrets that `hide` can find in any text, the longest first.

    Args:
      named: values of headers or variables by their names.
      address: a web address.
    """
    match = _USER.search(address)
    written = match[0][:-1] if match else ''
    user = urllib.parse.unquote(written)
    # The last one is how a request has them.
    secrets = {*written.split(':', 1), user, *user.split(':', 1)}
    secrets.add(base64.b64encode(user.encode()).decode())
    parameters = urllib.parse.parse_qsl(address.partition('?')[2].replace('#', '&'))
    for name, value in itertools.chain(parameters, *(values.items() for values in named)):
        # The folder of a process is none.
        if SECRET_NAME.search(name) and name != 'PWD':
            # 'Bearer KEY' and KEY.
            secrets.update((value, *value.split()))
    # Servers quote what they got as they got it, in addresses and in JSON.
    for secret in tuple(secrets):
        # PHP writes '\/' into JSON.
        escaped = json.dumps(secret)[1:-1]
        secrets |= {urllib.parse.quote(secret, ''), escaped, escaped.replace('/', r'\/')}
    long_enough = (secret for secret in secrets if len(secret) >= _MIN_CHARACTERS)
    # One may be part of another.
    return tuple(sorted(long_enough, key=len, reverse=True))
