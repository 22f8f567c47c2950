"""A server of OpenEnv about words and their first letters; `python -m uvicorn examples.openenv_env.server:app`."""

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

TOPICS = ('river', 'stone', 'candle', 'garden', 'silver', 'window', 'forest', 'bridge')
LETTERS = 'tao'


class Text(Action):
    """What the policy wrote."""

    message: str


class Request(Observation):
    """What it reads."""

    text: str


class Letters(Environment):
    """Three texts, each of words that begin with another letter; a step earns a third of their share."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.steps = 0

    def reset(self, seed=0, episode_id=None, **kwargs):
        """Returns the first request."""
        self.steps = 0
        topic = TOPICS[seed % len(TOPICS)]
        return Request(text=f'Write about a {topic}. Begin words with {LETTERS[0]}.')

    def step(self, action, timeout_s=None, **kwargs):
        """Returns the next request and what the text has earned."""
        words = action.message.lower().split()
        hits = sum(word.startswith(LETTERS[self.steps]) for word in words)
        self.steps += 1
        is_done = self.steps == len(LETTERS)
        text = 'Done.' if is_done else f'Now with {LETTERS[self.steps]}.'
        return Request(text=text, reward=hits / max(len(words), 1) / len(LETTERS), done=is_done)

    @property
    def state(self):
        """The number of steps."""
        return State(step_count=self.steps)


app = create_fastapi_app(Letters, Text, Request, max_concurrent_envs=64)
