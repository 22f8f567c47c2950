"""Reads the adapter_config.json of a PEFT folder. Imports no JAX, because a config is checked before JAX is loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from safetensors import SafetensorError, safe_open

from zeroplay_jax.retrieval import json_text
from zeroplay_jax.retrieval.command import warn_once
from zeroplay_jax.settings.kinds import built_in_path
from zeroplay_jax.types import UserError

CONFIG_FILE = 'adapter_config.json'
WEIGHTS_FILE = 'adapter_model.safetensors'

# Values of fields of PEFT with which an adapter computes what is computed here. Other fields, but for those below, must
# not be set: PEFT gets new kinds of adapters by new fields.
_SUPPORTED: dict[str, tuple] = {
    'peft_type': ('LORA',),
    'bias': ('none', None),
    # Other values, such as 'pissa', change the base when PEFT loads the adapter.
    'init_lora_weights': (True, False, 'gaussian', 'orthogonal', 'eva', None),
}
# Fields of PEFT that `read` reads otherwise, and those without an effect on a trained adapter of a supported kind.
# `ensure_weight_tying` concerns saved embeddings, which are refused.
WITHOUT_EFFECT = frozenset(
    """
auto_mapping base_model_name_or_path ensure_weight_tying eva_config exclude_modules inference_mode layers_pattern
lora_alpha lora_dropout megatron_core peft_version qalora_group_size r revision runtime_config target_modules
task_type
""".split()
)
_MERGE = 'merge the adapter into its base with merge_and_unload of PEFT'
_UNSET: tuple = (None, False, '', [], {})
# Samples of a file of weights that are compared, and their length.
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16
# Suffix of the names of linear layers in PEFT, and ours without it. Some have it in the middle.
_MODULE_SUFFIX = '_proj'
# Prefix of the names of tensors in PEFT.
ADAPTED = 'base_model.model.'


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """What an adapter computes.

    Attributes:
      rank: of the adapter.
      alpha: its product is multiplied with alpha / rank.
      linears: adapted linear layers, sorted.
      base: folder of the base.
      modules: names of the adapted modules in `transformers`; () names them by their last part, such as q_proj.
    """

    rank: int
    alpha: float
    linears: tuple[str, ...]
    base: pathlib.Path
    modules: tuple[str, ...] = ()

    def fields(self) -> dict[str, Any]:
        """Returns the content of adapter_config.json."""
        modules = [
            linear if _MODULE_SUFFIX in linear else linear + _MODULE_SUFFIX
            for linear in self.linears
        ]
        return {
            'peft_type': 'LORA',
            'task_type': 'CAUSAL_LM',
            'base_model_name_or_path': str(self.base),
            'r': self.rank,
            'lora_alpha': self.alpha,
            'lora_dropout': 0.0,
            'target_modules': list(self.modules) or modules,
            'bias': 'none',
            'fan_in_fan_out': False,
            'use_rslora': False,
            'use_dora': False,
            'modules_to_save': None,
            'init_lora_weights': True,
            'inference_mode': True,
        }


def holds_other_weights(folder: pathlib.Path, other: pathlib.Path) -> bool:
    """Returns whether two folders of a base have different safetensors files.

    Names and sizes are compared, and samples of the content, because a base may have many GiB.
    """
    sizes, other_sizes = (
        {path.name: path.stat().st_size for path in each.glob('*.safetensors')}
        for each in (folder, other)
    )
    return sizes != other_sizes or any(
        sample != other_sample
        for name in sizes
        for sample, other_sample in zip(_samples(folder / name), _samples(other / name))
    )


def _samples(path: pathlib.Path) -> Iterator[bytes]:
    """Yields parts of a file, from its beginning to its end."""
    size = path.stat().st_size
    with path.open('rb') as file:
        for start in range(0, size, max(1, size // _SAMPLES)):
            file.seek(start)
            yield file.read(_SAMPLE_BYTES)


def is_adapter(folder) -> bool:
    """Returns whether a folder is one of PEFT."""
    return (pathlib.Path(folder) / CONFIG_FILE).is_file()


def base_folder(folder) -> pathlib.Path:
    """Returns the folder of an adapter's base; the folder itself if it is not an adapter.

    Raises:
      UserError: the base is not there.
    """
    folder = pathlib.Path(folder)
    if not is_adapter(folder):
        return folder
    base = read(folder).base
    if not base.is_dir():
        raise UserError(
            f'{folder / CONFIG_FILE}: base_model_name_or_path={str(base)!r} is no folder here; write the folder of the '
            'base into the file'
        )
    if is_adapter(base):
        raise UserError(
            f'{folder / CONFIG_FILE}: base_model_name_or_path={str(base)!r} is an adapter itself; merge it into its '
            'base with peft, and write that folder into the file'
        )
    return base


def read(folder) -> AdapterConfig:
    """Returns the settings of an adapter folder.

    Raises:
      UserError: the folder has no adapter, or one that is not supported.
    """
    path = pathlib.Path(folder) / CONFIG_FILE
    try:
        fields = json_text.read_object(path, float)
    except OSError:
        raise UserError(f'{path.parent}: no adapter; name a folder with {CONFIG_FILE}') from None
    except ValueError as error:
        raise UserError(f'{path}: cannot be read ({error!r}); copy the folder again') from None
    for field in sorted(fields.keys() | _SUPPORTED):
        supported = _SUPPORTED.get(field, _UNSET)
        if field not in WITHOUT_EFFECT and fields.get(field) not in supported:
            raise UserError(f'{path}: {field}={fields.get(field)!r} is not supported; {_MERGE}')
    rank: Any = fields.get('r')
    alpha: Any = fields.get('lora_alpha')
    stored_base: Any = fields.get('base_model_name_or_path')
    # True and false are numbers in Python.
    sound = {
        'r': type(rank) is int and rank > 0,
        'lora_alpha': type(alpha) in (int, float) and 0 < alpha <= sys.float_info.max,
        'base_model_name_or_path': isinstance(stored_base, str) and stored_base != '',
    }
    for field, is_sound in sound.items():
        if not is_sound:
            raise UserError(f'{path}: {field}={fields.get(field)!r}; write that of its training')
    modules: Any = fields.get('target_modules')
    # An expression, or a list with exceptions: the tensors say which modules it names.
    if not isinstance(modules, list) or fields.get('exclude_modules'):
        modules = _modules_of_tensors(path.parent / WEIGHTS_FILE)
    # A module may be named with its parents, such as self_attn.q_proj.
    linears = {str(name).rpartition('.')[2].removesuffix(_MODULE_SUFFIX) for name in modules}
    # PEFT needs a path in the file; that of a built-in checkpoint may be in a clone that is gone.
    base = pathlib.Path(built_in_path(stored_base))
    if base.is_dir() and not os.path.exists(stored_base):
        warn_once(
            f'{path}: base_model_name_or_path={stored_base!r} is not there; adds the adapter to {base}'
        )
    return AdapterConfig(rank, float(alpha), tuple(sorted(linears)), base)


def _modules_of_tensors(path: pathlib.Path) -> list[str]:
    """Returns the names of the modules that a file has factors for; [] if it cannot be read."""
    modules = []
    # A file that is missing or damaged is reported by whoever reads the weights.
    with contextlib.suppress(OSError, SafetensorError), safe_open(path, 'np') as file:
        for name in file.keys():
            module, factor, _ = name.partition('.lora_A.')
            if factor:
                modules.append(module)
    return modules


def refuse_feed_forward(linears: Sequence[str], name: str) -> None:
    """Raises UserError for adapters of the experts of a mixture; `name`: of what lists the layers."""
    feed_forward = sorted({'gate', 'up', 'down'} & set(linears))
    if feed_forward:
        raise UserError(
            f'{name}: {", ".join(feed_forward)} cannot have adapters in a mixture of experts; adapt some of q, k, v, o'
        )
