"""Looks up the answers of questions in the miniature worlds."""

import re


def resolve(world, text):
    """Returns (answer, hops) of a question in the form of a miniature world.

    The answer is None if a fact is missing; the result is (None, 0) if the text has another form.
    """
    # Relations and names are single words, as `question` writes them.
    match = re.fullmatch(r'What is ((?:the \w+ of )+)(\w+)\?', text.strip())
    if not match:
        return None, 0
    relations = re.findall(r'the (\w+) of', match[1])
    value = match[2]
    # The relation next to the entity is applied first.
    for relation in reversed(relations):
        if value is None:
            break
        value = world.value(value, relation)
    return value, len(relations)
