"""Rows as bytes: between the processes of a run, and in a checkpoint, which holds rows that wait for a batch.

A checksum, the size of the header, a JSON header, raw arrays. Nothing is unpickled, and all values are exact: Python
writes the shortest text that reads back as the same float64.
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import numpy as np

from zeroplay_jax.types import Outcome, Question, Row, RowInfo, ToolCall, Trajectory, Turn

# Before everything its CRC-32, then the number of bytes of the header.
_CHECKSUM = struct.Struct('<I')
_SIZE = struct.Struct('<Q')
_CLASSES = (Outcome, Question, Row, RowInfo, ToolCall, Trajectory, Turn)
_CLASS_OF_NAME = {record_class.__name__: record_class for record_class in _CLASSES}
# What a list of the header is, by its first item.
_LIST, _TUPLE, _OBJECT = 'list', 'tuple', 'object'


def to_bytes(value: Any) -> bytes:
    """Returns a value as bytes.

    Args:
      value: rows, outcomes, or other values made of the records of `types`, arrays and JSON; tuples stay tuples. NumPy
        scalars become Python numbers. Objects that occur several times, such as the question of a group, are written
        once and are one object again.

    Raises:
      TypeError: something in it is none of these.
    """
    writer = _Writer()
    root = writer.node(value)
    header = json.dumps([root, writer.objects]).encode()
    content = b''.join([_SIZE.pack(len(header)), header, *writer.arrays])
    return _CHECKSUM.pack(zlib.crc32(content)) + content


def from_bytes(data: bytes) -> Any:
    """Inverse of `to_bytes`.

    Raises:
      ValueError: one line; the bytes are damaged, or another version wrote them.
    """
    checksum, content = data[: _CHECKSUM.size], memoryview(data)[_CHECKSUM.size :]
    if not content or checksum != _CHECKSUM.pack(zlib.crc32(content)):
        raise ValueError('the bytes are damaged')
    try:
        header_end = _SIZE.size + _SIZE.unpack_from(content)[0]
        root, nodes = json.loads(bytes(content[_SIZE.size : header_end]))
        return _read(root, nodes, content[header_end:])
    # These are the bytes that were written, so that the records must be those of another version.
    except Exception as error:
        raise ValueError(f'another version wrote these bytes: {error}') from error


class _Writer:
    """Turns values into JSON nodes.

    Attributes:
      objects: nodes of arrays, [dtype, shape], and of records, {class, fields}; what an object holds comes before it.
      arrays: content of the arrays, in this order.
    """

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.arrays: list[bytes] = []
        self._index_of_id: dict[int, int] = {}

    def node(self, value: Any) -> Any:
        """Returns the JSON node of a value; adds the objects that it holds."""
        if isinstance(value, dict):
            if not all(isinstance(name, str) for name in value):
                raise TypeError('a dict with names that are no text')
            return {name: self.node(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            kind = _LIST if isinstance(value, list) else _TUPLE
            return [kind, *map(self.node, value)]
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray) or type(value) in _CLASSES:
            # Compared by identity, because comparing the values of long questions would take longer.
            if id(value) not in self._index_of_id:
                object_node = self._object_node(value)
                self._index_of_id[id(value)] = len(self.objects)
                self.objects.append(object_node)
            return [_OBJECT, self._index_of_id[id(value)]]
        if not isinstance(value, str | int | float | None):
            raise TypeError(
                f'a row or an outcome holds a {type(value).__name__}; give records of zeroplay_jax.types, arrays, '
                'lists, dicts, texts and numbers, which other processes and checkpoints can have, too'
            )
        return value

    def _object_node(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if np.dtype(value.dtype.str) != value.dtype:
                raise TypeError(f'an array of {value.dtype}, which NumPy does not read back')
            self.arrays.append(value.tobytes())
            return [value.dtype.str, value.shape]
        fields = dict(vars(value))
        # Whatever a tool keeps. Episodes end before their rows are written, so nothing reads it any more.
        fields.pop('tool_states', None)
        return {type(value).__name__: self.node(fields)}


def _read(root: Any, nodes: list[Any], content: memoryview) -> Any:
    """Returns the value of the node `root`; `nodes` and `content`: objects and arrays of `_Writer`."""
    objects: list[Any] = []
    offset = 0

    def value_of(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: value_of(item) for name, item in node.items()}
        if not isinstance(node, list):
            return node
        kind, *items = node
        if kind == _OBJECT:
            return objects[items[0]]
        values = list(map(value_of, items))
        return tuple(values) if kind == _TUPLE else values

    for node in nodes:
        if isinstance(node, dict):
            ((name, fields),) = node.items()
            objects.append(_CLASS_OF_NAME[name](**value_of(fields)))
        else:
            dtype, shape = node
            array = np.frombuffer(content, dtype, int(np.prod(shape)), offset).reshape(shape)
            offset += array.nbytes
            # A copy: one row must not keep the bytes of all, and the place of an array may be no multiple of its dtype.
            objects.append(array.copy())
    return value_of(root)
