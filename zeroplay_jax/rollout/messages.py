"""Chat messages whose parts are marked as trusted or not; imports nothing heavy."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]  # {'role': str, 'content': str or a list of str and Untrusted}


class Untrusted(str):
    """Text from a model, a document or a tool: encoded as plain characters, never as control tokens."""
