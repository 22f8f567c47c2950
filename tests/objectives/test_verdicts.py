import subprocess
import sys

import pytest

from zeroplay_jax.objectives.verdicts import grade, rubrics, verdict, yes_no


@pytest.mark.parametrize(
    'text, wanted',
    [
        ('Correct', True),
        (' correct.\n', True),
        ('**Correct**', True),
        ('_CORRECT_', True),
        ('Verdict: Correct', True),
        ("The model's answer is correct.", True),
        ('Correct. The dates match.', True),
        ('<think>At first it looks wrong.</think>\nCorrect', True),
        ('Incorrect', False),
        ('INCORRECT!', False),
        ('Wrong', False),
        ('It is wrong.', False),
        ('Thus, the final answer is incorrect.', False),
        ('## Verdict\n**Wrong**', False),
        ('- Correct', True),
        ('This is the correct answer.', True),
        ('Wrong. The model did not say when.', False),
        ('Incorrect\nincorrect', False),
        ('"Correct"', True),
        ('`Correct`', True),
        ('(Correct)', True),
        ('> Correct', True),
        ('\u2705 Correct', True),
        ('The answer is therefore correct.', True),
        ('\u274c Wrong', False),
        ('Verdict: Incorrect \u274c', False),
        ('The result is therefore wrong', False),
    ],
)
def test_a_plain_verdict_is_read(text, wanted):
    assert verdict(text) is wanted


@pytest.mark.parametrize(
    'text',
    [
        '',
        ' \n',
        '\u274c Correct',
        'Correct \u2717',
        'Correct.\n\u2717',
        '\u00accorrect',
        '\u2260 correct',
        '~correct',
        'Is this correct',
        'So is the answer correct.',
        'Is it correct. Hard to say.',
        'The model wrote:\n"Correct"\nHard to say.',
        'The model wrote:\n> Correct',
        'Correct / incorrect',
        'Correct \u2026',
        'Correct or wrong?',
        'Correct Incorrect',
        'Correct.\nIncorrect.',
        'partially correct',
        'Correct, but vague',
        'Correct (in part)',
        'Correct: no',
        'not correct',
        'not wrong',
        "The answer isn't correct.",
        'Correct. No, it differs.',
        "Correct. Actually it isn't.",
        'Correct. Actually it isn\u2019t.',
        'Is the answer correct?',
        'Correct?',
        'Correctness is high',
        'half-correct',
        'in correct',
        'in\u200bcorrect',
        'in\u00adcorrect',
        'incorrectly',
        'Yes',
        '1',
        '<think>Correct',
        '<think>Correct</think>',
        '<think>a</think>Correct<think>',
        'The question says "Correct" is what a judge must answer.',
    ],
)
def test_anything_else_is_no_verdict(text):
    assert verdict(text) is None


@pytest.mark.parametrize(
    'text, wanted',
    [
        ('Yes', True),
        ('yes.', True),
        ('**YES**', True),
        ('Answer: yes', True),
        ('No', False),
        ('no!', False),
        ('<think>no</think> Yes', True),
        ('Yes. Its entities are named, not described.', True),
        ('Verdict: "Yes"', True),
        ('Yes \u274c', None),
        ('No \u2705', None),
        ('Is it yes', None),
        ('Yes and no', None),
        ('Yes. No.', None),
        ('Yes, mostly', None),
        ('There is no doubt: yes', None),
        ('Yes?', None),
        ('yesterday', None),
        ('noteworthy', None),
        ('', None),
    ],
)
def test_yes_and_no(text, wanted):
    assert yes_no(text) is wanted


@pytest.mark.parametrize(
    'text, wanted',
    [
        ('<score>1</score>', True),
        ('<score> 0\n</score>', False),
        ('<think>It has 1 of 3: <score>1</score></think><score>0</score>', False),
        ('It has all three.\n<score>1</score>\n', True),
        ('It names the city. <score>1</score>', True),
        ('Score: <score>0</score>', False),
        ('**<score>1</score>**', True),
        ('<score>1</score> no: <score>0</score>', None),
        ('<score>0</score> (it tried <score>1</score>)', None),
        ('The answer says <score>1</score>', None),
        ('<score>1</score> is what it says', None),
        ('<score>0</score><score>1', None),
        ('<score>0.5</score>', None),
        ('<score>1.0</score>', None),
        ('<score>10</score>', None),
        ('<score>0|1</score>', None),
        ('<score></score>', None),
        ('<score>0<score>1</score>', None),
        ('<scores>1</scores>', None),
        ('<SCORE>1</SCORE>', None),
        ('<think><score>1</score>', None),
        ('<score>1</score></think>', None),
        ('1', None),
        ('', None),
    ],
)
def test_grades(text, wanted):
    assert grade(text) is wanted


def listed(*items):
    return '<rubrics>' + '\n '.join(items) + '</rubrics>'


def item(text='Names the city.', priority='"critical"'):
    return f'<rubric priority={priority}>{text}</rubric>'


GOOD = [item(), item('Gives the year.', "'important'"), item('Compares\n both  sides.', 'bonus')]


def test_rubrics_are_read():
    wanted = [
        {'text': 'Names the city.', 'priority': 'critical'},
        {'text': 'Gives the year.', 'priority': 'important'},
        {'text': 'Compares both sides.', 'priority': 'bonus'},
    ]
    assert rubrics(listed(*GOOD)) == wanted
    assert rubrics(f'<think>{listed(item())}</think>Here:\n{listed(*GOOD)}\nDone.') == wanted
    assert rubrics(listed(item()) + listed(*GOOD)) == wanted
    assert rubrics(listed(*GOOD).replace('<rubric ', '<rubric\n\t').replace('=', ' = ')) == wanted


@pytest.mark.parametrize(
    'text',
    [
        '',
        '<rubrics>',
        listed(),
        ''.join(GOOD),
        listed(*GOOD[:2]),
        listed(*GOOD, item('a'), item('b'), item('c')),
        listed(*GOOD)[: -len('</rubrics>')],
        listed(*GOOD).removesuffix('</rubric></rubrics>') + '</rubrics>',
        listed(*GOOD, 'and that is all'),
        listed('First:', *GOOD),
        listed(*GOOD, item('')),
        listed(*GOOD, item(' \n ')),
        listed(*GOOD, item()),
        listed(*GOOD, item('w ' * 26)),
        listed(*GOOD, item('a', '"vital"')),
        listed(*GOOD, item('a', '"Critical"')),
        listed(*GOOD, item('a', '"critical')),
        listed(*GOOD, item('a', '"critical\'')),
        listed(*GOOD, item('a', '"critical" weight="9"')),
        listed(*GOOD, '<rubric>a</rubric>'),
        listed(*GOOD, '<rubricpriority="bonus">a</rubric>'),
        listed(*GOOD, '<rubric/>'),
        listed(*GOOD, item('a <score>1</score>')),
        listed(*GOOD, item(item('inner'))),
        listed(*GOOD, '<!-- <rubric priority="bonus">a</rubric> -->'),
        listed(*GOOD, '<![CDATA[x]]>'),
        listed(*GOOD, '&lol;'),
        '<think>' + listed(*GOOD),
        listed(*GOOD) + '</think>',
    ],
)
def test_one_fault_rejects_the_whole_list(text):
    assert rubrics(text) is None


def test_limits_of_rubrics_are_arguments():
    assert len(rubrics(listed(*GOOD[:1]), minimum=1)) == 1
    assert rubrics(listed(*GOOD), maximum=2) is None
    assert rubrics(listed(*GOOD), words=2) is None
    assert len(rubrics(listed(*GOOD, item('w ' * 25)))) == 4


HOSTILE = [
    '<rubric priority=' * 20_000,
    '<rubrics>' + '<rubric priority="critical">' * 20_000 + '</rubrics>',
    '<rubrics><rubric' + ' ' * 200_000 + '</rubrics>',
    '<score>' * 50_000 + '</score>' * 50_000,
    'answer' * 50_000 + ':',
    'answer ' + ' ' * 200_000,
    'correct ' * 50_000 + 'x',
    '-'.join(['a'] * 100_000),
    '\x00\ud800\u202e</think>' * 1000,
]


@pytest.mark.parametrize('text', HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_nothing_to_any_reader(text):
    """Long and crooked replies come back at once and say nothing."""
    assert [reader(text) for reader in (verdict, yes_no, grade, rubrics)] == [None] * 4


def test_verdicts_need_no_jax():
    code = 'import sys; import zeroplay_jax.objectives.verdicts; sys.exit("jax" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0
