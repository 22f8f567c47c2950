"""Draws the figures of the documentation: docs/figures/*.svg, for light and dark pages and for readers of all colours.

.venv/bin/python docs/figures.py
"""

import html
import itertools
import pathlib
import textwrap

FOLDER = pathlib.Path(__file__).parent / 'figures'
WIDTH = 680  # on a phone of 390 pixels, the smallest text is then 7 pixels high
# Colour → (on a light page, on a dark one). Fills differ in lightness and borders in form, so that no meaning hangs on
# hue alone; blue and orange are told apart with every kind of colour vision (Okabe and Ito).
COLOURS = {
    'page': ('#ffffff', '#0d1117'),
    'ink': ('#1f2328', '#e6edf3'),
    'soft': ('#57606a', '#9da7b3'),
    'grey': ('#f0f2f4', '#22272e'),
    'grey_line': ('#8c959f', '#768390'),
    'blue': ('#d3e8f7', '#0f3b5c'),
    'blue_line': ('#0072b2', '#56b4e9'),
    'orange': ('#fdebc8', '#4d3405'),
    'orange_line': ('#b36b00', '#e69f00'),
}
STYLE = """
text {{ font-family: system-ui, sans-serif; font-size: 14.5px; fill: {ink} }}
.head {{ font-size: 16px; font-weight: 600 }}
.small {{ font-size: 13px }}
.module {{ font-size: 12.5px; fill: {soft} }}
.middle {{ text-anchor: middle }}
.page {{ fill: {page}; stroke: {grey_line}; stroke-opacity: 0.4 }}
.grey {{ fill: {grey}; stroke: {grey_line} }}
.blue {{ fill: {blue}; stroke: {blue_line}; stroke-width: 2 }}
.orange {{ fill: {orange}; stroke: {orange_line}; stroke-width: 2 }}
.disk {{ fill: {page}; stroke: {ink}; stroke-width: 2 }}
.dashed {{ stroke-dasharray: 5 3 }}
.taught {{ fill: {blue_line} }}
.mask1 {{ font-size: 12px; font-weight: 700; fill: {page} }}
.mask0 {{ font-size: 12px }}
.cell {{ font-size: 12.5px }}
.row {{ font-size: 13px; font-weight: 600 }}
.line {{ fill: none; stroke: {soft}; stroke-width: 1.75 }}
.tip {{ fill: {soft} }}
"""
# Width of a letter of a wide font, such as DejaVu Sans, over its size; others need less room.
LETTER = 0.6


class Drawing:
    """The elements of a figure, in the order in which they are drawn.

    Args:
      title: what it shows, for screen readers.
      description: the same in full.
    """

    def __init__(self, title: str, description: str):
        self.title = title
        self.description = description
        self.elements: list[str] = []

    def text(self, x: float, y: float, text: str, style: str = '') -> None:
        """Writes a line of text; `y` is its baseline."""
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" class="{style}">{html.escape(text)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, style: str) -> None:
        """Draws a box with round corners."""
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="{style}"/>'
        )

    def path(self, steps: str, has_tip: bool = True) -> None:
        """Draws a line along SVG path steps, with an arrow's tip at its end."""
        tip = ' marker-end="url(#tip)"' if has_tip else ''
        self.elements.append(f'<path d="{steps}" class="line"{tip}/>')

    def svg(self, height: float) -> str:
        """Returns the figure as SVG."""
        light = STYLE.format(**{name: pair[0] for name, pair in COLOURS.items()})
        dark = STYLE.format(**{name: pair[1] for name, pair in COLOURS.items()})
        page = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8" class="page"/>'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
            f'height="{height:g}" role="img" aria-labelledby="title description">',
            f'<title id="title">{html.escape(self.title)}</title>',
            f'<desc id="description">{html.escape(self.description)}</desc>',
            f'<style>{light}@media (prefers-color-scheme: dark) {{{dark}}}\n</style>',
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto" '
            'markerUnits="userSpaceOnUse"><path d="M0 0L8 4L0 8z" class="tip"/></marker>',
            page,
            *self.elements,
            '</svg>',
        ]
        return '\n'.join(parts) + '\n'


# Stations of a step: column and row of their place, colour, heading, two lines, and the modules.
STATIONS = (
    (0, 0, 'grey', 'Tasks', 'documents, answers, questions:', 'of the corpus, files or the pool',
     'recipes/ · selfplay/collection.py'),
    (0, 1, 'grey', 'Episodes', 'a coroutine per task, which asks', 'its roles for rollouts',
     'recipes/ · selfplay/context.py'),
    (0, 2, 'grey', 'Rewards', 'by a rule, a judge or by other', 'rollouts: rows, each in a group',
     'recipes/ · selfplay/answers.py'),
    (0, 3, 'grey', 'Advantages', 'every reward against its group;', 'equal groups can be left out',
     'selfplay/groups.py'),
    (0, 4, 'grey', 'Packed micro-batches', 'rows in one fixed shape, and the', 'weight of every token',
     'selfplay/update.py · learner/batch.py'),
    (1, 4, 'blue', 'Gradient', 'of Σ weight · loss of the token,', 'summed over micro-batches',
     'learner/learner.py · learner/loss.py'),
    (1, 3, 'blue', 'Optimiser', 'AdamW, once per minibatch;', 'an EMA teacher, once per step',
     'learner/optimizer.py'),
    (1, 2, 'blue', 'New weights', 'in the layout of the sampler,', 'published for the next step',
     'selfplay/engine.py · rollout/weights.py'),
    (1, 1, 'blue', 'Scheduler and slots', 'many rollouts at once: prefill', 'what was read, decode turns',
     'rollout/scheduler.py · …/slots.py'),
    (1, 0, 'orange dashed', 'Tools', 'search (ScaNN or BM25), here or', 'at a server; MCP, …',
     'rollout/tool_workers.py · retrieval/'),
)  # fmt: skip
# What a step does in this order: heading, two lines, the module.
MOMENTS = (
    ('rollouts', 'all episodes,', 'then checks', 'collection.py'),
    ('updates', 'role by role;', 'publication', 'update.py'),
    ('log lines', 'metrics, tasks,', 'trajectories', 'run/hooks.py'),
    ('checkpoint', 'if one is due:', 'whole state', 'run/saver.py'),
    ('next step', 'with the new', 'weights', 'run/loop.py'),
)


def step() -> str:
    """One step of a run as flow of data, and what is written when."""
    drawing = Drawing(
        'One step of a run',
        'Tasks become episodes. Episodes ask the scheduler for rollouts; slots on the device prefill and decode them, '
        'and call tools between turns. Trajectories, tokens with their authors, return to the episodes, get rewards '
        'and become rows in groups. Rewards become advantages, rows are packed into micro-batches, gradients are '
        'summed, the optimiser is applied, and new weights are published to the slots for the next step. The log lines '
        'of a step are written before its checkpoint.',
    )
    width, height, pitch, top = 264, 96, 128, 20
    columns = (16, WIDTH - 16 - width)
    for column, row, colour, heading, *lines, modules in STATIONS:
        x, y = columns[column], top + row * pitch
        drawing.box(x, y, width, height, colour)
        drawing.text(x + 12, y + 25, heading, 'head')
        for number, line in enumerate(lines):
            drawing.text(x + 12, y + 45 + 19 * number, line)
        drawing.text(x + 12, y + 84, modules, 'module')
    # Down the left column, and up the right one to the slots.
    left, right = columns[0] + 132, columns[1] + 132
    for row in range(4):
        end_of_box, start_of_next = top + row * pitch + height, top + (row + 1) * pitch
        drawing.path(f'M{left} {end_of_box + 3}V{start_of_next - 4}')
        if row > 0:
            drawing.path(f'M{right} {start_of_next - 3}V{end_of_box + 4}')
    between = top + height + 21
    drawing.path(f'M{right - 12} {top + pitch - 3}V{top + height + 4}')
    drawing.path(f'M{right + 12} {top + height + 3}V{top + pitch - 4}')
    drawing.text(right - 64, between, 'calls', 'small')
    drawing.text(right + 24, between, 'observations', 'small')
    drawing.text(left + 14, between + pitch, 'rollouts', 'small')
    drawing.text(left + 14, between + 2 * pitch, 'rows', 'small')
    drawing.text(right + 14, between + pitch, 'version v + 1', 'small')
    start, end = columns[0] + width, columns[1]
    asked, answered = top + pitch + 24, top + pitch + 46
    drawing.path(f'M{start + 3} {asked}H{end - 4}')
    drawing.path(f'M{end - 3} {answered}H{start + 4}')
    drawing.text(WIDTH / 2, asked - 9, 'requests', 'small middle')
    for number, line in enumerate(('trajectories:', 'tokens with', 'their authors')):
        drawing.text(WIDTH / 2, answered + 18 + 16 * number, line, 'small middle')
    last = top + 4 * pitch + height / 2
    drawing.path(f'M{start + 3} {last:g}H{end - 4}')
    y = top + 5 * pitch
    drawing.text(
        16,
        y,
        'Grey: work of the host. Blue: of the devices, begun by the host. Dashed: text of others.',
        'small',
    )
    _moments(drawing, y + 44)
    return drawing.svg(y + 210)


def _moments(drawing: Drawing, top: float) -> None:
    """Draws when a step writes what."""
    drawing.path(f'M16 {top - 22:g}H{WIDTH - 16}', has_tip=False)
    drawing.text(16, top + 2, 'The same step in time', 'head')
    width, gap = 114, 19.5
    for number, (heading, *lines, module) in enumerate(MOMENTS):
        x, y = 16 + number * (width + gap), top + 14
        is_on_disk = heading in ('log lines', 'checkpoint')
        drawing.box(x, y, width, 92, 'disk' if is_on_disk else 'grey')
        drawing.text(x + 8, y + 22, heading, 'head')
        for index, line in enumerate(lines):
            drawing.text(x + 8, y + 42 + 17 * index, line, 'small')
        drawing.text(x + 8, y + 82, module, 'module')
        if number:
            drawing.path(f'M{x - gap + 2:g} {y + 46:g}H{x - 3:g}')
    drawing.text(
        16,
        top + 130,
        'On disk the log comes first, so no saved step lacks its lines. A resumed run removes',
    )
    drawing.text(
        16, top + 150, 'the lines of steps after its checkpoint, and runs these steps again.'
    )


# A rollout by turns: author, sentence above the tokens, tokens. The last one is of a sibling.
TURNS = (
    ('prompt', 'Prompt: the question in the words of the role. It is prefilled once for all samples.',
     'Answer by searching . Who leads Fretes ?'),
    ('policy', 'First turn: the closing tag ends it and calls the tool.', '<search> Fretes </search>'),
    ('environment', 'Observation: what the tool returns, written behind the turn.',
     '<information> Fretes : led by Sivas </information>'),
    ('policy', 'Last turn: this tag (or an end token of the model) ends the rollout.',
     '<answer> Sivas </answer>'),
    ('policy', 'A sibling: another sample behind the same prompt.', '<answer> Fretes </answer>'),
)  # fmt: skip
AUTHORS = {'prompt': 'grey', 'policy': 'blue', 'environment': 'orange dashed'}
LEGEND = {
    'prompt': 'prompt, read only: mask 0',
    'policy': 'policy, sampled: mask 1; each token gets the advantage of its rollout',
    'environment': 'environment, read only: mask 0; retrieved text gets exactly zero gradient',
}


def rollout() -> str:
    """A rollout as tokens with their authors, with the mask and a sibling."""
    drawing = Drawing(
        'A rollout is a list of tokens with an author each',
        'A prompt, a turn of the policy that calls a search, the observation of the environment, and a last turn with '
        'the answer. A sibling has the same prompt and another answer. Only tokens that the policy sampled have mask 1 '
        'and teach; prompt and retrieved text have mask 0 and get exactly zero gradient.',
    )
    pitch, top, rail = 92, 30, 26
    for row, (author, sentence, tokens) in enumerate(TURNS):
        is_sibling = row == len(TURNS) - 1
        y = top + row * pitch + 16 * is_sibling
        x = 16.0 if author == 'prompt' else 52.0
        drawing.text(x, y, sentence)
        taught = author == 'policy'
        for token in tokens.split():
            width = 14.5 * LETTER * len(token) + 16
            drawing.box(x, y + 10, width, 30, AUTHORS[author])
            drawing.text(x + width / 2, y + 30, token, 'middle')
            drawing.box(x, y + 45, width, 16, 'taught' if taught else 'grey')
            drawing.text(x + width / 2, y + 57, str(int(taught)), f'mask{int(taught)} middle')
            x += width + 5
        if row in (1, len(TURNS) - 1):
            start = top + 64 if row == 1 else top + pitch + 25
            drawing.path(f'M{rail} {start}V{y + 25}H48')
        if row >= len(TURNS) - 2:
            reward, sign = (0, '< 0') if is_sibling else (1, '> 0')
            drawing.text(x + 12, y + 31, f'reward {reward}, advantage {sign}', 'head')
    bottom = top + len(TURNS) * pitch + 24
    drawing.path(f'M16 {bottom - 22}H{WIDTH - 16}', has_tip=False)
    for row, (author, sentence) in enumerate(LEGEND.items()):
        drawing.box(16, bottom + 26 * row, 26, 18, AUTHORS[author])
        drawing.text(52, bottom + 26 * row + 14, sentence)
    drawing.text(
        16,
        bottom + 94,
        'The numbers below the tokens are the mask. Rewards are compared within the group:',
    )
    drawing.text(
        16, bottom + 114, 'here, the samples of one question. (Tags are drawn as one token each.)'
    )
    return drawing.svg(bottom + 132)


# What the systems do with the settings of configs/*.py; '' where there is nothing. Neighbours that do the same share a
# cell.
ROWS = {
    'begins': 'What a run is given',
    'proposes': 'Who proposes',
    'solves': 'Who solves',
    'judges': 'Who judges',
    'trained': 'What is trained',
    'proposer_reward': 'Reward of the proposer',
    'solver_reward': 'Reward of the solver',
    'proposer_group': 'What a proposal is compared with',
    'solver_group': 'What an answer is compared with',
    'loss': 'Loss',
}
_DRZERO = {
    'begins': 'documents of the corpus, each with a number of hops',
    'proposes': 'proposer: searches on from the document, writes a question and its answer',
    'solves': 'solver: searches, answers',
    'judges': "a rule: exact match with the proposer's answer",
    'trained': 'two policies, in turns',
    'proposer_reward': '½ · format + difficulty: 1 if one of n attempts is right, less if more, 0 if none or all',
    'solver_reward': '1 if right',
    'proposer_group': 'questions with as many hops (HRPO)',
    'solver_group': 'answers to the same question',
    'loss': 'token_pg: a clipped ratio per token',
}
SYSTEMS = {
    'drzero': _DRZERO,
    'piplay': _DRZERO
    | {
        'trained': 'two policies, in turns; teacher: moving average of the solver',
        'loss': 'token_pg; solver: + distance from the teacher',
    },
    'ssp': {
        'begins': 'answers',
        'proposes': 'the policy: searches, hides the answer in a question',
        'solves': 'the policy: searches, answers',
        'judges': 'rules; the policy from what was read; a judge model',
        'trained': 'one policy, both roles in every step',
        'proposer_reward': 'share of attempts that fail; 0 if rejected',
        'solver_reward': '1 if right and well formed',
        'proposer_group': 'nothing: the reward counts',
        'solver_group': 'answers to the same question (mean only)',
        'loss': 'proposer: reinforce; solver: token_pg + KL',
    },
    'dspo': {
        'begins': 'questions and answers',
        'proposes': '',
        'solves': 'solver: searches, answers',
        'judges': 'a rule: is the answer contained?',
        'trained': 'the solver',
        'proposer_reward': '',
        'solver_reward': '1 if right',
        'proposer_group': '',
        'solver_group': 'answers to the same question, where some differ',
        'loss': 'sequence_pg: a clipped ratio per rollout; + KL',
    },
    'scope': {
        'begins': 'documents, each with a number of searches',
        'proposes': 'proposer: searches, sets an open task',
        'solves': 'solver: searches, writes',
        'judges': 'the initial policy: gates, rubrics, grades',
        'trained': 'two policies, in turns',
        'proposer_reward': '½ · format + nearness of the mean grade to ½',
        'solver_reward': 'grade, less if long, + ½ · format + 0.1 · searching',
        'proposer_group': 'tasks from the same document',
        'solver_group': 'answers to the same task',
        'loss': 'token_pg + KL',
    },
}
HEADINGS = ('Dr. Zero', 'π-Play', 'SSP', 'DSPO', 'SCOPE')
# Who plays: (system, row) → colour of the weights.
PLAYERS = {
    ('drzero', 'proposes'): 'orange',
    ('drzero', 'solves'): 'blue',
    ('ssp', 'proposes'): 'blue',
    ('ssp', 'solves'): 'blue',
    ('dspo', 'solves'): 'blue',
    ('scope', 'proposes'): 'orange',
    ('scope', 'solves'): 'blue',
    ('scope', 'judges'): 'grey dashed',
}
WEIGHTS = {
    'blue': 'trained: the solver, or one policy in both roles',
    'orange': 'trained: a proposer with weights of its own',
    'grey dashed': 'never trained: the judge; other judges are rules, the policy, or a model at a server',
}


def systems() -> str:
    """The five systems side by side."""
    drawing = Drawing('Five systems side by side', _in_words())
    gap, line_height = 6, 16
    column = (WIDTH - 24 + gap) / len(SYSTEMS)
    for number, heading in enumerate(HEADINGS):
        drawing.text(12 + number * column + (column - gap) / 2, 28, heading, 'head middle')
    y = 36
    for row, question in ROWS.items():
        drawing.text(12, y + 16, question, 'row')
        y += 22
        cells = _cells(row, column, gap)
        height = line_height * max(len(lines) for _, _, lines in cells) + 10
        for number, width, lines in cells:
            system, x = list(SYSTEMS)[number], 12 + number * column
            if lines:
                drawing.box(x, y, width, height, PLAYERS.get((system, row), 'grey'))
            lines = lines or ['–']
            baseline = y + (height - line_height * len(lines)) / 2 + 12
            for index, line in enumerate(lines):
                drawing.text(x + 7, baseline + line_height * index, line, 'cell')
        y += height + 6
    drawing.path(f'M12 {y + 6}H{WIDTH - 12}', has_tip=False)
    for number, (colour, meaning) in enumerate(WEIGHTS.items()):
        drawing.box(12, y + 20 + 25 * number, 26, 17, colour)
        drawing.text(48, y + 33 + 25 * number, meaning, 'small')
    notes = (
        'KL: distance from the initial policy. Attempts: rollouts of the solver on the question.',
        'Teacher: it reads how the question was made, too, and predicts each token of the solver.',
        'Compared: minus the mean of the group, divided by its deviation (mean only: undivided).',
    )
    for number, note in enumerate(notes):
        drawing.text(12, y + 108 + 18 * number, note, 'small')
    return drawing.svg(y + 158)


def _cells(row: str, column: float, gap: float) -> list[tuple[int, float, list[str]]]:
    """Returns the cells of a row: number of the first system, width, lines of text."""
    cells = []
    number = 0
    for text, same in itertools.groupby(facts[row] for facts in SYSTEMS.values()):
        count = len(list(same))
        width = count * column - gap
        letters = int((width - 14) / 6.8)
        cells.append((number, width, textwrap.wrap(text, letters, break_on_hyphens=False)))
        number += count
    return cells


def _in_words() -> str:
    """Returns the cells as sentences, for screen readers."""
    sentences: list[str] = []
    for heading, facts in zip(HEADINGS, SYSTEMS.values(), strict=True):
        told = [f'{question}: {facts[row] or "none"}' for row, question in ROWS.items()]
        sentences.append(f'{heading}. {". ".join(told)}.')
    return ' '.join(sentences)


def figures() -> dict[str, str]:
    """Returns the figures by the names of their files."""
    return {'step.svg': step(), 'rollout.svg': rollout(), 'systems.svg': systems()}


if __name__ == '__main__':
    FOLDER.mkdir(exist_ok=True)
    for name, text in figures().items():
        (FOLDER / name).write_text(text, encoding='utf-8')
