"""benchmarks.true_shapes: what its policy writes, and where its seconds and bytes are counted. No run of its size."""

import json
import types

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from benchmarks import scripted_policy, true_shapes
from benchmarks.scripted_policy import SCRIPT
from zeroplay_jax.objectives.rewards import extract_last
from zeroplay_jax.policy import hf, transformer
from zeroplay_jax.rollout.call_syntax import QwenSyntax
from zeroplay_jax.tools.search import SearchTool

SMALL = dict(vocab_size=96, hidden_size=256, intermediate_size=64, num_hidden_layers=2)
SMALL |= dict(num_attention_heads=4, num_key_value_heads=2)
PIECES = list(dict.fromkeys((*SCRIPT, *sum(SCRIPT.values(), ()))))


def written(first):
    text = ''
    while first != '<|im_end|>':
        text += first
        first = SCRIPT[first][-1]
    return text


def test_the_script_has_a_search_and_a_question_with_its_answer():
    call, end = map(written, SCRIPT['\n'])
    tools = {'search': SearchTool(lambda queries: [])}
    parsed = QwenSyntax().parse(call, tools)
    assert parsed.is_valid and parsed.arguments == {'query_list': ['French album']}
    assert extract_last(end, 'question').strip() == 'Which band?'
    assert extract_last(end, 'answer').strip() == 'London'


def test_the_policy_writes_the_script(tmp_path, monkeypatch):
    architecture = scripted_policy.ARCHITECTURE | SMALL
    monkeypatch.setattr(scripted_policy, 'ARCHITECTURE', architecture)
    tensors = scripted_policy._random_tensors(np.random.default_rng(0))
    tokenizer = types.SimpleNamespace(
        encode=lambda piece, add_special_tokens: types.SimpleNamespace(ids=[PIECES.index(piece)])
    )
    scripted_policy._write_script(tensors, tokenizer)
    (tmp_path / 'config.json').write_text(json.dumps(architecture))
    save_file(tensors, tmp_path / 'model.safetensors')
    model = hf.read_config(tmp_path)
    params = hf.load(tmp_path, model, progress=False)
    # Each piece in a context of its own.
    tokens = jnp.asarray([[90, 91, PIECES.index(piece)] for piece in SCRIPT])
    positions = jnp.broadcast_to(jnp.arange(3), tokens.shape)
    hidden = transformer.hidden(model, params, tokens, positions, jnp.ones_like(tokens))
    logits = np.asarray(transformer.logits(model, params, hidden[:, -1]))
    for row, following in zip(logits, SCRIPT.values(), strict=True):
        best = [PIECES[token] for token in np.argsort(-row)[: len(following)]]
        assert set(best) == set(following)


def test_stages_are_cut_by_the_log_and_memory_counts_from_the_weights_on():
    steps = [(0, 1, 0, False, -1), (1, 2, 1, True, -1), (2, 4, 3, True, -1), (3, 5, 5, False, 0)]
    steps += [(5, 8, 6, False, 1), (9, 20, 9, False, 1), (10, 22, 6, False, 2)]
    steps += [(11, 23, 6, False, 2)]
    gib = true_shapes.GIB
    samples = [true_shapes.Sample(*step[:2], step[2] * gib, *step[3:]) for step in steps]
    records = [
        {'phase': 'evaluation', 'seconds/save': 0.0},
        {'phase': 'solver', 'seconds/save': 1.0, 'seconds/update': 2.0},
    ]
    stages = true_shapes.stages_of_run(samples, records)
    assert [stage.name for stage in stages] == [
        'load',
        'step 0, evaluation: rollouts',
        'save after step 0',
        'step 1, solver: rollouts',
        'step 1, solver: update',
        'last save, export, report',
    ]
    update = stages[4]
    assert (update.wall, update.cpu, update.resident) == (1, 2, 9 * gib)
    assert true_shapes.before_weights(samples) == 0
    rows = true_shapes.table(stages, {'rollouts': 6.0, 'update': 8.0}, gib)
    assert rows[4] == ['step 1, solver: update', '1', '2', '9.00', '8.00', '8.00', '+0%']
    assert rows[0][4:] == ['', '', '']
