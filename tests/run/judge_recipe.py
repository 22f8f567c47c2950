"""SCOPE with a trained grader, which is paid for agreeing with the majority of its replies."""

import dataclasses

from zeroplay_jax.recipes import scope
from zeroplay_jax.selfplay.recipe import RoleSpec


class Recipe(scope.Recipe):
    judge_roles = {'judge.grade': 'grader'}
    # A form that the checkpoint of the miniature was trained to reply to.
    prompts = {'judge.grade': 'Documents: {given} {task}\nQuestion: {rubric}'}

    @classmethod
    def roles(cls, config):
        grader = RoleSpec('grader', 'judge.grade', terminal_tags=(), tools=())
        return (*super().roles(config), grader)

    def phases(self):
        (phase,) = super().phases()
        return [dataclasses.replace(phase, trains=('solver', 'grader'))]
