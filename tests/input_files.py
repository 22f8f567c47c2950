"""Files of questions, answers and documents."""

import json


def write(path, *lines):
    """Writes records, or lines as they are; returns the name of the file."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text('\n'.join(texts))
    return str(path)
