"""What a config may hold: one rule per field, and the combinations that cannot work.

Each check raises one line that names the field, its value, what is wrong and how to mend it.
"""

from __future__ import annotations

import ast
import contextlib
import math
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from ml_collections import ConfigDict

from zeroplay_jax.configs import common
from zeroplay_jax.mini import world
from zeroplay_jax.objectives import schedules
from zeroplay_jax.types import UserError

Rule = tuple[Callable[[Any], bool], str]

PACKAGE = pathlib.Path(__file__).parent
BUILT_IN = PACKAGE / 'mini' / 'base'  # the checkpoint behind policy.path=''
ROLES = ('proposer', 'solver')
# Files that the games take, of config.inputs; other recipes may take any.
_DOCUMENTS = ('documents',)
INPUTS = dict(
    drzero=_DOCUMENTS,
    piplay=_DOCUMENTS,
    scope=('documents', 'tasks'),
    ssp=('answers',),
    dspo=('questions',),
)


class ConfigError(UserError):
    """A mistake of the user: one line with the field, its value, what is wrong, and how to mend it."""


def fail(field: str, value: Any, wrong: str, mend: str) -> NoReturn:
    """Raises the one line."""
    shown = value if isinstance(value, str) and value else repr(value)
    raise ConfigError(f'config.{field}={shown}: {wrong}; {mend}')


def fields(config: ConfigDict, prefix: str = '') -> Iterator[tuple[str, Any]]:
    """All leaves of a config as (dotted name, value), in the order of the file."""
    for name in config:
        value = config[name]
        if isinstance(value, ConfigDict):
            yield from fields(value, f'{prefix}{name}.')
        else:
            yield f'{prefix}{name}', value


# ------------------------------------------------------------------------------------------------------------
# Values: one rule per field
# ------------------------------------------------------------------------------------------------------------


def _at_least(low: float) -> Rule:
    return lambda x: math.isfinite(x) and x >= low, f'give {low} or more'


def _above(low: float) -> Rule:
    return lambda x: math.isfinite(x) and x > low, f'give more than {low}'


def _within(low: float, high: float) -> Rule:
    return lambda x: low <= x <= high, f'give {low} to {high}'


def _one_of(*choices: Any) -> Rule:
    return lambda x: x in choices, f'give one of {", ".join(str(choice) for choice in choices)}'


_BELOW_ONE: Rule = lambda x: 0 <= x < 1, 'give 0 or more and less than 1'
_SEEDS: Rule = (
    lambda x: len(x) == 2 and x[0] >= 0 and x[1] >= 1,
    'give (first seed, how many), such as (0, 8)',
)
_DEVICES: Rule = lambda x: x == -1 or x >= 1, 'give 1 or more, or -1 for all that are left'
_HOPS = range(1, 5)

_ROLE_RULES: dict[str, Rule] = {
    'learning_rate': _above(0),
    'warmup_steps': _at_least(0),
    'weight_decay': _at_least(0),
    'beta1': _BELOW_ONE,
    'beta2': _BELOW_ONE,
    'clip_norm': _above(0),
    'steps': _at_least(0),
    'batch': _at_least(1),
    'samples': _at_least(1),
    'temperature': _above(0),
    'baseline': _one_of('mean', 'loo', 'none'),
    'scale': _one_of('std', 'batch', 'none'),
    'std_ddof': _one_of(0, 1),
    'singleton': _one_of('zero', 'raw'),
    'loss': _one_of('reinforce', 'token_pg', 'sequence_pg', 'geometric_pg'),
    'clip_low': (lambda x: 0 < x <= 1, 'give more than 0, at most 1'),
    'clip_high': _above(0),
    'dual_clip': (lambda x: x == 0 or 1 < x < math.inf, 'give more than 1, or 0 to switch it off'),
    'aggregation': _one_of('token', 'seq_mean_token_mean', 'seq_mean_token_sum', 'constant'),
    'constant_norm': _above(0),
    'kl_coef': _at_least(0),
    'kl_kind': _one_of('k1', 'k2', 'k3', 'k1+', 'k3+'),
    'entropy_coef': _at_least(0),
    'minibatches': _at_least(1),
    'old_logp': _one_of('sampler', 'trainer'),
    'tis_cap': _at_least(0),
    'tis_level': _one_of('token', 'sequence'),
    'fill_rounds': _at_least(1),
    'surplus': _one_of('carry', 'drop'),
    'train_iterations': _at_least(-1),
    'distill_top_k': _at_least(0),
    'distill_coef': (
        lambda x: x and min(x) >= 0,
        'give a list of weights, 0 or more, such as (0.1, 0.03)',
    ),
    'distill_kind': _one_of('reverse', 'forward', 'jsd'),
    'distill_ema_rate': _within(0, 1),
}

RULES: dict[str, Rule] = {
    'seed': _at_least(0),
    'policy.dtype': _one_of('float32', 'bfloat16'),
    'policy.remat_policy': _one_of('nothing_saveable', 'dots_with_no_batch_dims_saveable'),
    'policy.attention': _one_of('dense', 'splash'),
    'policy.logit_chunk': _at_least(1),
    **{f'mesh.{name}': _DEVICES for name in common.get_config().mesh},
    'distributed.mode': _one_of('off', 'auto', 'coordinator'),
    'distributed.processes': _at_least(1),
    'distributed.process': _at_least(0),
    'distributed.heartbeat': _at_least(1),
    **{f'sampler.{name}': _at_least(1) for name in common.get_config().sampler},
    'rollout.prompt_tokens': _at_least(1),
    'rollout.turn_tokens': _at_least(1),
    'rollout.observation_tokens': _at_least(1),
    'rollout.max_turns': _at_least(1),
    'rollout.tool_timeout': _above(0),
    'rollout.truncated': _one_of('keep', 'drop'),
    'tools.family': _one_of('search_r1', 'r_search', 'qwen', 'olmo'),
    'tools.top_k': _at_least(1),
    'tools.max_queries': _at_least(1),
    'weights': _one_of('separate', 'shared'),
    'prompts': _one_of('mini', 'paper'),
    'retrieval.kind': _one_of('world', 'folder', 'http'),
    'retrieval.timeout': _above(0),
    'retrieval.retries': _at_least(0),
    'retrieval.ready_seconds': _above(0),
    'retrieval.cache': _at_least(0),
    'retrieval.most_failed': _within(0, 1),
    'retrieval.overfetch': _at_least(1),
    'world.train': _SEEDS,
    'world.evaluation': _SEEDS,
    'world.near_misses': _within(0, 1),
    'schedule.iterations': _at_least(1),
    'schedule.hop_ratio': (
        lambda x: 1 <= len(x) <= len(_HOPS) and min(x) >= 0 and sum(x) > 0,
        'give up to four shares, 0 or more and not all 0, such as (4, 3, 2, 1)',
    ),
    'schedule.group': _one_of('hop', 'prompt'),
    'schedule.first': _one_of('solver', 'proposer'),
    'schedule.searches_below_hops': _within(0, 1),
    'inputs.documents': (
        lambda x: not x or pathlib.Path(x).is_file(),
        'name a file that is there; python -m zeroplay_jax.inputs documents writes one',
    ),
    'inputs.world_questions': _at_least(1),
    'reward.solves': (lambda x: x >= 2, 'give 2 or more: one attempt cannot be partly solved'),
    'reward.difficulty': _one_of('linear', 'parabolic', 'one_minus', 'triangle'),
    'reward.answer': _one_of('em', 'subem', 'f1', 'judge'),
    'reward.invalid': (math.isfinite, 'give a number, such as -0.1'),
    'reward.overlong_buffer': _at_least(0),
    'reward.search_weight': _at_least(0),
    'reward.target': (lambda x: 0 < x < 1, 'give more than 0, less than 1'),
    'reward.soft_length': _at_least(0),
    'reward.hard_length': _at_least(1),
    'reward.format_weight': _at_least(0),
    'pool.batch': _at_least(1),
    'pool.batches': _at_least(0),
    'pool.samples': _at_least(1),
    'pool.question_words': _at_least(1),
    'pool.window': (
        lambda x: len(x) == 2 and 0 <= x[0] <= x[1] <= 1,
        'give (low, high) with 0 ≤ low ≤ high ≤ 1',
    ),
    'pool.measure': _at_least(0),
    'check.noise': _at_least(0),
    'check.unit': _one_of('trajectory', 'document'),
    'fill.kind': _one_of('pad', 'resample', 'replay_full', 'replay_reset'),
    'fill.period': _at_least(1),
    'fill.rounds': _at_least(1),
    'privileged.kind': _one_of('none', 'answer', 'answer_hop', 'qcp_partial', 'qcp'),
    'privileged.prompt_tokens': _at_least(1),
    'privileged.tokens': _at_least(1),
    'judge.kind': _one_of('rule', 'policy', 'endpoint'),
    'judge.temperature': _at_least(0),
    'judge.tokens': _at_least(1),
    'judge.timeout': _above(0),
    'judge.retries': _at_least(0),
    'judge.most_failed': _within(0, 1),
    'judge.rubrics': (
        lambda x: len(x) == 2 and 1 <= x[0] <= x[1],
        'give (fewest, most), such as (3, 5)',
    ),
    **{f'{role}.{name}': rule for role in ROLES for name, rule in _ROLE_RULES.items()},
    'micro.rows': _at_least(1),
    'micro.tokens': _at_least(1),
    'eval.every': _at_least(0),
    'eval.questions': _at_least(1),
    'eval.hops': (
        lambda x: x and set(x) <= set(_HOPS) and len(set(x)) == len(x),
        'give some of 1, 2, 3, 4, each once',
    ),
    'checkpoint.every': _at_least(1),
    'checkpoint.keep': _at_least(1),
    'log_trajectories': _at_least(0),
}


def _check_values(config: ConfigDict) -> None:
    values = dict(fields(config))
    for name, (holds, mend) in RULES.items():
        if not holds(values[name]):
            fail(name, values[name], 'not possible', mend)
    recipes = sorted(path.stem for path in (PACKAGE / 'selfplay' / 'recipes').glob('[a-z]*.py'))
    if config.recipe not in recipes:
        fail('recipe', config.recipe, 'no such recipe', f'give one of {", ".join(recipes)}')


# ------------------------------------------------------------------------------------------------------------
# Combinations
# ------------------------------------------------------------------------------------------------------------


def _check_lengths(config: ConfigDict) -> None:
    rollout, context = config.rollout, config.sampler.context
    turns = rollout.max_turns
    # Observations are not counted: one that does not fit any more ends its rollout, and the metrics say how often.
    need = rollout.prompt_tokens + turns * rollout.turn_tokens
    if context < need:
        wrong = f'too short for {rollout.prompt_tokens} prompt + {turns} · {rollout.turn_tokens} turn tokens = {need}'
        fail('sampler.context', context, wrong, f'give {need} or shrink config.rollout')
    if config.sampler.chunk > context:
        mend = f'give at most {context} (sampler.context)'
        fail('sampler.chunk', config.sampler.chunk, 'longer than a slot', mend)
    if config.micro.tokens < context:
        wrong = f'a trajectory of {context} tokens (sampler.context) does not fit in a row'
        fail('micro.tokens', config.micro.tokens, wrong, f'give {context} or more')
    hops = max(hop for hop, share in zip(_HOPS, config.schedule.hop_ratio, strict=False) if share)
    if turns < hops:
        wrong = f'a {hops}-hop question takes {hops - 1} searches and a turn to write it'
        fail('rollout.max_turns', turns, wrong, f'give {hops} or more, or ask for fewer hops')
    if config.retrieval.overfetch < config.tools.top_k:
        wrong = f'fewer candidates than passages shown (tools.top_k={config.tools.top_k})'
        fail(
            'retrieval.overfetch',
            config.retrieval.overfetch,
            wrong,
            f'give {config.tools.top_k} or more',
        )
    if (
        tuple(config.pool.window) != (0.0, 1.0)
        and not config.pool.measure
        and config.recipe != 'scope'
    ):
        wrong = 'solve rates are not measured'
        fail(
            'pool.window',
            config.pool.window,
            wrong,
            'give pool.measure solver rollouts per question',
        )


def _relative(role: ConfigDict) -> bool:
    """Whether an advantage compares rows of a group, which takes two of them."""
    return role.baseline != 'none' or role.scale == 'std'


def _check_worlds(config: ConfigDict) -> None:
    for name in ('train', 'evaluation'):
        first, count = config.world[name]
        available = world.worlds_available(name)
        if first + count > available:
            wrong = f'the names of this world suffice for {available} worlds, numbered from 0'
            fail(
                f'world.{name}',
                tuple(config.world[name]),
                wrong,
                f'let first + count be {available} or less',
            )


def _trained(recipe: str) -> tuple[str, ...]:
    """The roles that a recipe's file says it trains, read without loading it; all where it does not say so plainly."""
    tree = ast.parse(
        (PACKAGE / 'selfplay' / 'recipes' / f'{recipe}.py').read_text(encoding='utf-8')
    )
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == 'TRAINED':
            with contextlib.suppress(ValueError):
                return tuple(ast.literal_eval(node.value))
    return tuple(ROLES)


def _check_groups(config: ConfigDict) -> None:
    for role in ROLES:
        if config[role].baseline == 'none' and config[role].scale == 'std':
            wrong = 'without a baseline, dividing by the deviation blows equal rewards up'
            fail(f'{role}.baseline', 'none', wrong, f'set {role}.scale=none too')
    if _relative(config.solver) and config.solver.samples < 2:
        wrong = 'a rollout is compared with the others of its question'
        fail(
            'solver.samples', config.solver.samples, wrong, 'give 2 or more, or baseline=scale=none'
        )
    proposer, ratio = config.proposer, config.schedule.hop_ratio
    by_hops = config.schedule.group == 'hop' and config.recipe in ('drzero', 'piplay')
    if (
        'proposer' not in _trained(config.recipe)
        or not _relative(proposer)
        or proposer.singleton == 'raw'
        and by_hops
    ):
        return
    if not by_hops:
        if proposer.samples < 2:
            wrong = 'its rollouts are compared with the others of the same prompt'
            fail(
                'proposer.samples',
                proposer.samples,
                wrong,
                'give 2 or more, or proposer.baseline=scale=none',
            )
        return

    def smallest(batch: int) -> int:
        counts = zip(schedules.stratify(ratio, batch), ratio, strict=True)
        return proposer.samples * min(count for count, share in counts if share)

    if smallest(proposer.batch) < 2:
        enough = next(
            (batch for batch in range(proposer.batch, 10_000) if smallest(batch) >= 2), None
        )
        wrong = f'a hop count of schedule.hop_ratio={tuple(ratio)} gets fewer than 2 rollouts to compare'
        more = f'give {enough} or more' if enough else 'ask for less uneven hops'
        fail('proposer.batch', proposer.batch, wrong, f'{more}, or leave the rare hop count out')


def _check_division(config: ConfigDict) -> None:
    mesh = config.mesh
    if list(mesh.values()).count(-1) > 1:
        shown = ', '.join(f'{axis}={size}' for axis, size in mesh.items())
        raise ConfigError(
            f'config.mesh: {shown}: one axis at most can be -1; give the others a number'
        )
    for name, axes in (('micro.rows', ('replica', 'fsdp')), ('sampler.slots', ('fsdp',))):
        section, field = name.split('.')
        value, parts = config[section][field], math.prod(mesh[axis] for axis in axes)
        # An axis of -1 is known only when the devices are; whoever builds the mesh checks it then.
        if parts > 0 and value % parts:
            wrong = f'does not divide over {parts} devices ({" · ".join(f"mesh.{axis}" for axis in axes)})'
            fail(
                name,
                value,
                wrong,
                f'give a multiple of {parts}, such as {value + parts - value % parts}',
            )
    if config.policy.attention == 'splash':
        rows = ['micro.tokens'] + ['privileged.tokens'] * any(
            config[role].distill_top_k for role in ROLES
        )
        for name in rows:
            section, field = name.split('.')
            if config[section][field] % 128:
                fail(
                    name,
                    config[section][field],
                    'policy.attention=splash works in steps of 128',
                    'give a multiple',
                )
    if config.policy.remat_policy != 'nothing_saveable' and not config.policy.remat:
        wrong = 'without policy.remat nothing is recomputed'
        fail('policy.remat_policy', config.policy.remat_policy, wrong, 'set policy.remat to true')
    for role in ROLES:
        rows, minibatches = config[role].batch * config[role].samples, config[role].minibatches
        if rows % minibatches:
            wrong = (
                f'the {rows} rollouts of a step ({role}.batch · {role}.samples) do not divide by it'
            )
            fail(f'{role}.minibatches', minibatches, wrong, f'give a divisor of {rows}')
        if config[role].tis_cap and config[role].old_logp == 'sampler':
            wrong = 'the correction compares trainer and sampler, and only the sampler was asked'
            fail(f'{role}.tis_cap', config[role].tis_cap, wrong, f'set {role}.old_logp to trainer')
        if minibatches > 1 and config[role].loss == 'reinforce':
            wrong = 'reinforce has no ratio, and from the second update on the rollouts are of older weights'
            fail(
                f'{role}.minibatches', minibatches, wrong, f'give 1, or set {role}.loss to token_pg'
            )


def _check_hosts(config: ConfigDict) -> None:
    c = config.distributed
    if c.mode != 'coordinator':
        if c.processes > 1 and c.mode == 'off':
            fail(
                'distributed.processes',
                c.processes,
                'nobody says where they meet',
                'set distributed.mode',
            )
        return
    place = re.fullmatch(r'[^:\s]+:(\d+)', c.coordinator)
    if not place or not 0 < int(place[1]) < 1 << 16:
        fail(
            'distributed.coordinator',
            c.coordinator,
            'names no place to meet',
            'give host:port of process 0',
        )
    if c.process >= c.processes:
        fail('distributed.process', c.process, f'there are {c.processes}', 'count from 0')
    if config.mesh.replica != -1 and config.mesh.replica % c.processes:
        wrong = f'{c.processes} processes cannot hold whole replicas each'
        fail(
            'mesh.replica',
            config.mesh.replica,
            wrong,
            'make it a multiple of distributed.processes',
        )


def _check_game(config: ConfigDict) -> None:
    """Settings that a recipe reads and that contradict each other."""
    if config.shared_optimizer and config.weights == 'separate':
        fail(
            'shared_optimizer',
            True,
            'separate weights have separate optimisers',
            'set weights to shared',
        )
    if config.recipe == 'scope' and config.reward.soft_length >= config.reward.hard_length:
        wrong = f'not below reward.hard_length={config.reward.hard_length}'
        fail('reward.soft_length', config.reward.soft_length, wrong, 'give less')
    if config.recipe == 'ssp' and config.solver.filter_groups:
        wrong = 'ssp fills its batches by config.fill'
        fail('solver.filter_groups', True, wrong, 'set it to false, or take another recipe')
    if config.recipe in ('ssp', 'dspo', 'scope') and config.solver.distill_top_k:
        wrong = f'the questions of {config.recipe} have no construction path to show a teacher'
        fail(
            'solver.distill_top_k',
            config.solver.distill_top_k,
            wrong,
            'give 0, or take recipe drzero or piplay',
        )
    if config.solver.distill_top_k and not any(config.solver.distill_coef):
        fail(
            'solver.distill_coef',
            tuple(config.solver.distill_coef),
            'the teacher weighs nothing',
            'give a weight',
        )
    if config.solver.distill_top_k and config.rollout.drop_thinking:
        wrong = 'a teacher reads one context per rollout'
        fail('rollout.drop_thinking', True, wrong, 'set it to false, or solver.distill_top_k to 0')
    for role in ROLES if config.rollout.drop_thinking else ():
        c = config[role]
        if c.aggregation != 'token' or c.loss not in ('token_pg', 'reinforce'):
            wrong = f'{c.loss} over {c.aggregation} is about whole rollouts, and every context would count as one'
            fail(
                'rollout.drop_thinking',
                True,
                wrong,
                f'set {role}.loss to token_pg and {role}.aggregation to token',
            )
    if config.proposer.filter_groups:
        fail('proposer.filter_groups', True, 'only the solver has a filter', 'set it to false')
    if (
        config.solver.filter_groups
        and config.solver.surplus == 'carry'
        and config.solver.old_logp == 'trainer'
    ):
        wrong = 'groups that waited would be scored by newer weights, and their age hidden'
        fail('solver.old_logp', 'trainer', wrong, 'take sampler, or set solver.surplus to drop')
    if config.reward.overlong_buffer > config.sampler.context:
        wrong = f'longer than a slot (sampler.context={config.sampler.context})'
        fail('reward.overlong_buffer', config.reward.overlong_buffer, wrong, 'give less')
    judged = config.recipe == 'scope' or config.reward.answer == 'judge' or config.eval.tasks
    if judged and config.judge.kind == 'rule' and config.retrieval.kind != 'world':
        fail(
            'judge.kind',
            'rule',
            'the rule knows the miniature worlds only',
            'give policy or endpoint',
        )
    if config.judge.kind == 'policy' and config.judge.tokens >= config.sampler.context:
        wrong = f'a reply leaves no room for a prompt in a slot of {config.sampler.context} (sampler.context)'
        fail('judge.tokens', config.judge.tokens, wrong, 'give less')
    if config.proposer.distill_top_k:
        wrong = 'there is no teacher for the proposer'
        fail('proposer.distill_top_k', config.proposer.distill_top_k, wrong, 'give 0')
    if config.solver.distill_top_k:
        need = config.privileged.prompt_tokens + config.sampler.context
        if config.privileged.tokens < need:
            wrong = f"a teacher's prompt and a rollout take up to {need} tokens"
            fail('privileged.tokens', config.privileged.tokens, wrong, f'give {need} or more')
    retrieval = config.retrieval
    if retrieval.kind != 'world' and not (pathlib.Path(retrieval.path) / 'manifest.json').is_file():
        fail(
            'retrieval.path',
            retrieval.path,
            'no index folder',
            'build one with python -m retrieval.build',
        )
    if retrieval.kind == 'http' and not retrieval.url.startswith(('http://', 'https://')):
        fail(
            'retrieval.url',
            retrieval.url,
            'not a web address',
            'give one such as http://127.0.0.1:8000',
        )
    if retrieval.kind != 'world' and config.recipe in ('dspo', 'ssp'):
        name = {'dspo': 'questions', 'ssp': 'answers'}[config.recipe]
        if not config.inputs[name]:
            fail(
                f'inputs.{name}',
                '',
                f'{config.recipe} is given {name}, and only worlds have some',
                'name a file',
            )
    for name, lines in (('file', 'questions with answers'), ('tasks', 'open tasks with rubrics')):
        if (
            retrieval.kind != 'world'
            and config.eval[name]
            and not pathlib.Path(config.eval[name]).is_file()
        ):
            fail(
                f'eval.{name}',
                config.eval[name],
                'no such file',
                f'name JSON lines of {lines} to evaluate on',
            )
        if retrieval.kind == 'world' and config.eval[name]:
            wrong = 'the miniature world brings what it is measured by'
            fail(
                f'eval.{name}',
                config.eval[name],
                wrong,
                'leave it empty, or set retrieval.kind to folder or http',
            )
    for name in ('answers', 'questions', 'tasks', 'documents'):
        if config.inputs[name] and name not in INPUTS.get(config.recipe, (name,)):
            wrong = f'recipe {config.recipe} takes none'
            fail(f'inputs.{name}', config.inputs[name], wrong, 'leave it empty')
        if config.inputs[name] and not pathlib.Path(config.inputs[name]).is_file():
            fail(f'inputs.{name}', config.inputs[name], 'no such file', 'name a file of JSON lines')
    if config.judge.kind == 'endpoint' and not config.judge.url.startswith(('http://', 'https://')):
        fail(
            'judge.url',
            config.judge.url,
            'not a web address',
            'give one such as http://127.0.0.1:8001/v1',
        )


def _check_checkpoint(config: ConfigDict) -> None:
    folder = pathlib.Path(config.policy.path) if config.policy.path else BUILT_IN
    mend = (
        'name a Hugging Face checkpoint folder (config.json, tokenizer.json, *.safetensors)'
        if config.policy.path
        else 'train it with python -m zeroplay_jax.mini.base_model'
    )
    shown = config.policy.path or "'' (the built-in checkpoint)"
    if not folder.is_dir():
        fail('policy.path', shown, 'no such folder', mend)
    for pattern in ('config.json', 'tokenizer.json', '*.safetensors'):
        if not any(folder.glob(pattern)):
            fail('policy.path', shown, f'the folder has no {pattern}', mend)


CHECKS = (
    _check_values,
    _check_lengths,
    _check_worlds,
    _check_groups,
    _check_division,
    _check_hosts,
    _check_game,
    _check_checkpoint,
)
