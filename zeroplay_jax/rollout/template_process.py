"""Renders chat templates in a process of its own, where they can neither hang nor fill the memory of a run.

A template is a program of others, and one line of it can take hours or gigabytes. The process gets requests and sends
replies as lines of JSON. It serves all tokenizers of a command and ends with it, because that closes the pipe.
"""

import datetime
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import types
from typing import Any

# CPU seconds that a template may take for all its chats; published ones take a tenth of one.
MOST_SECONDS = 10.0
# Address space of the process; it has 0.2 GB without a template.
_MOST_GIGABYTES = 2
_MOST_CHARACTERS = 1_000_000

_lock = threading.Lock()
_process: Any = None


def render(request: list) -> list:
    """Returns [text that a template writes, why it writes none, CPU seconds that are left].

    Args:
      request: [the template, its variables, the moment that it gets as the present one in the ISO format, the CPU
        seconds that it may take].
    """
    global _process
    limits = f'{MOST_SECONDS:.0f} s of CPU time and {_MOST_GIGABYTES} GB of memory'
    ended = ['', f'its process ended; a template may take {limits}', 0.0]
    # A timer of 0 seconds would never end.
    if not request[-1]:
        return ended
    reply = ''
    with _lock:
        # A signal to a group of processes ends this one only.
        if _process is None or _process.poll() is not None:
            # Nothing is imported from the folder of this file, and linear algebra starts no threads.
            _process = subprocess.Popen(
                [sys.executable, '-P', __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | {'OPENBLAS_NUM_THREADS': '1'},
            )
        try:
            print(json.dumps(request), file=_process.stdin, flush=True)
            reply = _process.stdout.readline()
        except BrokenPipeError:
            pass
        finally:
            # Also after Ctrl-C: no later request may get this reply.
            if not reply:
                _process.kill()
                _process.communicate()
    return json.loads(reply) if reply else ended


def _serve() -> None:
    """Replies to the requests on standard input."""
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_GIGABYTES << 30,) * 2)
    # The files of these packages take a second to load, and templates need nothing of them.
    (folder,) = importlib.util.find_spec('transformers').submodule_search_locations  # type: ignore
    for name, path in (('transformers', folder), ('transformers.utils', f'{folder}/utils')):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [path]
    from transformers.utils import chat_template_utils

    for line in sys.stdin:
        source, variables, now, seconds = json.loads(line)
        text = error = ''
        started = time.process_time()
        # Its signal ends the process, also inside a library.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            # The public functions give a template no other date than today's.
            template = chat_template_utils._compile_jinja_template(source)
            text = template.render(
                **variables, strftime_now=datetime.datetime.fromisoformat(now).strftime
            )
            if len(text) > _MOST_CHARACTERS:
                raise ValueError(f'it writes {len(text):,} characters around a message')
        except MemoryError:
            return
        # Templates raise exceptions of many types.
        except Exception as exception:
            text, error = '', str(exception)[:_MOST_CHARACTERS] or type(exception).__name__
        signal.setitimer(signal.ITIMER_PROF, 0)
        # Not what the timer has left, which is rounded up at every call. A timer of 0 seconds would never end.
        seconds_left = max(1e-3, seconds - (time.process_time() - started))
        print(json.dumps([text, error, seconds_left]), flush=True)


if __name__ == '__main__':
    _serve()
