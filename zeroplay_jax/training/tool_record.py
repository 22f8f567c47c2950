"""The tools of a run as its policy sees them, kept beside the config in the workdir.

A config names tools; it does not hold their descriptions and schemas. An MCP server that is deployed
again, or a newer version of a package, would change the prompts of a resumed run unnoticed.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from zeroplay_jax.runtime import atomic
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.selfplay.roles import Role
from zeroplay_jax.tools.base import Tool
from zeroplay_jax.types import Json, UserError

FILE_NAME = 'tools.json'
# Attributes of a tool that reach the policy: through the prompt, or as observations.
_ATTRIBUTES = (
    'description',
    'parameters',
    'purpose',
    'argument_hint',
    'returns',
    'note',
    'errors',
    'takes_document_ids',
)
_MAX_VALUE_CHARACTERS = 80  # of a value that an error quotes

# Name of a tool → its attributes, in the order of the prompt.
Listing = dict[str, dict[str, Any]]


def listings(roles: Mapping[str, Role]) -> dict[str, Listing]:
    """The tools of each role that has any, as JSON values."""
    listing_of_role: dict[str, Listing] = {}
    for name, role in roles.items():
        if role.env.tools:
            listing_of_role[name] = _listing(role.env.tools)
    return listing_of_role


def _listing(tools: Mapping[str, Tool]) -> Listing:
    attributes_of_tool: Listing = {}
    for name, tool in tools.items():
        attributes_of_tool[name] = {
            attribute: getattr(tool, attribute) for attribute in _ATTRIBUTES
        }
    # Through JSON, so that tuples compare equal to the lists that the file gives back.
    return json.loads(json.dumps(attributes_of_tool, default=dict))


def check(hosts: Hosts, workdir: pathlib.Path, roles: Mapping[str, Role], is_resumed: bool) -> None:
    """Writes the record of a new run; compares a resumed run with it. All processes must call it.

    A resumed run without a record, of an earlier version, gets one.

    Args:
      is_resumed: the run has a checkpoint. Without one nothing was learnt, and the tools may change.

    Raises:
      UserError: one line; a tool differs from that of the run's start.
    """
    path = workdir / FILE_NAME

    def check_locally() -> None:
        if not hosts.is_first:
            return
        current = listings(roles)
        if is_resumed and path.is_file():
            _check_equal(path, current)
        else:
            atomic.write_text(path, json.dumps(current, indent=2, ensure_ascii=False) + '\n')

    hosts.run_on_all_and_gather(check_locally)


def _check_equal(path: pathlib.Path, current: dict[str, Listing]) -> None:
    fix = f'bring the earlier tools back, or remove {path} to continue with these'
    try:
        saved: Json = json.loads(path.read_text(encoding='utf-8'))
        difference = _role_difference(saved, current)
    except (ValueError, AttributeError):
        raise UserError(f'{path}: no record of tools; remove it to continue') from None
    if difference:
        raise UserError(f'{path.parent}: the run started with other tools: {difference}; {fix}')


def _role_difference(saved: Json, current: dict[str, Listing]) -> str:
    """The first difference of any role in words; '' without one."""
    # A record of an earlier version has one listing for all roles.
    if any(isinstance(value.get('description'), str) for value in saved.values()):
        merged: Listing = {}
        for listing in current.values():
            merged |= listing
        return find_difference(saved, merged)
    for role in dict.fromkeys((*saved, *current)):
        difference = find_difference(saved.get(role, {}), current.get(role, {}))
        if difference:
            return f'role {role}: {difference}'
    return ''


def find_difference(saved: Json, current: Json) -> str:
    """The first difference between two listings in words; '' without one."""
    for name, attributes in saved.items():
        if name not in current:
            return f'{name!r} is missing'
        difference = _attribute_difference(attributes, current[name])
        if difference:
            return f'{name!r} differs in {difference}'
    for name in current:
        if name not in saved:
            return f'{name!r} is new'
    # The prompt explains them in this order.
    if list(saved) != list(current):
        return f'their order was {", ".join(saved)} and is {", ".join(current)}'
    return ''


def _attribute_difference(saved: Json, current: Json) -> str:
    # Attributes that a later version of this file adds are not in an earlier record.
    for attribute, value in saved.items():
        if attribute in current and current[attribute] != value:
            return f'{attribute} (there {_quoted(value)}, now {_quoted(current[attribute])})'
    return ''


def _quoted(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if len(text) > _MAX_VALUE_CHARACTERS:
        return text[:_MAX_VALUE_CHARACTERS] + '…'
    return text
