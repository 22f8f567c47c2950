"""Files that say how to run an exported policy: README.md, which is a model card, and generation_config.json."""

from __future__ import annotations

import json
import pathlib
import string
from collections.abc import Sequence

from zeroplay_jax.retrieval import hub, json_text
from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.environment import Environment
from zeroplay_jax.rollout.stop_ids import END_OF_TURN_FIELD
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.selfplay.context import Role
from zeroplay_jax.settings.paths import built_in_name
from zeroplay_jax.types import Json

_GENERATION_FILE = 'generation_config.json'


def export_texts(
    config,
    folder: pathlib.Path,
    roles: Sequence[Role],
    templates: Json,
    weights: str,
    step: int | None = None,
) -> dict[str, str]:
    """Returns the texts of README.md and generation_config.json for an exported policy.

    Args:
      config: config of the run.
      folder: checkpoint folder that the run started from.
      roles: roles that the policy plays, at least one; the evaluated one first.
      templates: prompts by name.
      weights: name of the policy.
      step: number of the checkpoint, if the folder is not that of the end of the run in its workdir.
    """
    return {
        'README.md': model_card(config, folder, roles, templates, weights, step=step),
        _GENERATION_FILE: generation_config(folder, [role.env for role in roles]),
    }


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
    hub_name = hub.name_of(str(folder))
    if hub.is_name(hub_name):
        return hub_name.removeprefix(hub.PREFIX)
    resolved = str(folder.resolve())
    name = built_in_name(resolved)
    return name if name != resolved else folder.resolve().name


def model_card(
    config,
    folder: pathlib.Path,
    roles: Sequence[Role],
    templates: Json,
    weights: str,
    is_adapter: bool = False,
    step: int | None = None,
) -> str:
    """Returns the model card in Markdown with a YAML header.

    Args:
      config, folder, roles, templates, weights, step: as of `export_texts`.
      is_adapter: whether the folder has an adapter (PEFT) and not whole weights.
    """
    base = _base_name(folder)
    environments = [role.env for role in roles]
    stops = stop_strings(environments)
    role_names = ', '.join(role.name for role in roles)
    recipe = config.recipe
    header = [
        '---',
        # JSON texts are YAML texts: a name may hold a colon.
        f'base_model: {json.dumps(base)}',
        f'library_name: {"peft" if is_adapter else "transformers"}',
        'pipeline_tag: text-generation',
        'tags: [zeroplay_jax, search-agent, self-play, reinforcement-learning]',
        '---',
    ]
    tools = ', '.join(config.tools.names)
    origin = 'the base' if is_adapter else 'this folder'
    lines = [
        *header,
        f'# {weights}, trained by self-play',
        '',
        '| | |',
        '|---|---|',
        f'| base | `{base}` |',
        *_adapter_rows(config, is_adapter),
        f'| recipe | `{recipe}`, seed {config.seed} |',
        f'| roles | {role_names} |',
        f'| tools | {tools} |',
        f'| call syntax | `{config.tools.syntax}` |',
        f'| prompts | `{config.prompts}` |',
        f'| limits | {_limits(config.rollout)} |',
        '',
        *_origin(step),
        '',
        '## Prompts',
        '',
        f'A prompt is one user message, rendered by the chat template of {origin}. Fields in braces are filled in.',
        '',
    ]
    for role in roles:
        lines += [f'`{role.name}`:', '', '```text', prompt_text(role, templates), '```', '']
    lines += _turns(roles[0], stops)
    limit = roles[0].env.limits.turn_tokens
    lines += _adapter_usage(base, stops, limit) if is_adapter else _usage(stops, limit)
    lines += [
        '',
        'With zeroplay_jax, searches included: `python -m zeroplay_jax.ask --policy FOLDER --index INDEX "question"`.',
    ]
    return '\n'.join(lines) + '\n'


def prompt_text(role: Role, templates: Json) -> str:
    """Returns the prompt of a role as text: with the explanation of its tools, and its other fields in braces."""
    template = templates[role.prompt]
    explanation = role.env.syntax.explain(role.env.tools)
    fields = {}
    for _, name, _, _ in string.Formatter().parse(template):
        if name is not None and name != 'tools':
            fields[name] = '{' + name + '}'
    (message,) = prompts.fill(template, explanation, **fields)
    return ''.join(message['content'])


def _limits(rollout) -> str:
    """Returns the limits of a rollout in words."""
    limits = (
        f'{rollout.max_turns} turns of {rollout.turn_tokens} tokens, results of '
        f'{rollout.observation_tokens}'
    )
    if rollout.response_tokens:
        limits += f', {rollout.response_tokens} behind the prompt'
    return limits


def _origin(step: int | None) -> list[str]:
    """Returns the lines about the run; `step` as of `export_texts`."""
    if step is not None:
        return [
            f'It was trained with zeroplay_jax; the weights are those of checkpoint {step} of its run. The figures of',
            'the run are in `metrics.jsonl` of its workdir. The licence is that of the base.',
        ]
    return [
        'It was trained with zeroplay_jax; the figures of its run are in `summary.json` and `report.html` of the',
        'workdir, two folders above this one. The licence is that of the base.',
    ]


def _adapter_rows(config, is_adapter: bool) -> list[str]:
    """Returns the rows of the card's table about an adapter, or about the one that was merged into whole weights."""
    settings = config.policy.adapters
    if not settings.rank:
        return []
    layers = ', '.join(settings.linears)
    place = '' if is_adapter else ', merged into these weights'
    rows = [
        f'| adapter | LoRA of rank {settings.rank}, alpha {settings.alpha:g}, on {layers}{place} |'
    ]
    if settings.quantize != 'none':
        # The base of an adapter is as it is on disk; merged weights are those that were trained over.
        rows.append(f'| trained over | the base with linear layers in {settings.quantize}{place} |')
    return rows


def _turns(role: Role, stops: Sequence[str]) -> list[str]:
    """Returns the lines about where a turn ends."""
    return [
        '## Turns',
        '',
        f'A turn ends behind one of the stop strings `{_listed(stops)}`. Behind a call, append its result and let the',
        'policy write on; it must not write the result itself:',
        '',
        '```text',
        _result_text(role.env, role.env.codec),
        '```',
        '',
    ]


def _listed(stops: Sequence[str]) -> str:
    return json.dumps(list(stops), ensure_ascii=False)


def _usage(stops: Sequence[str], limit: int) -> list[str]:
    """Returns the lines about how to run whole weights with transformers, `limit` tokens per turn."""
    return [
        '## With transformers',
        '',
        '`generation_config.json` stops at the stop strings that are single tokens of this tokenizer. `stop_strings`',
        'stops at all of them, whatever their tokens:',
        '',
        '```python',
        'from transformers import AutoModelForCausalLM, AutoTokenizer',
        '',
        "folder = '.'",
        'tokenizer = AutoTokenizer.from_pretrained(folder)',
        'model = AutoModelForCausalLM.from_pretrained(folder)',
        *_generation(stops, limit),
        '```',
    ]


def _adapter_usage(base: str, stops: Sequence[str], limit: int) -> list[str]:
    """Returns the lines about how to run an adapter with PEFT, `limit` tokens per turn."""
    return [
        '## With PEFT',
        '',
        'The folder of the base is in `adapter_config.json`, as `base_model_name_or_path`. `generate` needs the stop',
        'strings, because the base knows nothing of them:',
        '',
        '```python',
        'from peft import PeftModel',
        'from transformers import AutoModelForCausalLM, AutoTokenizer',
        '',
        "folder = '.'",
        f'base = BASE  # the folder of {base}',
        'tokenizer = AutoTokenizer.from_pretrained(base)',
        'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)',
        *_generation(stops, limit),
        '```',
    ]


def _generation(stops: Sequence[str], limit: int) -> list[str]:
    """Returns the lines of Python that generate a turn with a model and its tokenizer."""
    return [
        "messages = [{'role': 'user', 'content': PROMPT}]  # the prompt above, with its field filled in",
        'inputs = tokenizer.apply_chat_template(',
        "    messages, add_generation_prompt=True, return_dict=True, return_tensors='pt'",
        ')',
        f'stops = {_listed(stops)}',
        f'ids = model.generate(**inputs, max_new_tokens={limit}, stop_strings=stops, tokenizer=tokenizer)',
        "print(tokenizer.decode(ids[0, inputs['input_ids'].shape[1] :]))",
    ]


def _result_text(environment: Environment, codec: Codec) -> str:
    """Returns how a result is written into the context of a policy."""
    ids = environment.syntax.wrap(codec, '…', environment.limits.observation_tokens)
    return codec.decode(ids)
