"""Rule about the list of passages that training does not read."""

from __future__ import annotations

import pathlib

from ml_collections import ConfigDict

from zeroplay_jax.retrieval.suggestions import similar_path
from zeroplay_jax.selfplay.recipe import Recipe
from zeroplay_jax.settings.errors import fail


def check_held_out(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses a list of held-out passages that is missing, or that training would read nevertheless."""
    path = config.retrieval.held_out
    if not path:
        return
    if config.retrieval.kind == 'world':
        problem = 'the miniature world holds out worlds, not passages'
        fail('retrieval.held_out', path, problem, 'leave it empty')
    if not pathlib.Path(path).is_file():
        fix = 'name JSON lines with "document_id"; python -m zeroplay_jax.inputs cloze writes them'
        fail('retrieval.held_out', path, 'no such file', fix + similar_path(path))
    if 'documents' in recipe.input_files and not config.inputs.documents:
        problem = 'documents to ask about would be drawn from all passages'
        fix = 'name a file of documents in inputs.documents'
        fail('retrieval.held_out', path, problem, fix)
