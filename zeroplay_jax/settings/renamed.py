"""Config fields that had other names in earlier versions, or are gone."""

from __future__ import annotations

import copy

from zeroplay_jax.types import Json

# Old name → new name; a config or flag with the old one is refused with the new one.
RENAMED_FIELDS = {
    'tools.family': 'tools.syntax',
    'tools.mcp_url': 'tools.mcp_servers',
    'retrieval.most_failed': 'retrieval.max_failure_rate',
    'judge.most_failed': 'judge.max_failure_rate',
    'schedule.group': 'drzero.group',
    'schedule.first': 'ssp.first_update',
    'reward.invalid': 'ssp.invalid_reward',
    # One field for two recipes; it was split.
    'check.on': 'ssp.answerability_check (SSP) or config.scope.gates (SCOPE)',
    'check.noise': 'ssp.noise',
    'check.unit': 'ssp.noise_unit',
    'check.code': 'ssp.code_gate',
    'fill.kind': 'ssp.fill',
    'fill.period': 'ssp.fill_period',
    'fill.rounds': 'ssp.fill_rounds',
    'schedule.searches_below_hops': 'scope.searches_below_hops',
    'reward.code_format': 'scope.code_format',
    'reward.search_weight': 'scope.search_weight',
    'reward.length_factor': 'scope.length_factor',
    'reward.soft_length': 'scope.soft_length',
    'reward.hard_length': 'scope.hard_length',
}

_OF_THE_ROLE = 'set that field of <role>; a value network has the optimiser of its role'

# Fields that are gone: the value with which they did nothing, and what to do instead.
REMOVED_FIELDS = {
    'drzero.grounding': (
        False,
        'reject such proposals in a recipe of your own (Proposal.is_grounded)',
    ),
    'reward.grounding': (
        False,
        'reject such proposals in a recipe of your own (Proposal.is_grounded)',
    ),
    'policy.adapters.teacher': (
        'products',
        'leave it out; a teacher averages the products of adapters',
    ),
    'value_network.warmup_steps': (0, _OF_THE_ROLE),
    'value_network.weight_decay': (0.01, _OF_THE_ROLE),
    'value_network.beta1': (0.9, _OF_THE_ROLE),
    'value_network.beta2': (0.999, _OF_THE_ROLE),
    'value_network.clip_norm': (1.0, _OF_THE_ROLE),
    'compilation.gigabytes': (0.0, 'set JAX_COMPILATION_CACHE_MAX_SIZE, in bytes'),
    'log.project': (
        'zeroplay_jax',
        'set WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME in the environment',
    ),
    'retrieval.cache': (100_000, 'leave it out; the results of 100,000 queries stay in memory'),
    'retrieval.overfetch': (32, 'give --overfetch to python -m zeroplay_jax.retrieval.build'),
    'retrieval.ready_seconds': (600.0, 'leave it out; a run waits ten minutes for a server'),
    'retrieval.retries': (4, 'leave it out; a search is tried five times'),
    'sampler.put_rows': (16, 'leave it out; it is 16'),
    'sampler.put_tokens': (96, 'leave it out; it is 96'),
    'proposer.skip_uninformative': (True, 'leave it out; rows without any gradient are left out'),
    'solver.skip_uninformative': (True, 'leave it out; rows without any gradient are left out'),
    'tools.max_queries': (3, 'leave it out; a call asks at most three queries'),
    'rollout.switch': ('never', 'leave it out; rollouts keep the weights with which they began'),
}

OLD_FIELDS = RENAMED_FIELDS.keys() | REMOVED_FIELDS.keys()

# Of these only the name has changed, so that runs of earlier versions go on with their values.
_SAME_VALUES = {('tools', 'mcp_url'): 'mcp_servers'}


def with_new_names(stored: Json) -> Json:
    """Returns the object in a config.json as this version writes it.

    Fields whose values mean the same as before get their new names, as our full prompts do; fields that are gone are
    left out where they did nothing.
    """
    if stored.get('prompts') == 'paper':
        stored = {**stored, 'prompts': 'full'}
    renamed = copy.deepcopy(stored)
    for (section, old_name), new_name in _SAME_VALUES.items():
        fields = renamed.get(section)
        if isinstance(fields, dict) and old_name in fields:
            fields[new_name] = fields.pop(old_name)
    for name, (neutral_value, _) in REMOVED_FIELDS.items():
        *sections, field = name.split('.')
        fields = renamed
        for section in sections:
            fields = fields.get(section) if isinstance(fields, dict) else None
        if isinstance(fields, dict) and field in fields and fields[field] == neutral_value:
            del fields[field]
    return renamed
