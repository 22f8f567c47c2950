"""Servers that speak the OpenAI protocol; one grades by a hash of the prompt: same request, same reply."""

import hashlib
import http.server
import json
import threading


class ChatServer(http.server.ThreadingHTTPServer):
    """Answers a chat by `reply(body)`: a message, or (status, bytes); `bodies` and `keys` are those of the requests."""

    daemon_threads = True

    def __init__(self, reply):
        self.reply, self.bodies, self.keys = reply, [], []
        super().__init__(('127.0.0.1', 0), _Handler)

    @property
    def url(self):
        return f'http://127.0.0.1:{self.server_port}/v1'

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


def completion(message):
    # The message itself stays as it is: several requests may be answered with it.
    content = dict(message)
    ending = content.pop('finish_reason', 'stop')
    choice = {'index': 0, 'finish_reason': ending, 'message': {'role': 'assistant'} | content}
    usage = {'prompt_tokens': 10, 'completion_tokens': 3}
    return json.dumps({'choices': [choice], 'usage': usage}).encode()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        self.server.bodies.append(body)
        self.server.keys.append(self.headers['Authorization'])
        reply = self.server.reply(body)
        status, data = reply if isinstance(reply, tuple) else (200, completion(reply))
        self.send_response(status)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Keeps the output of tests clean."""


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
