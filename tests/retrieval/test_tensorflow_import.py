"""TensorFlow is imported without Keras, and Keras works afterwards."""

import subprocess
import sys

CODE = """
import os, pathlib, sys, tempfile
from zeroplay_jax.retrieval.tensorflow_import import import_tensorflow
tf = import_tensorflow()
assert tf is import_tensorflow()
from zeroplay_jax.runtime.metrics import metric_writers
assert 'keras' not in sys.modules and 'sklearn' not in sys.modules, 'Keras was loaded'
assert 'TF_USE_LEGACY_KERAS' not in os.environ
folder = tempfile.mkdtemp()
writer = metric_writers.SummaryWriter(folder)
writer.write_scalars(1, {'loss': 0.5})
writer.write_hparams({'rate': 0.1})
writer.close()
assert any(pathlib.Path(folder).iterdir())
assert 'keras' not in sys.modules and 'sklearn' not in sys.modules, 'Keras was loaded'
assert tf.keras.__version__.startswith('3')
assert float(tf.keras.losses.mse([[1.0]], [[3.0]])[0]) == 4.0
"""


def test_keras_is_loaded_only_when_it_is_used():
    result = subprocess.run([sys.executable, '-c', CODE], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
