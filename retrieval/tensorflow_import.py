"""Imports TensorFlow without Keras: Keras takes a third of the import time and is not used here."""

from __future__ import annotations

import os
import sys
from types import ModuleType

_LEGACY_KERAS = 'TF_USE_LEGACY_KERAS'


def import_tensorflow() -> ModuleType:
    """Returns the module `tensorflow`; its first import loads neither Keras nor the packages that Keras imports."""
    if 'tensorflow' in sys.modules:
        return sys.modules['tensorflow']
    # With the value 1 TensorFlow looks for the package tf_keras instead of keras. tf_keras is rarely installed, and
    # then no Keras is loaded. The variable is restored, because later uses of tf.keras read it again.
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
