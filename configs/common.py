"""All fields of a run with their defaults. A recipe's config starts from here and changes a few.

Flags override any field: `--config.solver.learning_rate=1e-4`. Fields, bounds and meaning are
defined in zeroplay_jax/settings/schema.py and listed in docs/configuration.md; a field that is not
there is an error.
"""

from ml_collections import ConfigDict

from zeroplay_jax.configuration.fields import default_config
from zeroplay_jax.configuration.fields import fit_to_recipe as add_sections

__all__ = ['add_sections', 'check_variant', 'get_config', 'shrink', 'small', 'use_wikipedia']


def get_config(recipe: str = 'drzero') -> ConfigDict:
    """Defaults of the fields that `recipe` reads: a built-in name, or the import path of a module."""
    return default_config(recipe)


def check_variant(system: str, variant: str) -> None:
    """Raises ValueError for another variant of a system than '', 'mini' and 'small'."""
    if variant not in ('', 'mini', 'small'):
        name = f'configs/{system}.py'
        raise ValueError(f'no variant {variant!r}; there is {name}, {name}:mini and {name}:small')


def use_wikipedia(config: ConfigDict, model: str, index: str) -> None:
    """Sets what the papers' runs have in common: bfloat16, an index of Wikipedia, questions of NQ."""
    config.policy.update(
        path=f'checkpoints/{model}', dtype='bfloat16', remat=True, logits='trained'
    )
    # Made by zeroplay index.
    config.retrieval.update(kind='folder', path=f'indexes/{index}')
    config.eval.update(file='data/nq_test.jsonl', questions=500)
    # All devices, where no flag of a plan (extras/plan) says otherwise.
    config.mesh.fsdp = -1
    config.prompts = 'full'
    config.tools.top_k = 3
    config.sampler.burst = 16
    config.micro.order = 'longest_first'


def shrink(config: ConfigDict) -> None:
    """Sets what the miniature runs have in common."""
    config.sampler.slots = 32
    config.eval.questions = 8
    # The built-in policies are so sure that at 1.0 the answers to most questions are all right or all wrong.
    config.solver.temperature = 1.5
    # Three steps of a few questions may all be empty by chance; the other stages are to run all the same.
    config.stop_after_empty_steps = 4


def small(config: ConfigDict) -> None:
    """Sets what runs of Qwen2.5-0.5B-Instruct on texts of a user have in common: they fit on one device of 16 GB."""
    config.policy.update(
        path='checkpoints/Qwen2.5-0.5B-Instruct', attention='blocked', logits='trained'
    )
    # On CPUs layers are recomputed in a loop only.
    config.policy.update(remat=True, scan=True)
    config.policy.adapters.rank = 32
    config.retrieval.update(kind='folder', path='own/index')
    config.eval.file = 'own/questions.jsonl'
    config.prompts = 'full'
    config.tools.update(syntax='qwen', top_k=3)
    # Documents of zeroplay inputs cloze have one hop.
    config.schedule.update(iterations=1, hop_ratio=(1,))
    config.rollout.update(prompt_tokens=2048, turn_tokens=256, observation_tokens=512, max_turns=3)
    # 2048 + 3 · 256 + 2 · 512 = 3840
    config.sampler.update(slots=32, context=4096, chunk=256, fill_rows=2, burst=16)
    config.micro.update(rows=1, tokens=4096, order='longest_first')
    for role in filter(None, (config.get('proposer'), config.get('solver'))):
        # Ten times those of whole weights (docs/adapters.md).
        role.update(learning_rate=1e-5, warmup_steps=0, steps=50, batch=32)
