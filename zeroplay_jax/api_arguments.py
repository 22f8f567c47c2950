"""Checks of the arguments of the API's functions. An error is one line: the function, the argument and the fix."""

from __future__ import annotations

import math
import numbers
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from zeroplay_jax.configuration import fields
from zeroplay_jax.objectives import losses
from zeroplay_jax.objectives.loss_checks import check_loss
from zeroplay_jax.objectives.losses import LossFunction
from zeroplay_jax.selfplay.answer_fields import accepted_answers
from zeroplay_jax.settings.errors import ConfigError
from zeroplay_jax.settings.schema import TrainedRole
from zeroplay_jax.tools.base import Tool
from zeroplay_jax.types import Trajectory, UserError

_FLAT_ROLLOUTS = 'give what sample_rollouts returns: one list of rollouts per question'


def _kind(value: Any) -> str:
    """Returns the name of a value's type, for an error text."""
    return type(value).__name__


def check_settings(function: str, settings: Any) -> None:
    """Refuses settings that are not a config.

    Raises:
      UserError: one line.
    """
    if not isinstance(settings, ConfigDict):
        raise UserError(
            f"{function}: settings is a {_kind(settings)}; give a config, such as zp.config('drzero', 'mini')"
        )


def check_instance(function: str, name: str, value: Any, kind: type, source: str) -> None:
    """Refuses an argument of another type; `source` says where the right one comes from.

    Raises:
      UserError: one line.
    """
    if not isinstance(value, kind):
        raise UserError(f'{function}: {name} is a {_kind(value)}; give what {source} returns')


def check_path(function: str, name: str, value: Any) -> None:
    """Refuses what is neither a text nor a path.

    Raises:
      UserError: one line.
    """
    if not isinstance(value, str | pathlib.Path):
        raise UserError(
            f"{function}: {name} is a {_kind(value)}; give a path, such as 'runs/first'"
        )


def check_query(function: str, query: Any) -> None:
    """Refuses a search query that is not a text.

    Raises:
      UserError: one line.
    """
    if not isinstance(query, str):
        raise UserError(f'{function}: the query is a {_kind(query)}; give one text')


def check_questions(function: str, questions: Any) -> None:
    """Refuses questions that are not a list of texts, and blank ones.

    Raises:
      UserError: one line.
    """
    if isinstance(questions, str) or not isinstance(questions, Sequence):
        raise UserError(f'{function}: questions is a {_kind(questions)}; give a list of texts')
    for number, question in enumerate(questions):
        if not isinstance(question, str):
            raise UserError(
                f'{function}: questions[{number}] is a {_kind(question)}; give texts, such as question.text'
            )
        if not question.strip():
            raise UserError(f'{function}: questions[{number}] is empty; write one, or leave it out')


def check_sampling(function: str, temperature: Any, **whole_numbers: Any) -> None:
    """Refuses a temperature, or one of the whole numbers samples, seed and step, that cannot be sampled with.

    Raises:
      UserError: one line.
    """
    for name, value in whole_numbers.items():
        least = 1 if name == 'samples' else 0
        is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not is_whole or not least <= value <= fields.MAX_INT:
            fix = f'give a whole number from {least} to {fields.MAX_INT}'
            raise UserError(f'{function}: {name}={value!r} is not possible; {fix}')
    is_number = isinstance(temperature, int | float) and math.isfinite(temperature)
    if not is_number or temperature < 0:
        raise UserError(
            f'{function}: temperature={temperature!r} is not possible; give 0 (greedy) or more'
        )


def check_tools(function: str, tools: Any) -> None:
    """Refuses tools that are not a list of names and Tool objects, or Tool objects that fail their own check.

    Raises:
      UserError: one line.
    """
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise UserError(f"{function}: tools is a {_kind(tools)}; give a list, such as ['search']")
    for tool in tools:
        if isinstance(tool, type) and issubclass(tool, Tool):
            raise UserError(
                f'{function}: the tool {tool.__name__} is a class; give an object, {tool.__name__}(…)'
            )
        if not isinstance(tool, str | Tool):
            raise UserError(
                f'{function}: a tool is a {_kind(tool)}; give names and objects of zeroplay_jax.tools.base.Tool'
            )
        if isinstance(tool, Tool):
            try:
                tool.check()
            except ValueError as error:
                raise UserError(f'{function}: a tool cannot be used: {error}') from None


def check_rollouts(function: str, rollouts: Any) -> None:
    """Refuses rollouts that are not one list of rollouts per question.

    Raises:
      UserError: one line.
    """
    if isinstance(rollouts, Trajectory | str) or not isinstance(rollouts, Sequence):
        raise UserError(f'{function}: rollouts is a {_kind(rollouts)}; {_FLAT_ROLLOUTS}')
    for number, samples in enumerate(rollouts):
        is_list = isinstance(samples, Sequence) and not isinstance(samples, str)
        if not is_list or not all(isinstance(sample, Trajectory) for sample in samples):
            raise UserError(
                f'{function}: rollouts[{number}] is not a list of rollouts; {_FLAT_ROLLOUTS}'
            )


def answer_texts(
    function: str, answers: Any, rollouts: Sequence[Sequence[Trajectory]]
) -> list[list[str]]:
    """Returns the accepted answers of each question, read as those of a question file.

    Raises:
      UserError: one line; not one entry per question, or an entry without an answer or of another type.
    """
    if isinstance(answers, str) or not isinstance(answers, Sequence):
        raise UserError(
            f'{function}: answers is a {_kind(answers)}; give a list with the accepted answers of each question'
        )
    if len(answers) != len(rollouts):
        raise UserError(
            f'{function}: {len(answers)} entries of answers for {len(rollouts)} questions; give one per question'
        )
    texts = []
    for number, accepted in enumerate(answers):
        # A file has lists, `Question.answers` is a tuple.
        value = list(accepted) if isinstance(accepted, tuple) else accepted
        try:
            texts.append(accepted_answers({'answers': value}))
        except ValueError as error:
            raise UserError(
                f'{function}: answers[{number}]: {error}; give a text or a list of texts'
            ) from None
    return texts


def checked_score(function: str, metric: str, value: Any) -> float:
    """Returns what an answer metric returned for one answer, as a float.

    Raises:
      UserError: one line; it is not a number in [0, 1].
    """
    fix = 'return a number in [0, 1]'
    try:
        score = float(value)
    except (TypeError, ValueError):
        raise UserError(f'{function}: metric {metric!r} returned a {_kind(value)}; {fix}') from None
    # Also refuses NaN, with which every comparison is false.
    if not 0 <= score <= 1:
        raise UserError(f'{function}: metric {metric!r} returned {score}; {fix}')
    return score


def reward_table(
    function: str, rewards: Any, rollouts: Sequence[Sequence[Trajectory]]
) -> list[list[float]]:
    """Returns the rewards as floats: one list per question with one reward per rollout.

    Raises:
      UserError: one line; the shape differs from that of `rollouts`, or a reward is not a finite number.
    """
    fix = 'give one list per question with one number per rollout, such as zp.score returns'
    try:
        table = [_floats(values) for values in rewards]
    except (TypeError, ValueError):
        raise UserError(
            f'{function}: rewards is not a table of numbers ({_kind(rewards)}); {fix}'
        ) from None
    if len(table) != len(rollouts):
        raise UserError(
            f'{function}: rewards for {len(table)} questions and rollouts of {len(rollouts)}; {fix}'
        )
    for number, (values, samples) in enumerate(zip(table, rollouts, strict=True)):
        if len(values) != len(samples):
            raise UserError(
                f'{function}: {len(values)} rewards for the {len(samples)} rollouts of question {number}; {fix}'
            )
        for value in values:
            if not math.isfinite(value):
                raise UserError(f'{function}: a reward of question {number} is {value}; {fix}')
    return table


def _floats(values: Any) -> list[float]:
    """Returns numbers as floats; TypeError for another content, such as a text of digits."""
    values = list(values)
    if any(isinstance(value, str) for value in values):
        raise TypeError
    return [float(value) for value in values]


def role_settings(
    function: str, role: str, loss: str | LossFunction, settings: Mapping[str, Any]
) -> ConfigDict:
    """Returns all settings of a role: `settings` and `loss`, and defaults for the others.

    Raises:
      UserError: one line; an unknown loss or setting, a value out of bounds, distillation or a value network.
    """
    values = dict(settings)
    # A config holds names only; a function is added when the other fields are checked.
    if not callable(loss):
        values['loss'] = loss
    try:
        checked = fields.checked_section(TrainedRole, role, values)
    except ConfigError as error:
        raise UserError(f'{function}: {error}') from None
    if callable(loss):
        with checked.ignore_type():
            checked.loss = loss
    try:
        policy_loss = losses.resolve_loss(loss)
        if loss not in losses.POLICY_LOSSES:
            check_loss(policy_loss, checked.clip_low, checked.clip_high, checked.dual_clip)
    except ValueError as error:
        raise UserError(f'{function}: {error}') from None
    if checked.distill_top_k:
        raise UserError(f'{function}: rollouts have no teacher prompt; set distill_top_k to 0')
    if checked.baseline == 'value':
        raise UserError(
            f'{function}: baseline=value needs a run, which has a value network; give mean, loo or none'
        )
    return checked
