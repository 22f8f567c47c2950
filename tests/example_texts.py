"""The texts that ship with the project."""

from zeroplay_jax.settings.kinds import EXAMPLE_TEXTS


def example_passages():
    """(title, text) of each file."""
    passages = []
    for path in sorted(EXAMPLE_TEXTS.glob('*.txt')):
        title, _, text = path.read_text().partition('\n')
        passages.append((title, text))
    return passages
