"""Every mistake in a value of a config is one line that names it."""

import pathlib

import config_checks
import pytest
from config_checks import FILES, ROOT, write_adapter
from refused_calls import check_table

from zeroplay_jax.configs import ablations
from zeroplay_jax.configuration import command_line, fields, rules
from zeroplay_jax.selfplay import recipe as recipes
from zeroplay_jax.selfplay.library import NoDocuments
from zeroplay_jax.settings.kinds import ConfigError

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
    write_adapter(folder / 'adapter')
    write_adapter(folder / 'of_embedding', target_modules=['q_proj', 'embed_tokens'])
    write_adapter(folder / 'of_nothing', base_model_name_or_path='/nowhere')


def test_a_config_is_sound_or_one_line_says_what_is_wrong(tmp_path, monkeypatch):
    write_files(tmp_path)
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT / 'tests' / 'objectives')
    names = globals() | vars(config_checks) | {'folder': tmp_path}
    names |= {'command_line': command_line, 'NoDocuments': NoDocuments}
    check_table(pathlib.Path(__file__).parent / 'rules.txt', names, tmp_path)
