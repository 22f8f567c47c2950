"""Three environments as the documentation of verifiers writes them: one turn, tools, several turns."""

import difflib

import verifiers.legacy as vf
from datasets import Dataset

WORDS = ('river', 'stone', 'candle', 'garden', 'silver', 'window', 'forest', 'bridge')
BORN = {'Rapon': 'Demas', 'Memon': 'Tromon', 'Reson': 'Troles', 'Ferus': 'Bitas'}
LETTERS = 'eao'


def load_environment(kind='words'):
    """Returns the environment of a kind: words, people or letters."""
    return {'words': words, 'people': people, 'letters': letters}[kind]()


def words():
    """One turn: write a word backwards."""

    def similarity(completion, answer):
        return difflib.SequenceMatcher(None, completion[-1]['content'], answer).ratio()

    rows = [{'question': f'Write {word} backwards.', 'answer': word[::-1]} for word in WORDS]
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows),
        system_prompt='Answer with one word.',
        rubric=vf.Rubric(funcs=[similarity]),
    )


def people():
    """Tools: look up where somebody was born."""

    async def search(query: str) -> str:
        """Finds what is known about somebody.

        Args:
          query: a question or a name.
        """
        for name, town in BORN.items():
            if name in query:
                return f'Doc 1(Title: {name}) {name} was born in {town}.'
        return 'No passage found.'

    def is_named(completion, answer):
        return float(answer in completion[-1]['content'])

    def is_shortest(completions) -> list[float]:
        lengths = [len(completion) for completion in completions]
        return [float(length == min(lengths)) for length in lengths]

    rows = [
        {'question': f'Question: What is the birthplace of {name}?', 'answer': town}
        for name, town in BORN.items()
    ]
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows),
        tools=[search],
        max_turns=3,
        rubric=vf.Rubric(funcs=[is_named, is_shortest], weights=[1.0, 0.1]),
    )


class Letters(vf.MultiTurnEnv):
    """Several turns: the next text has to do without another letter."""

    async def setup_state(self, state):
        """Begins with no text."""
        state['shares'] = []
        return state

    async def env_response(self, messages, state, **kwargs):
        """Says how it went, and which letter is next."""
        number = len(state['shares'])
        state['shares'].append(share_without(LETTERS[number], messages[-1]['content']))
        if number + 1 == len(LETTERS):
            state['final_env_response'] = [{'role': 'user', 'content': 'Done.'}]
            return state['final_env_response']
        letter = LETTERS[number + 1]
        return [{'role': 'user', 'content': f'Now a text about it without the letter {letter}.'}]


def share_without(letter, text):
    """Returns the share of the words of a text that do without a letter."""
    found = text.lower().split()
    return sum(letter not in word for word in found) / max(len(found), 1)


def letters():
    """Several turns: texts without a letter."""

    def mean_share(state):
        return sum(state['shares']) / len(LETTERS)

    rows = [{'question': f'Write about a {word} without the letter e.'} for word in WORDS]
    return Letters(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[mean_share]))
