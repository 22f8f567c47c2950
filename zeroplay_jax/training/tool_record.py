"""Records the tools of a run as its policy sees them, in the workdir, and compares a resumed run with the record.

A config names tools; it does not hold their descriptions and schemas. Without the record, a new version of an
MCP server or package would change the prompts of a resumed run unnoticed.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from zeroplay_jax.retrieval import json_text
from zeroplay_jax.runtime import disk
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.selfplay.context import Role
from zeroplay_jax.tools.base import Tool
from zeroplay_jax.types import Json, UserError

FILE_NAME = 'tools.json'
# Attributes of a tool that reach the policy: through the prompt, or as observations.
ATTRIBUTES = (
    'description',
    'parameters',
    'purpose',
    'argument_hint',
    'returns',
    'note',
    'errors',
    'takes_document_ids',
)
_MAX_VALUE_CHARACTERS = 80  # of a value that an error message quotes

# Name of a tool → its attributes, in the order of the prompt.
Listing = dict[str, dict[str, Any]]


def listings(roles: Mapping[str, Role]) -> dict[str, Listing]:
    """Returns the tools of each role that has any, as JSON values."""
    listing_of_role: dict[str, Listing] = {}
    for name, role in roles.items():
        if role.env.tools:
            listing_of_role[name] = _listing(role.env.tools)
    return listing_of_role


def _listing(tools: Mapping[str, Tool]) -> Listing:
    attributes_of_tool: Listing = {}
    for name, tool in tools.items():
        attributes_of_tool[name] = {attribute: getattr(tool, attribute) for attribute in ATTRIBUTES}
    # Converted to JSON and back, so that tuples compare equal to the lists that are read from the file.
    return json.loads(json.dumps(attributes_of_tool, default=dict))


def check_or_write(
    hosts: Hosts, workdir: pathlib.Path, roles: Mapping[str, Role], is_resumed: bool
) -> None:
    """Compares the tools of a resumed run with tools.json in its workdir; writes that file for any other run.

    All processes must call it; the first one reads or writes. A resumed run without the file, which an earlier version
    of this package started, gets one.

    Args:
      roles: roles in training, whose tools are recorded.
      is_resumed: whether the run has a checkpoint. Without one nothing was learnt yet, and the tools may change.

    Raises:
      UserError: one line; a tool differs from that at the run's start, or the record cannot be read.
    """
    path = workdir / FILE_NAME

    def check_locally() -> None:
        current = listings(roles)
        if is_resumed and path.is_file():
            _check_equal(path, current)
        else:
            disk.write_text(path, json.dumps(current, indent=2, ensure_ascii=False) + '\n')

    hosts.run_on_first(check_locally)


def read(workdir: pathlib.Path) -> dict[str, Listing] | None:
    """Returns the tools of each role as a run has recorded them; None without a record, or with one of another form."""
    try:
        saved: dict[str, Listing] = json_text.read_object(workdir / FILE_NAME)
        for listing in saved.values():
            for attributes in listing.values():
                # An earlier version wrote one listing for all roles.
                if not attributes.keys() >= {'description', 'parameters'}:
                    return None
    except (OSError, ValueError, AttributeError):
        return None
    return saved


def _check_equal(path: pathlib.Path, current: dict[str, Listing]) -> None:
    """Raises UserError if the record at `path` cannot be read or differs from `current`."""
    fix = f'bring the earlier tools back, or remove {path} to continue with these'
    try:
        saved: Json = json_text.read_object(path)
        difference = find_role_difference(saved, current)
    except (ValueError, AttributeError):
        raise UserError(f'{path}: is not a record of tools; remove it to continue') from None
    if difference:
        raise UserError(f'{path.parent}: the run started with other tools: {difference}; {fix}')


def find_role_difference(saved: Json, current: dict[str, Listing]) -> str:
    """Returns the first difference between the listings of all roles in words; '' if there is none."""
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
    """Returns the first difference between two listings in words; '' if there is none."""
    for name, attributes in saved.items():
        if name not in current:
            return f'{name!r} is missing'
        difference = _attribute_difference(attributes, current[name])
        if difference:
            return f'{name!r} differs in {difference}'
    for name in current:
        if name not in saved:
            return f'{name!r} is new'
    # The order matters, because the prompt explains the tools in this order.
    if list(saved) != list(current):
        return f'their order was {", ".join(saved)} and is {", ".join(current)}'
    return ''


def _attribute_difference(saved: Json, current: Json) -> str:
    """Returns the first attribute that differs, with both values; '' if there is none."""
    # Only attributes of the record are compared: a later version of this file may add further ones.
    for attribute, value in saved.items():
        if attribute in current and current[attribute] != value:
            return f'{attribute} (there {_quoted(value)}, now {_quoted(current[attribute])})'
    return ''


def _quoted(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if len(text) > _MAX_VALUE_CHARACTERS:
        return text[:_MAX_VALUE_CHARACTERS] + '…'
    return text
