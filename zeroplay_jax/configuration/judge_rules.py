"""Rules for `config.judge`."""

from __future__ import annotations

from ml_collections import ConfigDict

from zeroplay_jax.selfplay.recipe import Recipe
from zeroplay_jax.settings.errors import fail


def check_judge(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses a judge that cannot answer for this corpus."""
    judge = config.judge
    # The rule compares sentences of the worlds' plain form; on other text it would reject everything.
    is_used = 'judge' in (config.reward.answer, config.eval.metric) or bool(config.eval.tasks)
    if is_used and judge.kind == 'rule' and config.retrieval.kind != 'world':
        problem = 'the rule works in miniature worlds only'
        fail('judge.kind', 'rule', problem, 'give policy or endpoint')
    if judge.kind == 'policy' and judge.tokens >= config.sampler.context:
        problem = (
            f'a reply leaves no room for a prompt in a slot of {config.sampler.context} '
            '(sampler.context)'
        )
        fail('judge.tokens', judge.tokens, problem, 'give less')
