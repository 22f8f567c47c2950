"""Heavy libraries are imported only when they are used: Keras and bm25s. Keras works afterwards."""

import os
import subprocess
import sys

from python_process import ROOT, run_python

CODE = """
import os, sys
from zeroplay_jax.retrieval.command import import_scann, import_tensorflow
builder = import_scann().builder
assert 'tensorflow' not in sys.modules, 'TensorFlow was loaded'
tf = import_tensorflow()
assert import_scann().builder is builder
assert tf is import_tensorflow()
assert 'keras' not in sys.modules and 'sklearn' not in sys.modules, 'Keras was loaded'
assert 'TF_USE_LEGACY_KERAS' not in os.environ
import zeroplay_jax.run.loop
for name in ('keras', 'bm25s'):
    assert name not in sys.modules, f'{name} was loaded'
# JAX raises here if an import has started its devices, whose number the config sets (`cpu_devices`).
import jax
jax.config.update('jax_num_cpu_devices', 2)
assert len(jax.devices('cpu')) == 2
assert tf.keras.__version__.startswith('3')
assert float(tf.keras.losses.mse([[1.0]], [[3.0]])[0]) == 4.0
"""


def test_heavy_libraries_are_loaded_only_when_they_are_used():
    # The devices of the test session (tests/conftest.py) would override `jax_num_cpu_devices`.
    result = run_python('-c', CODE)
    assert result.returncode == 0, result.stderr


SWALLOWED = """
import signal, sys
from zeroplay_jax.retrieval import command


class Swallows:
    '''Loads like a library that catches everything.'''

    def find_spec(self, name, path=None, target=None):
        if name == 'tensorflow':
            try:
                signal.raise_signal(signal.SIGINT)
            except BaseException:
                print('swallowed')


sys.meta_path.insert(0, Swallows())
try:
    command.import_tensorflow()
except KeyboardInterrupt:
    print('interrupted', signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_ctrl_c_during_the_import_is_not_lost():
    words = ['env', '--default-signal=INT', sys.executable, '-c', SWALLOWED]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, env=os.environ | {'PYTHONPATH': str(ROOT)}
    )
    assert done.stdout == 'interrupted True\n', done.stderr
