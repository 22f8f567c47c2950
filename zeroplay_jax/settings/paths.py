"""Folders that come with the package."""

from __future__ import annotations

import pathlib

PACKAGE = pathlib.Path(__file__).parents[1]
# The checkpoint behind policy.path=''.
BUILT_IN_CHECKPOINT = PACKAGE / 'mini' / 'base'
# A small policy that also sets and does open tasks (configs/scope.py:mini).
OPEN_CHECKPOINT = PACKAGE / 'mini' / 'open' / 'base'
CONFIGS = PACKAGE / 'configs'
# A small policy that reads English, for texts of the user (configs/english.py).
ENGLISH_CHECKPOINT = PACKAGE / 'mini' / 'english' / 'base'
# Fifteen short texts, an example of a user's corpus.
EXAMPLE_TEXTS = PACKAGE / 'mini' / 'texts'
