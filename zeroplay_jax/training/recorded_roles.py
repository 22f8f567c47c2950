"""The roles of a run from the records in its workdir, without its tools, index and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.selfplay.context import Role
from zeroplay_jax.selfplay.recipe import recipe_class
from zeroplay_jax.selfplay.role_environment import role_environment
from zeroplay_jax.tools.base import Invocation, Tool, ToolResult
from zeroplay_jax.training.run_weights import weights_of_roles
from zeroplay_jax.training.tool_record import ATTRIBUTES, Listing


class RecordedTool(Tool):
    """A tool as the policy of a run saw it. It explains itself and cannot be called.

    Args:
      name: of the tool.
      attributes: of its record (`tool_record`).
    """

    def __init__(self, name: str, attributes: Mapping[str, Any]):
        self.name = name
        # Those of another version are left out: they could replace a method.
        for attribute in ATTRIBUTES:
            if attribute in attributes:
                setattr(self, attribute, attributes[attribute])

    def run(self, calls: Sequence[Invocation]) -> Sequence[ToolResult]:
        """Raises TypeError."""
        raise TypeError(f'{self.name} is the record of a tool')


def roles_of_weights(
    config: Any, listings: Mapping[str, Listing], codec: Codec
) -> dict[str, list[Role]]:
    """Returns name of weights → the roles that they play in training, the evaluated one first.

    Args:
      config: config of the run.
      listings: tools of each role, as `tool_record.read` returned them.
      codec: tokenizer of the policy.

    Raises:
      UserError: the chat template cannot write the results of the tools.
    """
    recipe = recipe_class(config.recipe)
    weights_of = weights_of_roles(config)
    roles_by_weights: dict[str, list[Role]] = {}
    for specification in recipe.roles(config):
        if not specification.is_trained:
            continue
        tools: dict[str, Tool] = {}
        for name, attributes in listings.get(specification.name, {}).items():
            tools[name] = RecordedTool(name, attributes)
        env, prompt_tokens = role_environment(config, specification, codec, tools)
        weights = weights_of[specification.name]
        role = Role(
            name=specification.name,
            weights=weights,
            prompt=specification.prompt,
            env=env,
            prompt_tokens=prompt_tokens,
        )
        roles = roles_by_weights.setdefault(weights, [])
        position = 0 if role.name == recipe.evaluated_role else len(roles)
        roles.insert(position, role)
    return roles_by_weights
