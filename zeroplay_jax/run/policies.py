"""Exported policies: folders that other libraries load, their model cards, and fingerprints of weights."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import jax
import jinja2

from zeroplay_jax.learner.weights_view import FrozenBase, weights_fingerprint
from zeroplay_jax.policy import adapters, hf, sharding
from zeroplay_jax.policy.adapter_config import AdapterConfig
from zeroplay_jax.policy.families import is_wrapped
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.retrieval import downloads, json_text
from zeroplay_jax.rollout.environment import Environment
from zeroplay_jax.rollout.prompts import Prompt
from zeroplay_jax.rollout.tokens import END_OF_TURN_FIELD
from zeroplay_jax.runtime.record import PolicyTexts
from zeroplay_jax.selfplay.context import Role
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.settings.kinds import built_in_name, prompts_name
from zeroplay_jax.settings.schema import Config


def write_policy(
    config: Config,
    start: pathlib.Path,
    model: ModelConfig,
    base: FrozenBase | None,
    params: Params,
    texts: Mapping[str, dict[str, str]],
    folder: pathlib.Path,
    dtype: str = '',
) -> None:
    """Writes trained weights to a folder; all processes must call it.

    It is a folder of Hugging Face with whole weights; with `policy.adapters` one of PEFT.

    Args:
      start: folder of the checkpoint that the run started from.
      model: its architecture.
      base: of an adapter, for a folder of whole weights beside it, with '-merged' behind its name; None: none.
      params: whole weights or an adapter.
      texts: further files, those of 'whole' weights and of an 'adapter' (`describe`).
      folder: must not exist.
      dtype: of whole weights without adapters; '': float32.
    """
    if not config.policy.adapters.rank:
        hf.save(folder, model, params, start, texts.get('whole', {}), dtype)
        return
    # Written first, so that both are there when the other one is.
    if base is not None:
        write_merged(start, model, base, params, merged_folder(folder), texts.get('whole', {}))
    write_adapter(config, start, model, params, folder, texts.get('adapter', {}))


def merged_folder(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the whole weights of an adapter."""
    return folder.with_name(f'{folder.name}-merged')


def write_adapter(
    config: Config,
    base: pathlib.Path,
    model: ModelConfig,
    adapter: Params,
    folder: pathlib.Path,
    texts: dict[str, str] | None = None,
) -> None:
    """Writes an adapter of a run as a PEFT folder.

    Args:
      config: config of the run.
      base: folder of the base.
      model: its architecture.
      texts: further files of the folder.
    """
    settings = config.policy.adapters
    modules: tuple[str, ...] = ()
    if is_wrapped(base):
        modules = hf.wrapped_modules(model, settings.linears)
    adapter_config = AdapterConfig(
        rank=settings.rank,
        alpha=settings.alpha,
        linears=tuple(sorted(settings.linears)),
        base=base.resolve(),
        modules=modules,
    )
    hf.save_adapter(folder, model, adapter_config, adapter, texts)


def write_merged(
    like: pathlib.Path,
    model: ModelConfig,
    base: FrozenBase,
    adapter: Params,
    folder: pathlib.Path,
    texts: dict[str, str],
) -> None:
    """Writes the weights of a base with an adapter, float32, as a folder of Hugging Face.

    Args:
      like: folder of the base.
      model: its architecture.
      base: its weights, as updates read them.
      texts: further files of the folder.
    """
    joined = adapters.join(base.params, adapter)
    shapes = jax.eval_shape(adapters.merged, joined)
    layout = sharding.parameter_shardings(shapes, base.mesh, training_layout=True)
    whole = jax.jit(adapters.merged, out_shardings=layout)(joined)
    hf.save(folder, model, whole, like=like, texts=texts)


def fingerprints(engine: Engine) -> dict[str, list[int]]:
    """Returns name of weights → their fingerprint."""
    return {
        name: weights_fingerprint(learner.params, learner.mesh)
        for name, learner in engine.learners.items()
    }


_GENERATION_FILE = 'generation_config.json'


def describe(
    config: Config,
    folder: pathlib.Path,
    roles: Iterable[Role],
    evaluated: str,
    templates: Mapping[str, Prompt],
) -> PolicyTexts:
    """Returns the files of exported policies beside their weights: README.md and generation_config.json.

    Args:
      config: config of the run.
      folder: checkpoint folder that the run starts from.
      roles: trained roles.
      evaluated: name of the one that is evaluated.
      templates: prompts by name.
    """
    roles_by_weights: dict[str, list[Role]] = {}
    for role in roles:
        others = roles_by_weights.setdefault(role.weights, [])
        # The evaluated one comes first.
        others.insert(0 if role.name == evaluated else len(others), role)
    texts = {}
    for weights, roles_of_weights in roles_by_weights.items():
        arguments = (config, folder, roles_of_weights, templates, weights)
        whole = {
            'README.md': model_card(*arguments),
            _GENERATION_FILE: generation_config(folder, [role.env for role in roles_of_weights]),
        }
        adapter = {'README.md': model_card(*arguments, is_adapter=True)}
        texts[weights] = {'whole': whole, 'adapter': adapter}
    return texts


def generation_config(folder: pathlib.Path, environments: Sequence[Environment]) -> str:
    """Returns generation_config.json: that of the start, with every stop string that is one token as an end token.

    Without it `generate` would write the result of a call itself, instead of stopping behind the call. The end tokens
    of the start are kept in a field of their own, which this package reads.
    """
    codec = environments[0].codec
    path = folder / _GENERATION_FILE
    fields: dict[str, object] = {}
    if path.is_file():
        fields = json_text.read_object(path, float)
    end_ids = list(codec.eos_ids)
    for stop in stop_strings(environments):
        ids = codec.encode(stop)
        if len(ids) == 1 and ids[0] not in end_ids:
            end_ids.append(ids[0])
    fields[END_OF_TURN_FIELD] = list(codec.eos_ids)
    fields['eos_token_id'] = end_ids
    return json.dumps(fields, indent=2) + '\n'


def stop_strings(environments: Sequence[Environment]) -> list[str]:
    """Returns the strings that end a turn of any of the environments, each once."""
    # A dict keeps the order.
    stops: dict[str, None] = {}
    for environment in environments:
        stops.update(dict.fromkeys(environment.stops))
    return list(stops)


def _base_name(folder: pathlib.Path) -> str:
    """Returns how a card calls a checkpoint: its name on the Hub or in this package, else the name of its folder."""
    hub_name = downloads.name_of(str(folder))
    if downloads.is_name(hub_name):
        return hub_name.removeprefix(downloads.PREFIX)
    resolved = str(folder.resolve())
    name = built_in_name(resolved)
    return name if name != resolved else folder.resolve().name


def model_card(
    config: Config,
    folder: pathlib.Path,
    roles: Sequence[Role],
    templates: Mapping[str, Prompt],
    weights: str,
    is_adapter: bool = False,
) -> str:
    """Returns the model card in Markdown with a YAML header.

    Args:
      config, folder, templates: as of `describe`.
      roles: that the policy samples for, at least one; the evaluated one first.
      weights: name of the policy.
      is_adapter: whether the folder has an adapter (PEFT) and not whole weights.
    """
    environment = roles[0].env
    stops = stop_strings([role.env for role in roles])
    result = environment.syntax.wrap(environment.codec, '…', environment.limits.observation_tokens)
    # A misspelt name in the template is an error.
    templates_here = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return templates_here.get_template('model_card.md.jinja').render(
        base=_base_name(folder),
        config=config,
        is_adapter=is_adapter,
        json=json.dumps,
        messages=_messages(roles, templates),
        prompts=prompts_name(config.prompts),
        roles=[role.name for role in roles],
        result=environment.codec.decode(result),
        stops=json.dumps(stops, ensure_ascii=False),
        turn_tokens=environment.limits.turn_tokens,
        weights=weights,
    )


def _messages(roles: Sequence[Role], templates: Mapping[str, Prompt]) -> dict[str, str]:
    """Returns description → text of the messages of prompts: tools are explained, other fields are in braces."""
    texts = {}
    for role in roles:
        prompt = templates[role.prompt]
        fields = {name: f'{{{name}}}' for name in prompt.inputs}
        for message in role.env.messages(prompt, **fields):
            name = f'`{role.name}`, {message["role"]} message'
            if prompt.tools:
                name += ', beside the schemas of its tools'
            texts[name] = ''.join(message['content'])
    return texts
