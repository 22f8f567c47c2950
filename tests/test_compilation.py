"""Programs are kept between processes where a config names a folder, and a step says how many."""

from python_process import run_python

CODE = """import sys
import jax
from zeroplay_jax.runtime.devices import CompilationCache
unset = jax.config.jax_compilation_cache_dir
assert CompilationCache('').take_metrics() == {}
assert jax.config.jax_compilation_cache_dir == unset
cache = CompilationCache(sys.argv[1])
jax.block_until_ready(jax.jit(lambda x: x * 3.0 + 1.0)(2.0))
print(cache.take_metrics(), cache.take_metrics())
"""


def test_a_second_process_reads_what_the_first_compiled(tmp_path):
    printed = []
    for _ in range(2):
        done = run_python('-c', CODE, tmp_path / 'programs', XLA_FLAGS='')
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.strip())
    none = "{'programs/cached': 0.0, 'programs/compiled': 0.0}"
    assert printed[0] == "{'programs/cached': 0.0, 'programs/compiled': 1.0} " + none
    assert printed[1] == "{'programs/cached': 1.0, 'programs/compiled': 0.0} " + none
