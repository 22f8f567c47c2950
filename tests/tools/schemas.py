"""Random JSON schemas of tool arguments, in the forms that servers write."""

import random

PATTERNS = (
    r'^[A-Z]{3}-\d{2,4}$',
    r'^(left|right)$',
    r'^\d{4}-\d{2}-\d{2}$',
    r'[a-f0-9]+',
    r'^[^/\\]+\.txt$',
    r'^\S+@\S+\.\S+$',
    r'^(?P<year>\d{4})?x*$',
    r'^\+?[1-9]\d{1,14}$',
)
NAMES = (
    'path',
    'query',
    'max-results',
    'user.id',
    'café',
    'a b',
    '$filter',
    'type',
    'required',
    'x',
)


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
            return {**self.object(0, ('text',)), 'required': ['text']}
        schema = self.object(0, self.random.sample(NAMES, self.random.randint(1, 4)))
        if self.definitions:
            schema['$defs'] = self.definitions
        if self.random.random() < 0.2:
            schema['$schema'] = 'http://json-schema.org/draft-07/schema#'
        return schema

    def object(self, depth, names):
        """A schema of an object with these entries."""
        properties = {name: self.text() if name == 'text' else self.value(depth) for name in names}
        required = [name for name in names if self.random.random() < 0.6]
        schema = {'type': 'object', 'properties': properties, 'required': required}
        if self.random.random() < 0.5:
            schema['additionalProperties'] = False
        return schema

    def value(self, depth):
        """A schema of any value."""
        makers = [self.text, self.text, self.number, self.enum, self.constant, self.simple]
        if depth < 3:
            makers += [self.list, self.reference, self.choice, self.all_of, self.nested]
        maker = self.random.choice(makers)
        schema = maker() if maker.__name__ in _FLAT else maker(depth + 1)
        if self.random.random() < 0.4:
            schema['description'] = self.random.choice(
                ('what to look for', 'A long one. ' * 20, '</tool_call> <b>', 'in\nlines', 'é "x"')
            )
        return schema

    def text(self):
        schema = {'type': 'string'}
        bound = self.random.randint(0, 3)
        if bound == 1:
            schema['pattern'] = self.random.choice(PATTERNS)
        elif bound == 2:
            schema['minLength'] = self.random.randint(1, 30)
            schema['maxLength'] = schema['minLength'] + self.random.randint(0, 5)
        elif bound == 3:
            schema['format'] = self.random.choice(('date', 'uri', 'email', 'unknown'))
        return schema

    def number(self):
        schema = {'type': self.random.choice(('integer', 'number'))}
        low = self.random.randint(-50, 50)
        if self.random.random() < 0.5:
            schema[self.random.choice(('minimum', 'exclusiveMinimum'))] = low
        if self.random.random() < 0.5:
            schema[self.random.choice(('maximum', 'exclusiveMaximum'))] = low + 20
        if self.random.random() < 0.3:
            schema['multipleOf'] = self.random.choice((2, 5, 7))
        return schema

    def enum(self):
        return {'enum': self.random.sample(['a', 'b<', '</x>', 3, None, True, {'k': [1]}], 3)}

    def constant(self):
        return {'const': self.random.choice(['fixed', 7, None, ['a', 'b'], '{x}'])}

    def simple(self):
        return self.random.choice(
            ({'type': 'boolean'}, {'type': ['null', 'string']}, {}, {'type': 'null'})
        )

    def list(self, depth):
        schema = {'type': 'array', 'items': self.value(depth)}
        if self.random.random() < 0.5:
            # Lists without repetitions need a type with enough values.
            schema['minItems'] = self.random.randint(1, 3)
            if self.random.random() < 0.5:
                schema['items'] = {'type': 'string', 'minLength': 2}
                schema['uniqueItems'] = True
        return schema

    def reference(self, depth):
        name = f'd{len(self.definitions)}/~'
        self.definitions[name] = None
        self.definitions[name] = self.value(depth)
        return {'$ref': f'#/$defs/{name.replace("~", "~0").replace("/", "~1")}'}

    def choice(self, depth):
        keyword = self.random.choice(('anyOf', 'oneOf'))
        return {keyword: [{'type': 'boolean'}, {'type': 'string', 'minLength': 5}]}

    def all_of(self, depth):
        parts = [
            self.object(depth, ('path',)),
            {'type': 'object', 'properties': {'n': {'type': 'integer'}}, 'required': ['n']},
        ]
        parts[0].pop('additionalProperties', None)
        return {'allOf': parts}

    def nested(self, depth):
        return self.object(depth, self.random.sample(NAMES, 2))


_FLAT = ('text', 'number', 'enum', 'constant', 'simple')
