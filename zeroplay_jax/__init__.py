"""Search agents by self-play, in JAX."""

import os

__version__ = '0.2.0'

# What transformers says while it loads (that PyTorch is not there) concerns nobody: it tokenizes here, and no more.
os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')
