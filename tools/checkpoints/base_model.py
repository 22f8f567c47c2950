"""Trains the tiny checkpoints from scratch: `python -m tools.checkpoints.base_model [--out FOLDER] [--seed 0]`.

Training is supervised, on the demonstrations of `demos.py`, in three stages: copying; reading; all roles, which gives
`base/`, the start of self-play. The folder also contains its training log and the hashes of its files.

All randomness derives from (seed, stage, step), and stages have a fixed number of steps: the same seed on the same
machine gives the same files.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
from collections.abc import Mapping, Sequence

from tools.checkpoints import batches, demos, supervised, tokenizer
from tools.checkpoints.demo import FORMS, Role
from tools.checkpoints.stages import Stage
from zeroplay_jax.settings.kinds import DEMONSTRATIONS

MINI = pathlib.Path(__file__).parents[2] / 'zeroplay_jax' / 'mini'
BASE = MINI / 'base'
LAYERS = 3
# A Qwen3 configuration, so that any tool that reads Hugging Face folders loads the checkpoints.
ARCHITECTURE = {
    'architectures': ['Qwen3ForCausalLM'],
    'model_type': 'qwen3',
    'hidden_size': 128,
    'intermediate_size': 384,
    'num_hidden_layers': LAYERS,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 32,
    'hidden_act': 'silu',
    'rms_norm_eps': 1e-6,
    'rope_theta': 10000.0,
    'max_position_embeddings': 4096,
    'attention_bias': False,
    'attention_dropout': 0.0,
    'use_sliding_window': False,
    'tie_word_embeddings': True,
    'initializer_range': 0.1,
    'torch_dtype': 'float32',
}

STAGES = (
    # Without copying and reading first, the roles take several times as many steps to learn.
    Stage(
        # Short rows: a passage and its copy.
        'copying',
        steps=1000,
        rows=16,
        tokens=64,
        adam_rate=5e-3,
        decay_share=0.0,
        context_weight=0.25,
        shares={'copy': 0.45, 'passage': 0.55},
    ),
    Stage(
        # Longer rows: three passages and their facts.
        'reading',
        steps=300,
        rows=6,
        tokens=320,
        adam_rate=4e-3,
        decay_share=0.0,
        context_weight=0.2,
        shares={'reading': 0.35, 'retelling': 0.3, 'solver': 0.35},
    ),
    # All roles with the shares of `demos.ROLES`.
    Stage('clean', steps=600, adam_rate=3e-3, decay_share=0.35, folder='base'),
)

LIBRARY_COUNT = 8
WORLDS_PER_LIBRARY = 20


def write_config_and_tokenizer(
    folder: pathlib.Path, layers: int = LAYERS, hops: int | None = None
) -> None:
    """Writes a checkpoint folder without weights: config.json, the tokenizer's files, and what its roles are shown.

    Args:
      layers: of the model.
      hops: most hops of a demonstration of a role; None writes no file about it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prompt_texts = [*(prompt.user for prompt in FORMS.values()), 'Describe the']
    trained_tokenizer = tokenizer.train(prompt_texts)
    tokenizer.write(folder, trained_tokenizer)
    # A multiple of 64 divides over devices. Like large models, it has more rows than the tokenizer has tokens.
    vocab_size = -(-trained_tokenizer.get_vocab_size() // 64) * 64
    sizes = {'num_hidden_layers': layers, 'vocab_size': vocab_size}
    tokenizer.write_config(folder, trained_tokenizer, ARCHITECTURE | sizes)
    if hops is not None:
        (folder / DEMONSTRATIONS).write_text(json.dumps({'hops': hops}) + '\n')


def build(
    out: pathlib.Path,
    seed: int,
    stages: Sequence[Stage] = STAGES,
    roles: Mapping[str, Role] = demos.ROLES,
    layers: int = LAYERS,
    hops: int | None = None,
    start: pathlib.Path | None = None,
) -> None:
    """Trains stages and writes a folder in `out` for each that names one, replacing it.

    Args:
      out: for the folders.
      seed: of weights and episodes.
      stages: in order.
      roles: of their mixtures.
      layers, hops: those of `write_config_and_tokenizer`.
      start: folder that training goes on from, with its tokenizer; None: random weights and a new tokenizer.
    """
    libraries = list(batches.libraries(seed, 'train', LIBRARY_COUNT, WORLDS_PER_LIBRARY))
    with tempfile.TemporaryDirectory() as folder:
        # hf.save copies all but the weights from a folder; this one is needed during training only.
        template = start or pathlib.Path(folder)
        if start is None:
            write_config_and_tokenizer(template, layers, hops)
        supervised.train_checkpoints(stages, template, roles, libraries, seed, out, start=start)


def parser(command: str, description: str, folder: str) -> argparse.ArgumentParser:
    """Returns the parser of a module that trains checkpoints.

    Args:
      command: name of the module, and what its shortest command has behind it.
      description: its docstring; the first line is shown.
      folder: of the packaged policies, where its folders are by default.
    """
    module = f'python -m tools.checkpoints.{command}'
    result = argparse.ArgumentParser(
        prog=module.partition(' --')[0],
        description=description.partition('\n')[0],
        epilog=f'example:\n  {module} --out again',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    replaced = 'for the folders; by default those of the repository are replaced'
    result.add_argument('--out', type=pathlib.Path, default=MINI / folder, help=replaced)
    result.add_argument('--seed', type=int, default=0, help='seed of all randomness (0)')
    return result


def main() -> None:
    """Parses the command line and trains."""
    args = parser('base_model', __doc__, '').parse_args()
    build(args.out, args.seed)


if __name__ == '__main__':
    main()
