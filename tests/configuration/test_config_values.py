"""Every mistake in a value of a config is one line that names it."""

import json
import pathlib
import typing

import config_checks
import pytest
from config_checks import FILES, ROOT
from refused_calls import check_table

from zeroplay_jax.configs import ablations
from zeroplay_jax.configuration import command_line, fields, rules
from zeroplay_jax.policy.adapter_config import CONFIG_FILE, AdapterConfig
from zeroplay_jax.selfplay import recipe as recipes
from zeroplay_jax.selfplay.library import NoDocuments
from zeroplay_jax.settings import schema
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT, ConfigError, Section

# Their small runs: test_small_starts.py.
PAGES = [(name, '') for name in ('cross', *recipes.BUILT_IN)]
PAGES += [(name, 'small') for name in recipes.BUILT_IN]
PAGES += [('ablations', row) for row in ablations.ROWS]


@pytest.mark.parametrize('page,variant', PAGES)
def test_the_pages_that_come_with_the_project_are_sound(page, variant, checkpoint):
    config = fields.config(page, variant)
    for name in {'answers', 'questions', 'documents', 'tasks'} & set(config.inputs):
        config.inputs[name] = ''  # files of the user's
    config.retrieval.kind, config.eval.file = 'world', ''
    config.policy.path = str(checkpoint)
    rules.check(config)


def leaf_fields(section=schema.Run, prefix=''):
    """(dotted name, pydantic's field) of a section and those inside it."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from leaf_fields(field.annotation, f'{prefix}{name}.')
        else:
            yield prefix + name, field


def all_leaf_fields():
    yield from leaf_fields()
    yield from leaf_fields(schema.TrainedRole, 'solver.')
    for name in recipes.BUILT_IN:
        for section_name, section in recipes.recipe_class(name).settings.items():
            yield from leaf_fields(section, f'{section_name}.')


CHECKED_ELSEWHERE = """
    recipe policy.path solver.adapter inputs.answers inputs.questions inputs.documents inputs.tasks ssp.invalid_reward
    judge.url judge.model judge.rubric_model judge.grade_model
    distributed.coordinator eval.file eval.tasks log.writers retrieval.path retrieval.encoder retrieval.held_out
    retrieval.url tools.names tools.mcp_servers prompts
"""


def test_every_field_is_documented_and_has_bounds_or_a_check_elsewhere():
    unbounded = set()
    for name, field in all_leaf_fields():
        assert field.description, name
        is_closed = typing.get_origin(field.annotation) is typing.Literal
        if not (field.metadata or is_closed or field.annotation is bool):
            unbounded.add(name)
    assert unbounded == set(CHECKED_ELSEWHERE.split())


LINEARS = ('down', 'gate', 'k', 'o', 'q', 'up', 'v')


@pytest.mark.parametrize(
    ('number', 'reason'),
    [*((float(text), '.*(finite|valid)') for text in ('inf', '-inf', 'nan')), (10**30, '')],
)
def test_numbers_that_nothing_holds_are_refused_in_every_field(sound, number, reason):
    """Alone, or in the last place of a list."""
    for name, value in fields.leaves(sound).items():
        is_list = isinstance(value, tuple)
        if type(number) in map(type, value if is_list else (value,)):
            config = sound.copy_and_resolve_references().unlock()
            changed = (*value[:-1], number) if is_list else number
            config.update_from_flattened_dict({name: changed})
            with pytest.raises(ConfigError, match=f'config.{name}={reason}'):
                fields.check_values(config)


def write_files(folder):
    """Files that calls of the table name: checkpoints that lack a file each, an index, questions, adapters."""
    for missing in FILES:
        (folder / f'no_{missing}').mkdir()
        for name in set(FILES) - {missing}:
            (folder / f'no_{missing}' / name).touch()
    (folder / 'index').mkdir()
    (folder / 'index' / 'manifest.json').write_text('{}')
    (folder / 'questions.jsonl').write_text('{"question": "who?", "answers": ["one"]}\n')
    (folder / 'held_out.jsonl').write_text('{"document_id": "7", "title": "Lomi"}\n')
    stored = AdapterConfig(rank=4, alpha=32.0, linears=LINEARS, base=BUILT_IN_CHECKPOINT).fields()
    adapters = {
        'adapter': {},
        'of_embedding': {'target_modules': ['q_proj', 'embed_tokens']},
        'of_nothing': {'base_model_name_or_path': '/nowhere'},
    }
    for name, changes in adapters.items():
        (folder / name).mkdir()
        (folder / name / CONFIG_FILE).write_text(json.dumps(stored | changes))


def test_a_config_is_sound_or_one_line_says_what_is_wrong(tmp_path, monkeypatch):
    write_files(tmp_path)
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT / 'tests' / 'objectives')
    names = globals() | vars(config_checks) | {'folder': tmp_path}
    names |= {'command_line': command_line, 'NoDocuments': NoDocuments}
    check_table(pathlib.Path(__file__).parent / 'rules.txt', names, tmp_path)
