"""A tab of headless Chromium, controlled over the debugging pipe of the DevTools protocol."""

import json
import os
import select
import shutil
import subprocess

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser')
FLAGS = (
    '--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync '
    '--disable-component-update --remote-debugging-pipe --window-size=1300,1000'
).split()
MESSAGE_END = b'\0'
ANSWER_TIMEOUT = 60  # seconds; a browser that hangs must not hang the tests


class Browser:
    """Runs Chromium until `close`. Messages are JSON texts, each followed by a zero byte."""

    def __init__(self, profile):
        commands_out, self.commands = os.pipe()
        self.answers, answers_in = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
        shell = f'exec "$@" 3<&{commands_out} 4>&{answers_in}'
        self.process = subprocess.Popen(
            ['bash', '-c', shell, 'bash', CHROMIUM, *FLAGS, f'--user-data-dir={profile}'],
            pass_fds=(commands_out, answers_in),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands_out)
        os.close(answers_in)
        self.buffer = b''
        self.message_id = 0
        self.session = {}
        target = self.call('Target.createTarget', url='about:blank')['targetId']
        attached = self.call('Target.attachToTarget', targetId=target, flatten=True)
        self.session = {'sessionId': attached['sessionId']}

    def close(self):
        self.process.terminate()
        self.process.wait(20)
        os.close(self.commands)
        os.close(self.answers)

    def call(self, method, **params):
        """Returns the result of a protocol method; events that arrive before it are ignored."""
        self.message_id += 1
        message = {'id': self.message_id, 'method': method, 'params': params} | self.session
        os.write(self.commands, json.dumps(message).encode() + MESSAGE_END)
        answer = {}
        while answer.get('id') != self.message_id:
            answer = self.receive()
        assert 'error' not in answer, answer
        return answer['result']

    def receive(self):
        while MESSAGE_END not in self.buffer:
            readable, _, _ = select.select([self.answers], [], [], ANSWER_TIMEOUT)
            data = os.read(self.answers, 65536) if readable else b''
            assert data, 'Chromium ended or does not answer'
            self.buffer += data
        message, self.buffer = self.buffer.split(MESSAGE_END, 1)
        return json.loads(message)

    def js(self, expression):
        """Returns the value of a JavaScript expression; promises are awaited."""
        answer = self.call(
            'Runtime.evaluate', expression=expression, awaitPromise=True, returnByValue=True
        )
        assert 'exceptionDetails' not in answer, answer
        return answer['result'].get('value')

    def until(self, condition):
        """Waits until a JavaScript condition is true (at most about 20 seconds)."""
        wait = 'await new Promise((done) => setTimeout(done, 25));'
        loop = f'for (let i = 0; i < 800; i++) {{ if ({condition}) return true; {wait} }}'
        assert self.js(f'(async () => {{ {loop} return false; }})()'), condition

    def open(self, url):
        self.call('Page.navigate', url='about:blank')
        self.call('Page.navigate', url=url)
        self.until('location.protocol === "file:" && document.readyState === "complete"')
