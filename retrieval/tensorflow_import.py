"""Imports TensorFlow without Keras, which takes a third of its loading time and is not used here."""

from __future__ import annotations

import os
import sys
from types import ModuleType

_LEGACY_KERAS = 'TF_USE_LEGACY_KERAS'


def tensorflow() -> ModuleType:
    """Returns the module `tensorflow`; its first import loads neither Keras nor what Keras loads."""
    if 'tensorflow' in sys.modules:
        return sys.modules['tensorflow']
    # While it loads, TensorFlow imports the Keras that this variable names. The old one is rarely installed, and then
    # nothing is imported. Later uses of `tf.keras` read the variable again, so it is restored for them.
    before = os.environ.get(_LEGACY_KERAS)
    os.environ[_LEGACY_KERAS] = '1'
    try:
        import tensorflow
    finally:
        if before is None:
            del os.environ[_LEGACY_KERAS]
        else:
            os.environ[_LEGACY_KERAS] = before
    return tensorflow
