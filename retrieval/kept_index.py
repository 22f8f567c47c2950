"""An index that is trained once and then read from a cache."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import tempfile
from collections.abc import Sequence

from . import index
from .types import Encoder


def trained_once(
    encoder: Encoder, titles: Sequence[str], texts: Sequence[str], cache: pathlib.Path
) -> index.ScannIndex:
    """Returns `index.ScannIndex.build(encoder, titles, texts)`, whose trained part `cache` keeps for the next call.

    Training is a function of the vectors, the module `index` and ScaNN; a digest of the three names the folder.
    """
    untrained = index.ExactIndex.build(encoder, titles, texts)
    parts = (encoder, untrained.corpus, untrained._vectors)
    digest = hashlib.sha256(pathlib.Path(index.__file__).read_bytes())
    digest.update(importlib.metadata.version('scann').encode())
    digest.update(untrained._vectors.tobytes())
    kept = cache / digest.hexdigest()
    if kept.exists():
        parameters = json.loads((kept / 'parameters.json').read_text())
        settings = {name: parameters[name] for name in index.SCANN_PARAMETERS}
        opened = index.ScannIndex(*parts, **settings, saved=kept)
        opened.parameters = parameters
        return opened
    trained = index.ScannIndex(*parts)
    if trained.parameters['kind'] == 'scann':
        # A cache that cannot be written, or that another process has written meanwhile, costs nothing but time.
        with contextlib.suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as draft:
                trained.save(pathlib.Path(draft))
                pathlib.Path(draft, 'parameters.json').write_text(json.dumps(trained.parameters))
                os.rename(draft, kept)
    return trained
