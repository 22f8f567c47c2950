import pytest

from zeroplay_jax.selfplay.judge import grade, rubrics, verdict, yes_no


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
        ('INCORRECT!', False),
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
        ('Verdict: Incorrect \u274c', False),
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


WANTED = [
    {'text': 'Names the city.', 'priority': 'critical'},
    {'text': 'Gives the year.', 'priority': 'important'},
    {'text': 'Compares both sides.', 'priority': 'bonus'},
]


@pytest.mark.parametrize(
    'text',
    [
        listed(*GOOD),
        f'<think>{listed(item())}</think>Here:\n{listed(*GOOD)}\nDone.',
        listed(item()) + listed(*GOOD),
        listed(*GOOD).replace('<rubric ', '<rubric\n\t').replace('=', ' = '),
        listed(item(priority='"Critical"'), *GOOD[1:]),
        listed(item(priority='"critical" weight="9"'), *GOOD[1:]),
    ],
)
def test_rubrics_are_read(text):
    assert rubrics(text) == (WANTED, {})


@pytest.mark.parametrize(
    ('text', 'repairs'),
    [
        (listed(*GOOD, 'and that is all'), {'stray': 1}),
        (listed('First:', *GOOD), {'stray': 1}),
        (listed(*GOOD, '<!-- note -->', '&lol;'), {'stray': 1}),
        (listed(*GOOD, item('')), {'malformed': 1}),
        (listed(*GOOD, item(' \n ')), {'malformed': 1}),
        (listed(*GOOD, '<rubric/>'), {'malformed': 1}),
        (listed(*GOOD, '<rubric priority="bonus">open'), {'malformed': 1}),
        (listed('<rubric priority="bonus">open', *GOOD), {'malformed': 1}),
        (listed(*GOOD, '</rubric>'), {'malformed': 1}),
        (listed(*GOOD, item()), {'repeated': 1}),
        (listed(*GOOD, item('Names  the\ncity.')), {'repeated': 1}),
    ],
)
def test_what_is_not_well_formed_is_left_out_and_counted(text, repairs):
    assert rubrics(text) == (WANTED, repairs)


@pytest.mark.parametrize(
    ('written', 'taken', 'repairs'),
    [
        (item('w ' * 26), {'text': 'w ' * 25 + 'w', 'priority': 'critical'}, {'long': 1}),
        (item('a', '"vital"'), {'text': 'a', 'priority': 'important'}, {'priority': 1}),
        (item('a', '"critical'), {'text': 'a', 'priority': 'important'}, {'priority': 1}),
        (item('a', '"bonus" x'), {'text': 'a', 'priority': 'bonus'}, {}),
        ('<rubric>a</rubric>', {'text': 'a', 'priority': 'important'}, {'priority': 1}),
        ('<rubric id="1" priority=bonus>a</rubric>', {'text': 'a', 'priority': 'bonus'}, {}),
        (item('at < 5 <b>m</b>'), {'text': 'at < 5 <b>m</b>', 'priority': 'critical'}, {}),
    ],
)
def test_items_of_another_form_are_taken_and_counted(written, taken, repairs):
    assert rubrics(listed(*GOOD, written)) == ([*WANTED, taken], repairs)


@pytest.mark.parametrize(
    'text',
    [
        '',
        '<rubrics>',
        listed(),
        ''.join(GOOD),
        listed(*GOOD[:2]),
        listed(*GOOD[:2], GOOD[0], item('')),
        listed(*GOOD)[: -len('</rubrics>')],
        '<think>' + listed(*GOOD),
        listed(*GOOD) + '</think>',
    ],
)
def test_too_few_rubrics_are_none(text):
    assert rubrics(text) is None


def test_limits_of_rubrics_are_arguments():
    assert rubrics(listed(*GOOD[:1]), minimum=1) == (WANTED[:1], {})
    assert rubrics(listed(*GOOD), minimum=2, maximum=2) == (WANTED[:2], {'surplus': 1})
    assert rubrics(listed(*GOOD), words=2) == (WANTED, {'long': 3})


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
