"""For inspect-ai and lm-eval: questions of a file, our search, and a policy behind a server of others."""

import asyncio
import os
import re

import httpx
from inspect_ai import Task, dataset, model, scorer, solver, task, tool
from transformers import AutoTokenizer


def passages(queries):
    """What the search server finds, in the form that our policies read."""
    url, body = os.environ['SEARCH_URL'], {'queries': queries, 'topk': 3}
    reply = httpx.post(f'{url}/retrieve', json=body, timeout=60).raise_for_status()
    blocks = []
    for documents in reply.json()['result']:
        lines = []
        for number, document in enumerate(documents, 1):
            # The first line is a title if it is in quotes.
            parts = re.fullmatch(r'(?:"([^\n]*)"\n)?(.*)', document['contents'], re.DOTALL)
            lines.append(f'Doc {number}(Title: {parts[1] or ""}) {parts[2]}')
        blocks.append('\n'.join(lines) or 'No passage found.')
    return '\n---\n'.join(blocks)


def with_passages(questions):
    """For lm-eval, which has no tools: each question with what one search finds."""
    return questions.map(lambda line: {'documents': passages([line['question']])})


@tool.tool
def search():
    """The tool of inspect-ai, with the schema of ours."""

    async def execute(query_list: list[str]) -> str:
        """passages of the corpus that match a query

        Args:
            query_list: what to look for
        """
        return await asyncio.to_thread(passages, query_list)

    return execute


@solver.solver
def tag_turns(folder, most_turns=8):
    """A policy of the syntax search_r1: it writes on behind a result, in one turn of the chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    async def solve(state, generate):
        messages = [{'role': 'user', 'content': state.user_prompt.text}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        for number in range(most_turns):
            state.output = await model.get_model().generate([model.ChatMessageUser(content=text)])
            said = state.output.completion
            # Some servers leave a stop string out.
            match = re.search(r'<search>([^<]*)(?:</search>)?\s*$', said)
            queries = {'query_list': [match[1]]} if match else {}
            calls = [tool.ToolCall(f'call{number}', 'search', queries)] if match else None
            state.messages.append(model.ChatMessageAssistant(content=said, tool_calls=calls))
            if not match:
                break
            results, _ = await model.execute_tools(state.messages, [search()])
            state.messages += results
            text += f'{said[: match.end(1)]}</search>\n\n<information>{results[0].text}</information>\n\n'
        return state

    return solve


@scorer.scorer(metrics=[scorer.mean(), scorer.stderr()])
def exact_match():
    """Exact match of what stands in the last tag."""

    async def score(state, target):
        answers = re.findall('<answer>([^<]*)', state.output.completion)
        state.output.completion = answers[-1] if answers else ''
        return await scorer.exact()(state, target)

    return score


@task
def questions(file, folder=''):
    """`folder`: of a policy whose calls are tags; without it the server's chat template writes calls and results."""
    turns = [tag_turns(folder)] if folder else [solver.use_tools(search()), solver.generate()]
    stops = ['</search>', '</answer>'] if folder else None
    return Task(
        dataset.json_dataset(
            file, lambda line: dataset.Sample(line['question'], target=line['answers'])
        ),
        solver=[solver.prompt_template('Question: {prompt}'), *turns],
        scorer=exact_match(),
        config=model.GenerateConfig(max_tokens=512, temperature=0.0, stop_seqs=stops),
    )
