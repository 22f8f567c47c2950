"""What each role is told. `mini` is the short form that the built-in checkpoint was trained on; `paper` spells the
rules out for instruction-tuned models. Fields in braces are filled with foreign text and marked as such."""

from __future__ import annotations

import string
from collections.abc import Mapping

from zeroplay_jax.rollout.tokens import Message, Untrusted

_SEARCH_RULES = """You can look things up. Before every step think inside <think> and </think>. {tools} Search as \
often as you need."""

_SOLVER = (
    _SEARCH_RULES
    + """ When you are sure, give only the short answer between <answer> and </answer>, without any explanation.

Question: {question}"""
)

_PROPOSER = (
    _SEARCH_RULES
    + """

Your task is to invent one hard question that can be checked. A hop is one fact that has to be found in one document; \
a question of {hops} hops needs {hops} such facts, each leading to the next. The document below holds the first. \
Search exactly one time fewer than there are hops, each time for something that the last document named, and follow \
the chain away from the document you were given.

The question must:
1. have one answer only, and that answer must be short: a name, a date, a number, or yes or no;
2. have its answer stated in the last document you read;
3. not contain its own answer;
4. need every hop, so that no single document answers it;
5. be understood on its own: name the starting point, never 'the document';
6. not be answerable from general knowledge without searching.

Finish with the question between <question> and </question> and its answer between <answer> and </answer>.

Hops: {hops}
Document: {document}"""
)

PROMPTS: dict[str, dict[str, str]] = {
    'mini': {
        'solver': 'Question: {question}',
        'proposer': 'Write a question of {hops} hops.\nDocument: {document}',
        'proposer_from_answer': 'Write a question of {hops} hops.\nAnswer: {answer}',
        'answer_from_documents': 'Documents: {documents}\nQuestion: {question}',
        'solver_with_path': 'Path: {path}\nQuestion: {question}',
        'challenger': 'Write a task of {hops} hops.\nDocument: {document}',
        'task_solver': 'Task: {task}',
    },
    'paper': {'solver': _SOLVER, 'proposer': _PROPOSER},
}


def document_text(document: Mapping[str, str]) -> str:
    """A document {'title', 'text'} as it stands in a prompt."""
    return f'(Title: {document["title"]}) {document["text"]}'


def messages(prompts: str, role: str, tools: str = '', **fields: object) -> list[Message]:
    """The chat that opens a rollout of `role`; field values are foreign text, `tools` explains the tool call.

    Raises:
      KeyError: an unknown set, role or field.
    """
    content: list[str] = []
    for text, field, _, _ in string.Formatter().parse(PROMPTS[prompts][role]):
        content.append(text)
        if field == 'tools':
            content.append(tools)
        elif field is not None:
            content.append(Untrusted(str(fields[field])))
    return [{'role': 'user', 'content': content}]
