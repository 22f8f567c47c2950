"""Servers that speak the OpenAI protocol; one grades by a hash of the prompt: same request, same reply."""

import hashlib

from web_servers import Web


class ChatServer(Web):
    """Answers a chat by `reply(body)`, as `Web.chat`."""

    def __init__(self, reply):
        super().__init__()
        self.chat = reply

    @property
    def url(self):
        return f'http://127.0.0.1:{self.server_port}/v1'


class JudgeServer(ChatServer):
    """`prompts` are those that it got; the example that every evaluation begins with is counted in `examples` only.

    `pause` is called with the number of prompts so far before a reply.
    """

    def __init__(self, pause=lambda number: None):
        self.prompts, self.examples, self.pause = [], 0, pause
        super().__init__(self.judge)

    def judge(self, body):
        prompt = body['messages'][0]['content']
        if 'capital of France' in prompt:
            self.examples += 1
            return {'content': 'Correct' if 'single word Correct' in prompt else '<score>1</score>'}
        self.prompts.append(prompt)
        self.pause(len(self.prompts))
        return {'content': reply(prompt)}


def reply(prompt):
    """Three of four rubrics are met; one reply in eight has no verdict."""
    number = hashlib.sha256(prompt.encode()).digest()[0]
    if number % 8 == 0:
        return 'I would rather not say.'
    return f'<think>Hm.</think><score>{int(number % 4 > 0)}</score>'
