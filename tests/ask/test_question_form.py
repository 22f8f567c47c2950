"""The packaged policies read questions of one form, whichever folder has their tokenizer."""

import json

import pytest

from zeroplay_jax.mini.question_form import form_of
from zeroplay_jax.settings.kinds import (
    BUILT_IN_CHECKPOINT,
    ENGLISH_CHECKPOINT,
    OPEN_CHECKPOINT,
    PARTS_CHECKPOINT,
)

CLOZE = 'The village was founded by monks in ____.'
WORLD = 'What is the job of the mayor of Fretes?'


@pytest.mark.parametrize(
    ('folder', 'question'),
    [
        (ENGLISH_CHECKPOINT, CLOZE),
        (BUILT_IN_CHECKPOINT, WORLD),
        (PARTS_CHECKPOINT, WORLD),
        (OPEN_CHECKPOINT, 'Describe the mayor of Fretes.'),
    ],
)
def test_a_policy_reads_questions_of_its_form(folder, question):
    pattern = form_of(folder).pattern
    assert pattern.search(question) and not pattern.search('Who was Ada Lovelace?')


@pytest.mark.parametrize('base', [ENGLISH_CHECKPOINT, BUILT_IN_CHECKPOINT])
def test_an_adapter_has_the_form_of_its_base(tmp_path, base):
    fields = {
        'peft_type': 'LORA',
        'r': 4,
        'lora_alpha': 4,
        'target_modules': ['q_proj'],
        'base_model_name_or_path': str(base),
    }
    (tmp_path / 'adapter_config.json').write_text(json.dumps(fields))
    assert form_of(tmp_path) is form_of(base)
