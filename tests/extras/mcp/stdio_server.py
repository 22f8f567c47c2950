"""An MCP server over standard input and output without a library: python stdio_server.py FILE of its behaviour.

The file is JSON: {"tools": […], "results": {tool: result}, "greeting": text, "calls": file of what was asked}.
A result {"error": …} is an error of the protocol, {"raw": text} what is written as it is, {"exit": status} the end of
the process. {"pages": {cursor: [names, next cursor]}} lists the tools of these names; the first cursor is "first".
"""

import json
import os
import pathlib
import sys
import time

behaviour = json.loads(pathlib.Path(sys.argv[1]).read_text())


def write(text):
    sys.stdout.write(text + '\n')
    sys.stdout.flush()


def result_of(method, parameters):
    if method == 'initialize':
        return {
            'protocolVersion': parameters['protocolVersion'],
            'capabilities': {'tools': {}},
            'serverInfo': {'name': 'test', 'version': '1'},
        }
    if method == 'tools/list':
        tools, cursor = behaviour['tools'], None
        if 'pages' in behaviour:
            names, cursor = behaviour['pages'][parameters.get('cursor', 'first')]
            tools = [tool for tool in tools if tool['name'] in names]
        return {'tools': tools, 'nextCursor': cursor}
    return None


if 'greeting' in behaviour:
    write(behaviour['greeting'])
for line in sys.stdin:
    request = json.loads(line)
    if 'calls' in behaviour:
        with open(behaviour['calls'], 'a') as calls:
            calls.write(json.dumps([os.getpid(), request['method']]) + '\n')
    if 'id' not in request:
        continue
    reply = {'jsonrpc': '2.0', 'id': request['id']}
    result = result_of(request['method'], request.get('params') or {})
    if request['method'] == 'tools/call':
        result = behaviour['results'][request['params']['name']]
        if result == 'environment':
            result = {'content': [{'type': 'text', 'text': json.dumps(dict(os.environ))}]}
        if 'exit' in result:
            sys.stderr.write('something broke\n')
            sys.exit(result['exit'])
        if 'sleep' in result:
            time.sleep(result['sleep'])
        if 'raw' in result:
            write(result['raw'])
            continue
    if result is None:
        result = {'error': {'code': -32601, 'message': 'no such method'}}
    reply |= result if 'error' in result else {'result': result}
    write(json.dumps(reply))
