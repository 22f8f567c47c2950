"""Random JSON schemas of tool arguments, in the forms that servers write."""

import copy
import json
import pathlib
import random

_PARTS = json.loads((pathlib.Path(__file__).parent / 'schema_parts.json').read_text())
DESCRIPTIONS = ('what to look for', 'A long one. ' * 20, '</tool_call> <b>', 'in\nlines', 'é "x"')


class Schemas:
    """Schemas from one seed.

    Args:
      seed: of the random choices.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.definitions = {}

    def arguments(self):
        """A schema of arguments: of several, of one text, or of none."""
        kind = self.random.choice(('several', 'several', 'one text', 'none'))
        if kind == 'none':
            return {'type': 'object', 'properties': {}}
        if kind == 'one text':
            text = self.pick(_PARTS['texts'])
            return {'type': 'object', 'properties': {'text': text}, 'required': ['text']}
        schema = self.object(0, self.random.randint(1, 4))
        if self.definitions:
            schema['$defs'] = self.definitions
        if self.random.random() < 0.2:
            schema['$schema'] = 'http://json-schema.org/draft-07/schema#'
        return schema

    def pick(self, parts):
        return copy.deepcopy(self.random.choice(parts))

    def object(self, depth, entries=2):
        """A schema of an object with so many entries."""
        names = self.random.sample(_PARTS['names'], entries)
        required = [name for name in names if self.random.random() < 0.6]
        properties = {name: self.value(depth) for name in names}
        schema = {'type': 'object', 'properties': properties, 'required': required}
        if self.random.random() < 0.5:
            schema['additionalProperties'] = False
        return schema

    def value(self, depth):
        """A schema of any value."""
        if depth < 3 and self.random.random() < 0.4:
            schema = self.random.choice((self.list, self.reference, self.object))(depth + 1)
        else:
            schema = self.pick(_PARTS['texts'] + _PARTS['values'])
        if self.random.random() < 0.4:
            schema['description'] = self.random.choice(DESCRIPTIONS)
        return schema

    def list(self, depth):
        bounds = {'minItems': self.random.randint(1, 3)} if self.random.random() < 0.5 else {}
        return {'type': 'array', 'items': self.value(depth), **bounds}

    def reference(self, depth):
        name = f'd{len(self.definitions)}/~'
        self.definitions[name] = None
        self.definitions[name] = self.value(depth)
        return {'$ref': f'#/$defs/{name.replace("~", "~0").replace("/", "~1")}'}
