"""A loaded policy that answers questions, and prints each rollout or writes it as JSON."""

from __future__ import annotations

import contextlib
import pathlib
import sys
from typing import Any

from zeroplay_jax.evaluation.agent import Agent, build_role, trajectory_record
from zeroplay_jax.evaluation.open_corpus import open_ask_corpus
from zeroplay_jax.evaluation.question_form import QuestionForm
from zeroplay_jax.evaluation.terminal import Printer, clean, one_line_json
from zeroplay_jax.retrieval import progress
from zeroplay_jax.rollout.tokens import open_codec
from zeroplay_jax.selfplay import template_choice
from zeroplay_jax.types import UserError

# Seconds that a search server may take to become ready.
READY_SECONDS = 5.0
# `Trajectory.finish` → reason that is printed if the rollout has no answer. 'answer' is among the keys: a rollout can
# end with the closing tag of an answer that has no opening tag.
ENDINGS = {
    'answer': 'its tags do not match',
    'malformed': 'it is inside a tool call that was never closed',
    'eos': 'the policy ended without one',
    'turn_tokens': 'a turn was longer than the limit',
    'response_tokens': 'turns and results together were longer than the limit of a response',
    'turns': 'the policy called a tool in its last turn too, in which it had to answer (--turns)',
    'context': 'its context is full',
}


class Session:
    """An agent, its corpus and the printer of its answers.

    Args:
      config: config of a run, with which the policy is asked; see `open_ask_corpus` for what is overwritten.
      folder: Hugging Face folder of the policy.
      printer: prints the rollouts.
      temperature: 0 is greedy.
      as_json: write one JSON object per question to stdout instead of printing the rollout.
      first_question: a question whose length is checked before the weights are loaded; None: no check.
      form: the form of question that the policy reads; a question of another form gives a note. None: any form.

    Raises:
      UserError: a file or server that cannot be used, or a first question that is too long.
    """

    def __init__(
        self,
        config,
        folder: pathlib.Path,
        printer: Printer,
        *,
        temperature: float = 0.0,
        as_json: bool = False,
        first_question: str | None = None,
        form: QuestionForm | None = None,
    ):
        self.printer = printer
        self.as_json = as_json
        self._folder = folder
        self._temperature = temperature
        self._seed = config.seed
        self._form = form
        self._form_was_noted = False
        self._codec = open_codec(folder)
        template_choice.print_notes(config, self._codec, 'zeroplay_jax.ask: ')
        self._corpus = open_ask_corpus(config, READY_SECONDS)
        self._role = build_role(config, self._codec, self._corpus.source)
        # The question is checked before the weights are loaded, which takes longest.
        if first_question is not None:
            self._role.prompt_ids(first_question)
        self._agent = Agent(config, folder, self._role)
        self._question_count = 0

    def answer(self, question: str, stoppable: bool = False) -> None:
        """Asks the policy and prints the rollout, or its JSON record with `as_json`.

        A stopped rollout gives a note and no record. Failed searches give a warning on stderr.

        Args:
          stoppable: whether Ctrl-C ends this answer instead of the command.

        Raises:
          UserError: the question is too long.
        """
        # A question that is too long is refused before it gets a number, so that later samples do not depend on it.
        self._role.prompt_ids(question)
        number = self._question_count
        self._question_count += 1
        # The form of question that the policy reads, if this question has another one.
        other_form = self._form
        if other_form is not None and other_form.fits(question):
            other_form = None
        if other_form is not None:
            self._note_form(other_form)
        with contextlib.ExitStack() as clock:
            # The first answer waits for XLA to compile.
            clock.enter_context(progress.clock('thinking'))

            def report(kind: str, content: Any) -> None:
                """Prints an event, unless the rollout is written as JSON."""
                if not self.as_json:
                    # The clock would overwrite the answer on the same terminal.
                    clock.close()
                    self.printer.report(kind, content)

            trajectory = self._agent.ask(
                question, number, self._temperature, report, stoppable=stoppable
            )
        # None: the user stopped the answer.
        if trajectory is None:
            self.printer.line('note', 'stopped', label='')
            return
        record = trajectory_record(self._codec, question, trajectory)
        if self.as_json:
            record['policy'] = str(self._folder)
            record['search'] = self._corpus.description
            record['temperature'] = self._temperature
            record['seed'] = self._seed
            print(one_line_json(record), flush=True)
        elif record['answer'] is None:
            reason = ENDINGS[trajectory.finish]
            if other_form is not None:
                reason += (
                    f'; the question has no {other_form.mark}, and this policy only fills in blanks'
                )
            self.printer.line('note', f'no answer: {reason}', label='')
        warning = self._corpus.warning()
        if warning:
            print(f'zeroplay_jax.ask: {clean(warning)}', file=sys.stderr)

    def _note_form(self, form: QuestionForm) -> None:
        """Prints once which form of question the policy reads; on stderr where stdout has JSON."""
        if self._form_was_noted:
            return
        self._form_was_noted = True
        if self.as_json:
            print(f'zeroplay_jax.ask: {form.hint}', file=sys.stderr, flush=True)
        else:
            self.printer.line('note', form.hint)

    def try_to_answer(self, question: str, stoppable: bool = False) -> bool:
        """Calls `answer`; prints a user error as one line on stderr. Returns False after such an error, else True."""
        try:
            self.answer(question, stoppable)
        except UserError as error:
            print(f'zeroplay_jax.ask: {error}', file=sys.stderr, flush=True)
            return False
        return True

    def greet(self, remark: str = '') -> None:
        """Prints what is asked (policy, corpus, example questions, keys), above the first prompt of the terminal.

        Args:
          remark: text after the folder of the policy.
        """
        self.printer.line('note', f'{self._folder}{remark}', label='policy')
        self.printer.line('note', self._corpus.description, label='search')
        if self._form is not None:
            self.printer.line('note', self._form.hint, label='asks')
            self._form_was_noted = True
        for question in self._corpus.examples:
            self.printer.line('note', question, label='try')
        self.printer.line('note', 'Ctrl-C stops an answer, Ctrl-D ends', label='')
