"""Writes docs/recipe-reference.md from the docstrings of what recipes are written with.

.venv/bin/python docs/recipe_page.py > docs/recipe-reference.md
"""

import ast
import pathlib
import re

PACKAGE = pathlib.Path(__file__).parents[1] / 'zeroplay_jax'
INTRODUCTION = """# What recipes are written with

[Write a recipe](recipes.md) says how the parts go together. This page is made of their docstrings
(`.venv/bin/python docs/recipe_page.py > docs/recipe-reference.md`). `config.<role>` is the section of a trained role.
"""
# Module → its names that recipes use, in the order of the page; of classes these methods and properties.
NAMES = {
    'selfplay.recipe': """
        RoleSpec Recipe Recipe.roles Recipe.check Recipe.phases Recipe.tasks Recipe.episode Recipe.after_step
        Recipe.state Recipe.restore Recipe.answer Recipe.judge_reward Recipe.judgements Recipe.reads_documents
        Recipe.first_tasks
    """,
    'selfplay.schedule': 'Phase Step BatchCursor QuestionPool in_epochs',
    'types': """
        Task Question Outcome Row RowInfo TaskDropped Trajectory Trajectory.calls_of Trajectory.has_tool_failure Turn
        ToolCall identity_rng
    """,
    'selfplay.context': 'RolloutContext RolloutContext.ask RolloutContext.go_on RolloutContext.fork '
    'RolloutContext.log_probs RolloutContext.log_probs_after',
    'selfplay.answers': 'group_of final_answer score grade retrieved_passages',
    'recipes.datasets': """
        DocumentSampler DocumentSampler.tasks SeedDocument HiddenAnswer documents_of
        tasks_in_turns dataset_tasks numbered_tasks training_questions hidden_answers alternate simultaneous
        generation_steps is_trained
    """,
    'recipes.proposing': """
        propose Proposal read_proposal proposal_row question_record path_of teacher_prompt
    """,
    'recipes.solving': 'solver_rows attempts attempt Attempt solve_count',
    'recipes.drzero': 'Recipe Recipe.proposals Recipe.pool_question',
    'objectives.rewards': 'difficulty',
    'objectives.answers': 'normalize_answer sub_exact_match extract_last majority_answer',
    'settings.kinds': 'Section Problem',
}
# A line that begins a list of a docstring.
_LISTS = ('Args:', 'Attributes:', 'Returns:', 'Raises:')


def page() -> str:
    """Returns the page as Markdown."""
    lines = [INTRODUCTION]
    for module, names in NAMES.items():
        path = PACKAGE / f'{module.replace(".", "/")}.py'
        tree = ast.parse(path.read_text(encoding='utf-8'))
        lines += [f'## `zeroplay_jax.{module}`', '']
        for name in names.split():
            lines += _entry(name, _find(tree, name))
    return '\n'.join(lines).rstrip() + '\n'


def _find(tree: ast.AST, name: str) -> ast.AST:
    """Returns the class or function with a dotted name."""
    node = tree
    for part in name.split('.'):
        (node,) = [each for each in node.body if getattr(each, 'name', None) == part]
    return node


def _entry(name: str, node: ast.AST) -> list[str]:
    """Returns heading, call and docstring of a class or function."""
    lines = [f'### `{name}`', '']
    signature = _signature(node)
    if signature:
        lines += ['```python', _wrapped(signature), '```', '']
    return [*lines, *_markdown(ast.get_docstring(node) or ''), '']


def _signature(node: ast.AST) -> str:
    """Returns how something is called: a function, a class by its fields or by its constructor; '' for others."""
    if isinstance(node, ast.ClassDef):
        for each in node.body:
            if getattr(each, 'name', None) == '__init__':
                return f'{node.name}({_arguments(each)})'
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        if any('ClassVar' in ast.unparse(each.annotation) for each in fields):
            return ''
        return f'{node.name}({", ".join(map(_field, fields))})' if fields else ''
    call = f'{node.name}({_arguments(node)})'
    if any(ast.unparse(each) == 'property' for each in node.decorator_list):
        call = node.name
    if isinstance(node, ast.AsyncFunctionDef):
        call = f'await {call}'
    if node.returns:
        call = f'{call} -> {ast.unparse(node.returns)}'
    if any(ast.unparse(each) == 'classmethod' for each in node.decorator_list):
        call = f'@classmethod\n{call}'
    return call


def _field(field: ast.AnnAssign) -> str:
    """Returns the name of a field, with its default if that is short."""
    name = ast.unparse(field.target)
    if field.value is None:
        return name
    value = ast.unparse(field.value)
    factory = re.search(r'default_factory=(\w+)', value)
    if factory:
        value = f'{factory[1]}()'
    return f'{name}={value if len(value) < 20 else "…"}'


def _wrapped(call: str) -> str:
    """Returns a call with one argument a line if it is long."""
    start, bracket, rest = call.partition('(')
    arguments, end, result = rest.rpartition(') -> ')
    if not end:
        arguments, end, result = rest[:-1], ')', ''
    if len(call) <= 100 or not bracket:
        return call
    # Commas within brackets are those of types.
    parts = re.split(r', (?![^\[(]*[\])])', arguments)
    return '\n'.join([f'{start}(', *(f'    {part},' for part in parts), f'{end}{result}'])


def _arguments(node: ast.FunctionDef) -> str:
    """Returns the arguments of a function or method, with types and defaults."""
    return re.sub(r'^(self|cls)(, )?', '', ast.unparse(node.args))


def _markdown(docstring: str) -> list[str]:
    """Returns a docstring, its lists of arguments and the like as lists of Markdown."""
    lines: list[str] = []
    is_in_list = False
    for line in docstring.split('\n'):
        text = line.strip()
        if text in _LISTS:
            lines += [text.rstrip(':') + ':', '']
            is_in_list = True
            continue
        if is_in_list and line and not line.startswith(' '):
            is_in_list = False
        named = re.match(r"  (\*{0,2}\w[\w, ]*(?:\('\w+'\))?): (.*)", line) if is_in_list else None
        if named:
            lines.append(f'- `{named[1]}`: {named[2]}')
        elif is_in_list and text:
            lines.append(f'  {text}' if lines[-1] else f'- {text}')
        else:
            lines.append(text if is_in_list else line)
    return lines


if __name__ == '__main__':
    print(page(), end='')
