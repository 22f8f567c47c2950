"""Prompts shared by recipes and evaluations. A recipe declares its own in `Recipe.prompts`.

A prompt has one text per set: `mini` is the short form that the built-in checkpoint was trained on,
`paper` spells the rules out for instruction-tuned models. Fields in braces are filled with
untrusted text; `{tools}` is the explanation of the registered tools.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence

from zeroplay_jax.rollout.foreign_text import Message, Untrusted
from zeroplay_jax.types import Json

# Name → one text for all sets, or set name → text.
Prompts = Mapping[str, str | Mapping[str, str]]

# The short forms of the set 'mini', on which the built-in checkpoints were trained. Their order is part
# of the training of the built-in tokenizer.
BUILT_IN_FORMS = {
    'solver': 'Question: {question}',
    'proposer': 'Write a question of {hops} hops.\nDocument: {document}',
    'proposer_from_answer': 'Write a question of {hops} hops.\nAnswer: {answer}',
    'answer_from_documents': 'Documents: {documents}\nQuestion: {question}',
    'solver_with_path': 'Path: {path}\nQuestion: {question}',
    'challenger': 'Write a task of {hops} hops.\nDocument: {document}',
    'task_solver': 'Task: {task}',
}

# The rules of Search-R1's prompt, in words of this project. Solvers of all recipes share them.
SEARCH_RULES = """You can look things up. Before every step think inside <think> and </think>. {tools} Search as \
often as you need."""

SOLVER = (
    SEARCH_RULES
    + """ When you are sure, give only the short answer between <answer> and </answer>, without any explanation.

Question: {question}"""
)

_TASK_SOLVER = (
    SEARCH_RULES
    + """ When you know enough, write the result between <answer> and </answer>: complete, but no longer than the task \
needs.

Task: {task}"""
)

# Prompts of judges are the same in every set: a judge is not trained, so no form was learnt.
SHARED: Prompts = {
    'solver': {'mini': BUILT_IN_FORMS['solver'], 'paper': SOLVER},
    'task_solver': {'mini': BUILT_IN_FORMS['task_solver'], 'paper': _TASK_SOLVER},
    'judge_answer': """Decide whether a given answer to a question is right. It is right if it means the same as one \
of the accepted answers: other spelling, order, units or detail do not matter, another person, place, number or date \
does. An answer that lists several possibilities or refuses is wrong.

Question: {question}
Accepted answers: {answers}
Given answer: {given}

Reply with the single word Correct or Wrong.""",
    'judge_entities': """Could somebody who sees only the task below find out by searching which people, places or \
things it is about? References such as 'the city above' or 'a certain author' cannot be found.

Task: {task}

Reply with the single word Yes or No.""",
    'judge_relevance': """Is the task below about people, places, events or things that the following text tells of? \
The text need not suffice to do the task. A task so general that it would suit any text is not about this one.

Text:
{document}

Task: {task}

Reply with the single word Yes or No.""",
    'judge_rubrics': """Write the list by which answers to the task below will be graded: {low} to {high} items, each \
at most 25 words, each beginning with a verb in the imperative, each to be met or not met by an answer on its own. Use \
the documents for what is true. Write nothing but the list, in this form:

<rubrics>
<rubric priority=critical>…</rubric>
<rubric priority=important>…</rubric>
<rubric priority=bonus>…</rubric>
</rubrics>

Documents:
{document}

Task: {task}""",
    'judge_grade': """Decide whether an answer does what one rubric asks, whatever else is good or bad about it. \
Be strict: an answer that does it in part, or of which you are not sure, does not. Reason briefly inside <think> and \
</think>, then write <score>1</score> if it does and <score>0</score> if it does not.

Task: {task}

Answer: {given}

Rubric: {rubric}""",
}


def select(prompt_set: str, *declared: Prompts) -> dict[str, str]:
    """Returns name → text of one set; later declarations override earlier ones and the shared prompts.

    Raises:
      KeyError: a prompt has texts per set, and none for this one.
    """
    selected: dict[str, str] = {}
    for prompts in (SHARED, *declared):
        for name, text in prompts.items():
            if isinstance(text, str):
                selected[name] = text
            else:
                selected[name] = text[prompt_set]
    return selected


def document_text(document: Json) -> str:
    """Returns a document {'title', 'text'} as it is written in a prompt.

    With 'link', a name in the text about which there is another document, its first occurrence is put in square
    brackets. The spaces inside them give the name the same tokens as in running text.
    """
    text = document['text']
    link = document.get('link')
    if link:
        text = _linked_name(link).sub(lambda match: f'[ {match.group()} ]', text, count=1)
    return f'(Title: {document["title"]}) {text}'


def has_link(text: str, link: str) -> bool:
    """Returns whether a name occurs in a text as `document_text` puts it in brackets: not as a part of a word."""
    return _linked_name(link).search(text) is not None


def _linked_name(link: str) -> re.Pattern[str]:
    return re.compile(rf'(?<!\S){re.escape(link)}(?!\w)')


def documents_text(documents: Sequence[Json]) -> str:
    """Returns documents as one text, one per line."""
    return '\n'.join(document_text(document) for document in documents)


def fill(template: str, tools: Sequence[str] = (), **fields: object) -> list[Message]:
    """Returns the chat that opens a rollout: one user message.

    Args:
      template: text with fields in braces.
      tools: parts that explain the tool calls, for the field {tools}.
      fields: values of all other fields, untrusted.

    Raises:
      KeyError: the template has a field without a value.
    """
    # The template is parsed and not formatted, so that every value stays a part of its own, which the codec
    # encodes as untrusted text, and braces in a value have no meaning.
    content: list[str] = []
    for text, field, _, _ in string.Formatter().parse(template):
        content.append(text)
        # `tools` has trusted parts too: the tags of calls.
        if field == 'tools':
            content.extend(tools)
        elif field is not None:
            content.append(Untrusted(str(fields[field])))
    return [{'role': 'user', 'content': content}]
