"""The packages in examples/, in runs of a few seconds."""

import importlib

from zeroplay_jax.configuration.rules import check
from zeroplay_jax.selfplay.recipe import recipe_class


def make_config(example, *roles):
    """The config of an example, small; `roles` are trained beside the solver."""
    config = importlib.import_module(f'examples.{example}.config').get_config()
    config.progress = False
    config.world.update(train=(0, 4), evaluation=(0, 2))
    config.eval.update(questions=1, hops=(1,))
    if recipe_class(config.recipe).input_files:
        config.inputs.world_questions = 16
    config.sampler.slots, config.micro.rows = 8, 2
    for role in ('solver', *roles):
        config[role].update(batch=2, samples=4, learning_rate=1e-3)
    check(config)
    return config
