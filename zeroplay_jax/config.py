"""Checks a run's config before anything heavy is loaded: one line says what is wrong and how to mend it.

Reads command lines and configs with absl, ml_collections and NumPy only, so that a mistake shows in a second
and not after JAX, TensorFlow and transformers have come up. `configs/common.py` lists all fields and their
types.
"""

from __future__ import annotations

import difflib
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from absl import flags
from ml_collections import ConfigDict

from configs import common
from zeroplay_jax.mini import world
from zeroplay_jax.objectives import advantages
from zeroplay_jax.types import UserError

Rule = tuple[Callable[[Any], bool], str]

PACKAGE = pathlib.Path(__file__).parent
BUILT_IN = PACKAGE / 'mini' / 'base'  # the checkpoint behind policy.path=''
ROLES = ('proposer', 'solver')


class ConfigError(UserError):
    """A mistake of the user: one line with the field, its value, what is wrong, and how to mend it."""


def _fail(field: str, value: Any, wrong: str, mend: str) -> NoReturn:
    shown = value if isinstance(value, str) and value else repr(value)
    raise ConfigError(f'config.{field}={shown}: {wrong}; {mend}')


# ------------------------------------------------------------------------------------------------------------
# Fields: names and types
# ------------------------------------------------------------------------------------------------------------


def fields(config: ConfigDict, prefix: str = '') -> Iterator[tuple[str, Any]]:
    """All leaves of a config as (dotted name, value), in the order of the file."""
    for name in config:
        value = config[name]
        if isinstance(value, ConfigDict):
            yield from fields(value, f'{prefix}{name}.')
        else:
            yield f'{prefix}{name}', value


def _nearest(name: str, known: Sequence[str]) -> str | None:
    """The field that was probably meant: a near spelling, or initials (lr for learning_rate)."""
    near = difflib.get_close_matches(name, known, n=1)
    initials = [field for field in known if ''.join(word[0] for word in field.split('_')) == name]
    return next(iter(near + initials), None)


def _check_name(path: str, schema: ConfigDict) -> None:
    """Raises ConfigError, with the field that was probably meant, unless the dotted name is in the schema."""
    level, meant = schema, ['config']
    for name in path.split('.'):
        here = '.'.join(meant)
        if not isinstance(level, ConfigDict):
            raise ConfigError(f'config.{path}: {here} is a value and has no fields; set {here} itself')
        found = name if name in level else _nearest(name, list(level))
        if found is None:
            raise ConfigError(f'config.{path}: no such field; {here} has {", ".join(level)}')
        level = level[found]
        meant.append(found)
    if meant[1:] != path.split('.'):
        raise ConfigError(f'config.{path}: no such field; did you mean {".".join(meant)}?')


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f'a list, each {_kind(value[0])}'
    return {bool: 'true or false', int: 'a whole number', float: 'a number', str: 'a text'}[type(value)]


def _same_type(value: Any, default: Any) -> bool:
    if isinstance(default, tuple):
        return isinstance(value, tuple) and all(_same_type(item, default[0]) for item in value)
    if isinstance(default, float):
        return type(value) in (int, float)
    return type(value) is type(default)


def _check_fields(config: ConfigDict) -> None:
    schema = common.get_config()
    for name, _ in fields(config):
        _check_name(name, schema)
    given = dict(fields(config))
    for name, default in fields(schema):
        if name not in given:
            raise ConfigError(f'config.{name}: missing; start the config from configs/common.py')
        if not _same_type(given[name], default):
            _fail(name, given[name], f'must be {_kind(default)}', f'the default is {default!r}')


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
    'baseline': _one_of('mean', 'none'),
    'scale': _one_of('std', 'none'),
    'std_ddof': _one_of(0, 1),
    'singleton': _one_of('zero', 'raw'),
    'loss': _one_of('reinforce', 'token_pg'),
    'clip_low': (lambda x: 0 < x <= 1, 'give more than 0, at most 1'),
    'clip_high': _above(0),
    'dual_clip': (lambda x: x == 0 or 1 < x < math.inf, 'give more than 1, or 0 to switch it off'),
    'aggregation': _one_of('token', 'seq_mean_token_mean', 'seq_mean_token_sum'),
    'kl_coef': _at_least(0),
    'kl_kind': _one_of('k1', 'k2', 'k3'),
    'minibatches': _at_least(1),
}

RULES: dict[str, Rule] = {
    'seed': _at_least(0),
    'policy.dtype': _one_of('float32', 'bfloat16'),
    'policy.logit_chunk': _at_least(1),
    **{f'mesh.{name}': _DEVICES for name in common.get_config().mesh},
    **{f'sampler.{name}': _at_least(1) for name in common.get_config().sampler},
    'rollout.prompt_tokens': _at_least(1),
    'rollout.turn_tokens': _at_least(1),
    'rollout.observation_tokens': _at_least(1),
    'rollout.max_turns': _at_least(1),
    'rollout.tool_timeout': _above(0),
    'tools.family': _one_of('search_r1', 'qwen'),
    'tools.top_k': _at_least(1),
    'tools.max_queries': _at_least(1),
    'prompts': _one_of('mini', 'paper'),
    'retrieval.kind': _one_of('world'),
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
    'reward.solves': (lambda x: x >= 2, 'give 2 or more: one attempt cannot be partly solved'),
    'reward.difficulty': _one_of('linear', 'parabolic'),
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
            _fail(name, values[name], 'not possible', mend)
    recipes = sorted(path.stem for path in (PACKAGE / 'selfplay' / 'recipes').glob('[a-z]*.py'))
    if config.recipe not in recipes:
        _fail('recipe', config.recipe, 'no such recipe', f'give one of {", ".join(recipes)}')


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
        _fail('sampler.context', context, wrong, f'give {need} or shrink config.rollout')
    if config.sampler.chunk > context:
        mend = f'give at most {context} (sampler.context)'
        _fail('sampler.chunk', config.sampler.chunk, 'longer than a slot', mend)
    if config.micro.tokens < context:
        wrong = f'a trajectory of {context} tokens (sampler.context) does not fit in a row'
        _fail('micro.tokens', config.micro.tokens, wrong, f'give {context} or more')
    hops = max(hop for hop, share in zip(_HOPS, config.schedule.hop_ratio, strict=False) if share)
    if turns < hops:
        wrong = f'a {hops}-hop question takes {hops - 1} searches and a turn to write it'
        _fail('rollout.max_turns', turns, wrong, f'give {hops} or more, or ask for fewer hops')
    if config.retrieval.overfetch < config.tools.top_k:
        wrong = f'fewer candidates than passages shown (tools.top_k={config.tools.top_k})'
        _fail('retrieval.overfetch', config.retrieval.overfetch, wrong, f'give {config.tools.top_k} or more')
    if tuple(config.pool.window) != (0.0, 1.0) and not config.pool.measure:
        wrong = 'solve rates are not measured'
        _fail('pool.window', config.pool.window, wrong, 'give pool.measure solver rollouts per question')


def _relative(role: ConfigDict) -> bool:
    """Whether an advantage compares rows of a group, which takes two of them."""
    return role.baseline == 'mean' or role.scale == 'std'


def _check_worlds(config: ConfigDict) -> None:
    for name in ('train', 'evaluation'):
        first, count = config.world[name]
        available = world.worlds_available(name)
        if first + count > available:
            wrong = f'the names of this world suffice for {available} worlds, numbered from 0'
            _fail(f'world.{name}', tuple(config.world[name]), wrong, f'let first + count be {available} or less')


def _check_groups(config: ConfigDict) -> None:
    for role in ROLES:
        if config[role].baseline == 'none' and config[role].scale == 'std':
            wrong = 'without a baseline, dividing by the deviation blows equal rewards up'
            _fail(f'{role}.baseline', 'none', wrong, f'set {role}.scale=none too')
    if _relative(config.solver) and config.solver.samples < 2:
        wrong = 'a rollout is compared with the others of its question'
        _fail('solver.samples', config.solver.samples, wrong, 'give 2 or more, or baseline=scale=none')
    proposer, ratio = config.proposer, config.schedule.hop_ratio
    if not _relative(proposer) or proposer.singleton == 'raw' and config.schedule.group == 'hop':
        return
    if config.schedule.group == 'prompt':
        if proposer.samples < 2:
            wrong = 'with schedule.group=prompt a rollout is compared with the others of its document'
            _fail('proposer.samples', proposer.samples, wrong, 'give 2 or more, or set schedule.group to hop')
        return

    def smallest(batch: int) -> int:
        counts = zip(advantages.stratify(ratio, batch), ratio, strict=True)
        return proposer.samples * min(count for count, share in counts if share)

    if smallest(proposer.batch) < 2:
        enough = next((batch for batch in range(proposer.batch, 10_000) if smallest(batch) >= 2), None)
        wrong = f'a hop count of schedule.hop_ratio={tuple(ratio)} gets fewer than 2 rollouts to compare'
        more = f'give {enough} or more' if enough else 'ask for less uneven hops'
        _fail('proposer.batch', proposer.batch, wrong, f'{more}, or leave the rare hop count out')


def _check_division(config: ConfigDict) -> None:
    mesh = config.mesh
    if list(mesh.values()).count(-1) > 1:
        shown = ', '.join(f'{axis}={size}' for axis, size in mesh.items())
        raise ConfigError(f'config.mesh: {shown}: one axis at most can be -1; give the others a number')
    for name, axes in (('micro.rows', ('replica', 'fsdp')), ('sampler.slots', ('fsdp',))):
        section, field = name.split('.')
        value, parts = config[section][field], math.prod(mesh[axis] for axis in axes)
        # An axis of -1 is known only when the devices are; whoever builds the mesh checks it then.
        if parts > 0 and value % parts:
            wrong = f'does not divide over {parts} devices ({" · ".join(f"mesh.{axis}" for axis in axes)})'
            _fail(name, value, wrong, f'give a multiple of {parts}, such as {value + parts - value % parts}')
    for role in ROLES:
        rows, minibatches = config[role].batch * config[role].samples, config[role].minibatches
        if rows % minibatches:
            wrong = f'the {rows} rollouts of a step ({role}.batch · {role}.samples) do not divide by it'
            _fail(f'{role}.minibatches', minibatches, wrong, f'give a divisor of {rows}')
        if minibatches > 1 and config[role].loss == 'reinforce':
            wrong = 'reinforce has no ratio, and from the second update on the rollouts are of older weights'
            _fail(f'{role}.minibatches', minibatches, wrong, f'give 1, or set {role}.loss to token_pg')


def _check_checkpoint(config: ConfigDict) -> None:
    folder = pathlib.Path(config.policy.path) if config.policy.path else BUILT_IN
    mend = (
        'name a Hugging Face checkpoint folder (config.json, tokenizer.json, *.safetensors)'
        if config.policy.path
        else 'train it with python -m zeroplay_jax.mini.base_model'
    )
    shown = config.policy.path or "'' (the built-in checkpoint)"
    if not folder.is_dir():
        _fail('policy.path', shown, 'no such folder', mend)
    for pattern in ('config.json', 'tokenizer.json', '*.safetensors'):
        if not any(folder.glob(pattern)):
            _fail('policy.path', shown, f'the folder has no {pattern}', mend)


def check(config: ConfigDict) -> None:
    """Refuses a config that cannot run: unknown fields, wrong types, impossible values and combinations.

    Reads the disk for the recipe and the checkpoint folder, and loads neither.

    Args:
      config: all fields of configs/common.py.

    Raises:
      ConfigError: one line; the first mistake found.
    """
    _check_fields(config)
    _check_values(config)
    _check_lengths(config)
    _check_worlds(config)
    _check_groups(config)
    _check_division(config)
    _check_checkpoint(config)


# ------------------------------------------------------------------------------------------------------------
# The command line
# ------------------------------------------------------------------------------------------------------------


def _ready_configs() -> str:
    pages = (PACKAGE.parent / 'configs').glob('[a-z]*.py')
    return ', '.join(sorted(f'--config=configs/{page.name}' for page in pages if page.stem != 'common'))


def _check_arguments(argv: Sequence[str]) -> None:
    """What the flag library would answer with a traceback or a page: names of files and of fields."""
    schema = common.get_config()
    for argument in argv[1:]:
        flag, _, value = argument.lstrip('-').partition('=')
        if not argument.startswith('-'):
            continue
        if flag == 'config' and value and not pathlib.Path(value.split(':')[0]).is_file():
            raise ConfigError(f'--config={value}: no such file; there are {_ready_configs()}')
        if re.match(r'(no)?config\.', flag):
            _check_name(flag.split('.', 1)[1], schema)


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Reads the command line into absl's flags.

    Args:
      argv: the command line, the program's name first.

    Returns:
      The positional arguments, the program's name first (absl's convention).

    Raises:
      ConfigError: one line; an unknown flag or field, a value of the wrong type, a config that does not load.
    """
    _check_arguments(argv)
    try:
        return flags.FLAGS(argv)
    except flags.IllegalFlagValueError as error:
        field = re.match(r'flag --config\.([\w.]+)=(.*?): ', str(error), re.DOTALL)
        default = dict(fields(common.get_config())).get(field[1]) if field else None
        if field and default is not None:
            _fail(field[1], field[2], f'must be {_kind(default)}', f'the default is {default!r}')
        page = re.match(r'flag (--config=.*?): ', str(error))
        raise ConfigError(f'{page[1]}: {_last_line(error)}' if page else _last_line(error)) from error
    except flags.Error as error:
        raise ConfigError(f'{_last_line(error)}; --help shows how to call it') from error
    except Exception as error:  # the config is a Python file: whatever is wrong in it arrives here
        reason = f'{type(error).__name__}: {_last_line(error)}'
        raise ConfigError(f'the config could not be loaded: {reason}') from error


def check_command(argv: Sequence[str], config: ConfigDict | None, workdir: str | None) -> None:
    """Refuses a command line that names no config or no workdir, and a config that cannot run (see `check`).

    Args:
      argv: positional arguments left over by the flags, the program's name first.
      config: the value of --config; workdir: the value of --workdir, a path.

    Raises:
      ConfigError: one line; the first mistake found.
    """
    if len(argv) > 1:
        raise ConfigError(f'{argv[1]!r} is not a flag; settings are given as --config.FIELD=VALUE')
    if config is None:
        raise ConfigError(f'which run? give one of {_ready_configs()}, or a file of your own')
    if not workdir:
        raise ConfigError('where to? give --workdir=FOLDER, such as --workdir=runs/first')
    if any(path.is_file() for path in (pathlib.Path(workdir), *pathlib.Path(workdir).parents)):
        raise ConfigError(f'--workdir={workdir}: there is a file in this place; name a folder')
    check(config)


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].strip()
