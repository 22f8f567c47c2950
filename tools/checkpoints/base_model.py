"""Trains the tiny checkpoints from scratch: `python -m tools.checkpoints.base_model [--out FOLDER] [--seed 0]`.

Training is supervised, on the demonstrations of `demos.py`, in four stages: copying; reading; all roles without
errors, which gives `clean/`, an upper bound for self-play; and demonstrations with deliberate errors
(`demos.ErrorRates`), which gives `base/`, the start of self-play: correct format, imperfect skill. Each folder also
contains its training log and the hashes of its files.

All randomness derives from (seed, stage, step), and stages have a fixed number of steps: the same seed on the same
machine gives the same files.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
from collections.abc import Mapping, Sequence

import numpy as np

from tools.checkpoints import batches, demos, supervised, tokenizer
from tools.checkpoints.demo import FORMS, Demo, Role
from tools.checkpoints.stages import STAGES, Stage
from zeroplay_jax.policy import transformer
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.settings.kinds import DEMONSTRATIONS
from zeroplay_jax.types import ENV

MINI = pathlib.Path(__file__).parents[2] / 'zeroplay_jax' / 'mini'
CLEAN = MINI / 'clean'
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

LIBRARY_COUNT = 8
WORLDS_PER_LIBRARY = 20
DIAGNOSED_EPISODES = 64  # per role
DIAGNOSED_TOKENS = 640  # longest episode of the diagnosis
NO_ERRORS = demos.ErrorRates()


# ---- diagnosis ---------------------------------------------------------------------------------------------


def diagnose(
    config: transformer.ModelConfig,
    params: transformer.Params,
    codec: Codec,
    seed: int,
    roles: Mapping[str, Role] = demos.ROLES,
    no_errors: demos.ErrorRates = NO_ERRORS,
) -> dict[str, dict[str, float]]:
    """Returns the teacher-forced accuracy per role on error-free episodes with held-out names.

    Args:
      config: the model.
      params: its parameters.
      codec: its tokenizer.
      seed: seed of the episodes.
      roles: the roles by name.
      no_errors: error rates of 0, in the type that the roles take.

    Returns:
      Role → the dict of `supervised.Predicted.figures`; for the solver also 'solver, N hops' → {'episodes': share}. The
      solver's share of whole episodes approximates its exact match with greedy decoding.
    """
    (heldout_library,) = batches.libraries(seed, 'evaluation', 1, WORLDS_PER_LIBRARY)
    figures = {}
    for name, role in roles.items():
        demonstrations = supervised.fixed_demos(
            name, role, heldout_library, no_errors, seed, DIAGNOSED_EPISODES
        )
        predicted = supervised.teacher_forced(
            config, params, codec, demonstrations, DIAGNOSED_TOKENS
        )
        figures[name] = predicted.figures()
        if name == 'solver':
            # A solver searches once per hop.
            hops = np.array([_search_count(demo) for demo in demonstrations])
            for hop_count in np.unique(hops):
                share = float(predicted.whole_episodes[hops == hop_count].mean())
                figures[f'solver, {hop_count} hops'] = {'episodes': share}
    return figures


def _search_count(demo: Demo) -> int:
    """Returns the number of searches of an episode."""
    return sum(part.source == ENV for part in demo.parts)


# ---- checkpoint folders ------------------------------------------------------------------------------------


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
) -> None:
    """Trains all stages and writes a folder in `out` for each saved one, replacing it.

    `layers` and `hops` are those of `write_config_and_tokenizer`.
    """
    with tempfile.TemporaryDirectory() as temporary_folder:
        # hf.save copies all but the weights from a folder; this one is needed during training only.
        template = pathlib.Path(temporary_folder)
        write_config_and_tokenizer(template, layers, hops)
        libraries = list(batches.libraries(seed, 'train', LIBRARY_COUNT, WORLDS_PER_LIBRARY))

        def diagnose_held_out(stage, config, params, codec):
            return diagnose(config, params, codec, seed, roles)

        supervised.train_checkpoints(
            stages, template, roles, libraries, seed, diagnose_held_out, out
        )


def build_from_clean(
    out: pathlib.Path,
    seed: int,
    stages: Sequence[Stage],
    roles: Mapping[str, Role],
    no_errors: demos.ErrorRates = NO_ERRORS,
) -> None:
    """Trains stages from the weights of `clean/` and writes `out`/<folder> for each saved one.

    Args:
      out: its folders are replaced.
      seed: seed of the episodes.
      stages: the stages, in order.
      roles: roles of their mixtures and of the diagnosis.
      no_errors: error rates of 0, in the type that the roles take.
    """
    libraries = list(batches.libraries(seed, 'train', LIBRARY_COUNT, WORLDS_PER_LIBRARY))

    def diagnose_held_out(stage, config, params, codec):
        return diagnose(config, params, codec, seed, roles, no_errors)

    supervised.train_checkpoints(
        stages, CLEAN, roles, libraries, seed, diagnose_held_out, out, start=CLEAN
    )


def make_parser(
    name: str, description: str, folders: str, out: pathlib.Path
) -> argparse.ArgumentParser:
    """Returns the parser of --out and --seed of a module that trains checkpoints.

    Args:
      name: of the module.
      description: its docstring; the first line is shown.
      folders: the folders that it writes, for the help.
      out: where it writes them by default.
    """
    parser = argparse.ArgumentParser(
        prog=f'python -m {name}',
        description=description.split('\n')[0],
        epilog=f'example:\n  python -m {name} --out again',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    replaced = f'folder for {folders}; by default what the repository has is replaced'
    parser.add_argument('--out', type=pathlib.Path, default=out, help=replaced)
    parser.add_argument('--seed', type=int, default=0, help='seed of all randomness (0)')
    return parser


def main_from_clean(
    name: str,
    description: str,
    folder: str,
    stages: Sequence[Stage],
    roles: Mapping[str, Role],
    no_errors: demos.ErrorRates = NO_ERRORS,
) -> None:
    """Parses the command line of a module that trains from `clean/`, and trains.

    Args:
      name: of the module.
      description: its docstring.
      folder: folder in zeroplay_jax/mini for its checkpoints.
      stages, roles, no_errors: as of `build_from_clean`.
    """
    folders = ' and '.join(f'{stage.folder}/' for stage in stages if stage.saved)
    args = make_parser(name, description, folders, MINI / folder).parse_args()
    build_from_clean(args.out, args.seed, stages, roles, no_errors)


def main() -> None:
    """Parses the command line and trains."""
    parser = make_parser('tools.checkpoints.base_model', __doc__, 'clean/ and base/', MINI)
    args = parser.parse_args()
    build(args.out, args.seed)


if __name__ == '__main__':
    main()
