"""Evaluates a policy folder on held-out questions, greedily and with search.

    python -m zeroplay_jax.evaluate --config=configs/quickstart.py
    python -m zeroplay_jax.evaluate --config=configs/quickstart.py --config.policy.path=zeroplay_jax/mini/clean

Prints exact match by hop count with 95 % intervals, then the same as one JSON line.
"""

import json

from ml_collections import config_flags

from zeroplay_jax import config as configuration
from zeroplay_jax import start

_CONFIG = config_flags.DEFINE_config_file('config', None, 'What to evaluate: a Python file.', lock_config=True)


def main(argv: list[str]) -> None:
    """Checks the command, then evaluates."""
    configuration.check_command(argv, _CONFIG.value, '.')
    start.load_libraries()
    from zeroplay_jax import setup  # loads JAX and TensorFlow: only once the config is sound
    from zeroplay_jax.evaluation import statistics
    from zeroplay_jax.evaluation.evaluate import evaluate

    parts = setup.build(_CONFIG.value)
    for name in parts.table.scheduler.lanes:
        parts.table.scheduler.publish(name, parts.params, 0)
    correct, _ = evaluate(parts.exam, parts.corpus.questions, 0)
    figures = {f'hop{h}': statistics.mean_interval(c) for h, c in correct.items()}
    figures['mean'] = statistics.mean_interval(statistics.headline(correct))
    for name, (mean, low, high) in figures.items():
        print(f'{name:5} {mean:.3f} [{low:.3f}, {high:.3f}]')
    print(json.dumps({name: [round(x, 4) for x in values] for name, values in figures.items()}))


if __name__ == '__main__':
    start.command('zeroplay_jax.evaluate', main)
