"""What stands beside the core: each extra is a file or a folder here, and a line of this table.

The core imports no extra but by `load_extra`. To remove one, delete its file or folder, its line and tests/extras/NAME.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from zeroplay_jax.types import UserError


class Extra(NamedTuple):
    """One extra.

    Attributes:
      about: what it does, in one sentence.
      package: what pip must have installed, as the extra itself says; '' for nothing more than the project needs.
      is_command: whether `zeroplay NAME` runs it (zeroplay_jax/commands.py).
    """

    about: str
    package: str = ''
    is_command: bool = False


EXTRAS = {
    'atif': Extra('Rollouts as ATIF documents of other agents, out and in.', is_command=True),
    'buckets': Extra('Runs whose workdir is in a bucket.', 'google-cloud-storage'),
    'evolution': Extra('What self-play asks over training.', 'scikit-learn', is_command=True),
    'figures': Extra('Figures of the papers, drawn from runs.', is_command=True),
    'grading': Extra('Open tasks graded in a folder that resumes, by one judge or more.'),
    'inputs': Extra('Questions, answers and documents, made of texts.', is_command=True),
    'mcp': Extra('The tools of MCP servers.', 'mcp'),
    'plan': Extra('Flags that fit a run into the memory of a machine.', is_command=True),
    'served_policy': Extra('A model behind an OpenAI-compatible server as the policy.'),
}


def load_extra(name: str, part: str = '') -> Any:
    """Returns the module of an extra, or a part of its folder.

    Args:
      name: key of `EXTRAS`.
      part: module within its folder; '' for the extra itself.

    Raises:
      UserError: it was removed.
    """
    if name not in EXTRAS:
        raise UserError(f'{name}: this installation is without zeroplay_jax/extras/{name}')
    return importlib.import_module('.'.join(filter(None, (__name__, name, part))))
