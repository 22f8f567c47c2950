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

_PROPOSER_FROM_ANSWER = (
    _SEARCH_RULES
    + """

You are given an answer. Work backwards and invent a hard question whose only answer it is, using exactly {hops} \
searches or more. First find something that is connected with the answer, rather than the answer itself; then let each \
search take you one fact further away. Build the question from what you found.

The question must:
1. rest on facts that you retrieved, and have this one answer only;
2. neither contain the answer nor hint at its wording;
3. need every one of those facts, so that nobody can answer it without searching;
4. be understood on its own, without the pages you read.

Check all four before you write. Finish with the question between <question> and </question>.

Searches: {hops}
Answer: {answer}"""
)

_ANSWER_FROM_DOCUMENTS = """Answer the question from the material below alone; some of it has nothing to do with the \
question. Think briefly inside <think> and </think>, then give only the short answer between <answer> and </answer>. \
If the material leaves more than one answer open, say so instead of guessing.

Material:
{documents}

Question: {question}"""

_SOLVER_WITH_PATH = (
    _SOLVER
    + """

For reference, this is how the question was made, from its first document to its answer. Use it to solve the question \
again in the form asked for above, with your own searches and thoughts.

{path}"""
)

_CHALLENGER = (
    _SEARCH_RULES
    + """

Your task is to invent one demanding open task for a research assistant: {kind}; not a question with a one-word \
answer. Search exactly {hops} times, each later time for something that the last passages named, starting from the \
document below.

The task must:
1. name the people, places or things it is about, so that they can be found by searching;
2. be about the document and what you found from there;
3. need all of those findings to be done well, and not give them away;
4. say what form the result should take.

Finish with the task between <task> and </task>.

Searches: {hops}
Document: {document}"""
)

_TASK_SOLVER = (
    _SEARCH_RULES
    + """ When you know enough, write the result between <answer> and </answer>: complete, but no longer than the task \
needs.

Task: {task}"""
)

# What a judge is asked; the same in every set, for it plays no role in a model's own training.
JUDGE = {
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
    'judge_relevance': """Is the task below about what this document and the passages with it tell, so that they help \
to do it?

Documents:
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
Reason briefly inside <think> and </think>, then write <score>1</score> if it does and <score>0</score> if it does not.

Task: {task}

Answer: {given}

Rubric: {rubric}""",
}

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
    'paper': {
        'solver': _SOLVER,
        'proposer': _PROPOSER,
        'proposer_from_answer': _PROPOSER_FROM_ANSWER,
        'answer_from_documents': _ANSWER_FROM_DOCUMENTS,
        'solver_with_path': _SOLVER_WITH_PATH,
        'challenger': _CHALLENGER,
        'task_solver': _TASK_SOLVER,
    },
}


# SCOPE's kinds of task (appendix H), in our words; a name that is not here stands in the prompt as it is.
KINDS = {
    '': 'an explanation, a comparison, a summary or a plan',
    'long_form_qa': 'one question about how or why something works or happened, to be answered in connected prose',
    'summarisation': 'a summary, or what is known put into another form',
    'planning': 'a plan that can be acted on, with steps, times or milestones',
    'writing': 'a formal text with an introduction, a body and a conclusion, such as an essay or a report',
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
    for text, field, _, _ in string.Formatter().parse((JUDGE | PROMPTS[prompts])[role]):
        content.append(text)
        if field == 'tools':
            content.append(tools)
        elif field is not None:
            content.append(Untrusted(str(fields[field])))
    return [{'role': 'user', 'content': content}]
