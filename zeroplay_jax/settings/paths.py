"""Folders that come with the package."""

from __future__ import annotations

import pathlib

PACKAGE = pathlib.Path(__file__).parents[1]
# The checkpoint behind policy.path=''.
BUILT_IN_CHECKPOINT = PACKAGE / 'mini' / 'base'
CONFIGS = PACKAGE / 'configs'
