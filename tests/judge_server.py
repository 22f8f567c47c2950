"""A server that speaks the OpenAI protocol, grades and rates by a hash of the prompt: same request, same reply."""

import hashlib
import http.server
import json
import threading


class JudgeServer(http.server.ThreadingHTTPServer):
    """Serves until the context ends; `prompts` are those that it got, `pause` is awaited before every reply.

    The example that every evaluation begins with is counted in `examples` only.
    """

    daemon_threads = True

    def __init__(self, pause=lambda number: None):
        self.prompts, self.pause, self.examples = [], pause, 0
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


def reply(prompt):
    """Three of four rubrics are met, questions rated from 1 to 5; one reply in eight has no verdict."""
    number = hashlib.sha256(prompt.encode()).digest()[0]
    if number % 8 == 0:
        return 'I would rather not say.'
    if 'How much work' in prompt:
        return f'<think>Hm.</think><score>{1 + number % 5}</score>'
    return f'<think>Hm.</think><score>{int(number % 4 > 0)}</score>'


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        prompt = body['messages'][0]['content']
        if 'capital of France' in prompt:
            self.server.examples += 1
            text = 'Correct' if 'single word Correct' in prompt else '<score>1</score>'
        else:
            self.server.prompts.append(prompt)
            self.server.pause(len(self.server.prompts))
            text = reply(prompt)
        message = {'role': 'assistant', 'content': text}
        choice = {'index': 0, 'finish_reason': 'stop', 'message': message}
        shape = {'id': 'x', 'object': 'chat.completion', 'created': 0, 'model': body['model']}
        data = json.dumps(shape | {'choices': [choice]}).encode()
        self.send_response(200)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Keeps the test's output clean."""
