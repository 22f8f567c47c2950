"""What roles get of config, tokenizer and chat template: tools, limits, tags; what was chosen for the template."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from zeroplay_jax.rollout.call_syntax import CallSyntax, syntax_for, syntax_of
from zeroplay_jax.rollout.environment import Environment, Limits
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.tools.base import Tool
from zeroplay_jax.types import UserError

# Tags that policies write around text that is not a call.
_TEXT_TAGS = ('think', 'answer')


def role_environment(
    config,
    specification: RoleSpec,
    codec: Codec,
    tools: Mapping[str, Tool],
    reply_tokens: int = 0,
) -> tuple[Environment, int]:
    """Returns the environment of a role, and the number of tokens that its prompt may have.

    Args:
      tools: all tools of the run, by name.
      reply_tokens: longest reply of a role without tools; 0: `rollout.turn_tokens`.

    Raises:
      UserError: the role names a tool that the run does not have, or a tool has the name of a tag of the role.
    """
    settings = config.rollout
    syntax = syntax_for(config)
    role_tools = _tools_of_role(specification, tools)
    _check_tags(specification, role_tools, syntax)
    for tag in (*_TEXT_TAGS, *specification.terminal_tags, *syntax.tag_names(role_tools)):
        # Raises if the embedding of the model lacks the tag.
        codec.encode(f'<{tag}></{tag}>')
    if role_tools:
        _check_template(config.tools.syntax, syntax, codec, settings.observation_tokens)
        limits = Limits(
            settings.max_turns,
            settings.turn_tokens,
            settings.observation_tokens,
            settings.response_tokens,
        )
        prompt_tokens = settings.prompt_tokens
        if specification.is_trained:
            prompt_tokens = config[specification.name].prompt_tokens or prompt_tokens
    else:
        reply_tokens = reply_tokens or settings.turn_tokens
        limits = Limits(1, reply_tokens, 0)
        # There is one turn only, so the prompt may take all of the slot that the reply leaves free.
        prompt_tokens = config.sampler.context - reply_tokens
    env = Environment(
        codec=codec,
        syntax=syntax,
        limits=limits,
        tools=role_tools,
        terminal_tags=specification.terminal_tags,
        drop_thinking=settings.drop_thinking,
        # The openings of all tools of the run: a role without tools must not answer inside a call.
        call_openings=syntax.opening_tags(tools),
    )
    return env, prompt_tokens


def _tools_of_role(specification: RoleSpec, tools: Mapping[str, Tool]) -> dict[str, Tool]:
    """Returns the tools of a role by name; raises UserError for a name that the run does not have."""
    if specification.tools is None:
        return dict(tools)
    for name in specification.tools:
        if name not in tools:
            raise UserError(
                f'role {specification.name} uses the tool {name!r}, and config.tools.names has '
                f'{", ".join(tools) or "none"}; add it'
            )
    return {name: tools[name] for name in specification.tools}


def _check_tags(specification: RoleSpec, tools: Mapping[str, Tool], syntax: CallSyntax) -> None:
    """Raises UserError if a tool has the name of a tag of the role's text format."""
    # A tool with the name of a terminal tag would turn every answer into a call.
    reserved = {*_TEXT_TAGS, *specification.terminal_tags, getattr(syntax, 'result_tag', '')}
    for name in tools:
        if name in reserved:
            raise UserError(
                f'config.tools.names: a tool cannot be called {name!r}, which is a tag of the text '
                f'format of role {specification.name}; rename the tool'
            )


def _check_template(name: str, syntax: CallSyntax, codec: Codec, limit: int) -> None:
    """Raises UserError if the results of calls cannot be written in this syntax.

    Args:
      name: of the syntax.
      limit: tokens that a result may have.
    """
    if syntax.writes_messages and not codec.template.tool_role:
        raise UserError(
            f'config.tools.syntax={name!r}: the result of a call cannot be written ({codec.template.tool_error}); '
            'give search_r1, which needs no message for it'
        )
    # Raises if the embedding of the model lacks one of the tags.
    syntax.wrap(codec, 'x', limit)


def template_record(config: Config, codec: Codec) -> dict[str, str]:
    """Returns what was chosen for a chat template and changes prompts: 'date', 'role of results'; {} if nothing was."""
    choices = {}
    if codec.date:
        choices['date'] = codec.date
    role = codec.template.tool_role
    if syntax_of(config.tools.syntax).writes_messages and role not in ('', 'tool'):
        choices['role of results'] = role
    return choices


def template_notes(config: Config, codec: Codec) -> list[str]:
    """Returns what a user should know about tokenizer and chat template, a line each."""
    template = codec.template
    lines = [*codec.notes, *template.notes]
    if not syntax_for(config).writes_messages:
        return lines
    role = template_record(config, codec).get('role of results')
    if role:
        lines.append(
            f"{codec.folder}: its chat template cannot write messages of role 'tool'; the results of calls are "
            f'messages of role {role!r}'
        )
    if not template.keeps_thoughts() and not config.rollout.drop_thinking:
        lines.append(
            f'{codec.folder}: its chat template drops the thoughts of turns before the result of a call, and here they '
            'are kept; set config.rollout.drop_thinking=True to drop them too'
        )
    return lines


def print_template_notes(config: Config, codec: Codec) -> None:
    """Prints `template_notes` on stderr."""
    for line in template_notes(config, codec):
        print(f'note: {line}', file=sys.stderr)
