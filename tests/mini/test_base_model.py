import dataclasses
import json
import zlib

import jax
import numpy as np
import pytest
from committed_folders import check_hashes

from tools.checkpoints import (
    base_answers,
    base_hops,
    base_model,
    base_open,
    batches,
    demo,
    demos,
    library,
    open_demos,
    supervised,
)
from tools.checkpoints.stages import STAGES, Stage
from zeroplay_jax.policy import hf, transformer
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.types import POLICY

FOLDERS = ('base', 'clean')
ALL_FOLDERS = (*FOLDERS, 'open/base', 'open/clean', 'answers/base', 'hops/base')
TINY = Stage('tiny', steps=12, rows=4, tokens=128, shares={'passage': 1.0})


def log_of(name):
    lines = (base_model.MINI / name / 'training.jsonl').read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope='module')
def blank(tmp_path_factory):
    folder = tmp_path_factory.mktemp('blank')
    base_model.write_config_and_tokenizer(folder)
    return folder


@pytest.fixture(scope='module')
def stock():
    return list(batches.libraries(0, 'train', count=2, worlds=2))


def first_batch(stage, stock, codec, step=0):
    return batches.pack(stage, batches.episodes(stage, demos.ROLES, stock, codec, 0, step))


def test_packing_keeps_episodes_whole(blank, stock):
    codec = Codec(blank)
    stage = dataclasses.replace(TINY, tokens=512, shares={})
    batch = first_batch(stage, stock, codec)
    stream = batches.episodes(stage, demos.ROLES, stock, codec, 0, 0)
    wanted = {tokens.tobytes(): source for tokens, source in (next(stream) for _ in range(200))}
    found = 0
    for row in range(stage.rows):
        for segment in range(1, batch['segment'][row].max() + 1):
            at = batch['segment'][row] == segment
            source = wanted[batch['tokens'][row][at].tobytes()]
            assert (batch['positions'][row][at] == np.arange(at.sum())).all()
            assert (batch['policy'][row][at] == (source == POLICY)).all()
            found += 1
    assert found >= stage.rows
    assert not batch['tokens'][batch['segment'] == 0].any()


def test_batches_are_a_function_of_seed_stage_and_step(blank, stock):
    codec = Codec(blank)
    same = first_batch(TINY, stock, codec), first_batch(TINY, stock, codec)
    assert all((same[0][k] == same[1][k]).all() for k in same[0])
    assert (first_batch(TINY, stock, codec, step=1)['tokens'] != same[0]['tokens']).any()


def test_loss_counts_each_kind_of_token_once(blank, stock):
    codec = Codec(blank)
    config = hf.read_config(blank)
    params = transformer.init(config, jax.random.key(0))
    batch = first_batch(TINY, stock, codec)
    value, info = supervised.loss(config, TINY.context_weight, params, batch)
    logp, _ = transformer.score(
        config, params, batch['tokens'], batch['positions'], batch['segment']
    )
    nll = -np.asarray(logp)
    inside = (batch['segment'] > 0) & (batch['positions'] > 0)
    own = inside & (batch['policy'] > 0)
    np.testing.assert_allclose(info['loss'], nll[own].mean(), rtol=1e-5)
    expected = nll[own].mean() + TINY.context_weight * nll[inside & ~own].mean()
    np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.long
def test_training_learns_and_is_reproducible(blank, stock):
    codec, config = Codec(blank), hf.read_config(blank)
    batch = first_batch(TINY, stock, codec, step=99)
    runs = []
    for _ in range(2):
        params, log = transformer.init(config, jax.random.key(0)), []
        before = float(supervised.loss(config, TINY.context_weight, params, batch)[0])
        params = supervised.train(TINY, config, params, codec, demos.ROLES, stock, 0, log)
        runs.append((params, log))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), runs[0][0], runs[1][0]))
    assert runs[0][1] == runs[1][1] and runs[0][1][-1]['step'] == TINY.steps
    assert float(supervised.loss(config, TINY.context_weight, runs[0][0], batch)[0]) < before - 0.1


@pytest.mark.long
def test_build_writes_folders_with_log_and_hashes(tmp_path, monkeypatch):
    monkeypatch.setattr(base_model, 'DIAGNOSED_EPISODES', 4)
    monkeypatch.setattr(base_model, 'LIBRARY_COUNT', 1)
    monkeypatch.setattr(base_model, 'WORLDS_PER_LIBRARY', 2)
    stages = (
        dataclasses.replace(TINY, name='warm'),
        dataclasses.replace(TINY, name='clean', saved=True),
    )
    base_model.build(tmp_path, 0, stages)
    assert [p.name for p in tmp_path.iterdir()] == ['clean']
    check_hashes(tmp_path / 'clean')
    log = [
        json.loads(line)
        for line in (tmp_path / 'clean' / 'training.jsonl').read_text().splitlines()
    ]
    assert [entry['stage'] for entry in log[1:]] == ['warm', 'clean', 'clean']
    assert set(demos.ROLES) <= set(log[-1]['teacher_forced'])


@pytest.mark.parametrize('name', ALL_FOLDERS)
def test_committed_folder_is_whole_and_small(name, blank):
    folder = base_model.MINI / name
    check_hashes(folder)
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 4_000_000
    for file in ('tokenizer.json', 'config.json', 'chat_template.jinja'):
        assert (folder / file).read_text() == (blank / file).read_text()


@pytest.mark.parametrize('name', ALL_FOLDERS)
def test_committed_folder_has_the_same_logits_in_transformers(name):
    torch = pytest.importorskip('torch')
    from transformers import AutoModelForCausalLM

    folder = base_model.MINI / name
    config, params, codec = hf.read_config(folder), hf.load(folder), Codec(folder)
    passages = library.Library(range(2), 'evaluation', deal=0)
    tokens, _ = demo.render(
        codec, demos.solver(passages, np.random.default_rng(0), demos.ErrorRates())
    )
    tokens = tokens[None]
    positions, segment = np.arange(tokens.shape[1])[None], np.ones_like(tokens)
    x = transformer.hidden(config, params, tokens, positions, segment)
    ours = np.asarray(transformer.logits(config, params, x[0]))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens.astype(np.int64))).logits[0].numpy()
    assert ours.std() > 1
    np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_clean_reads_and_base_is_uneven():
    """The clean checkpoint solves teacher-forced episodes of unseen names; the base one does not yet."""
    share = {}
    for name in FOLDERS:
        share[name] = log_of(name)[-1]['teacher_forced']['solver']['episodes']
    assert share['clean'] > 0.85
    assert share['base'] < 0.5


def trained_steps(name):
    return {entry['stage']: entry['step'] for entry in log_of(name) if 'step' in entry}


@pytest.mark.parametrize('name', FOLDERS)
def test_committed_folder_was_trained_by_these_stages(name):
    names = [stage.name for stage in STAGES]
    stages = STAGES[: names.index(name) + 1]
    assert trained_steps(name) == {stage.name: stage.steps for stage in stages}


def test_ssps_checkpoint_proposes_and_checks_better_than_base_and_still_answers_badly():
    stages = {stage.name: stage.steps for stage in base_answers.STAGES}
    assert trained_steps('answers/base') == stages
    share = {name: log_of(name)[-1]['teacher_forced'] for name in ('base', 'answers/base')}
    proposals = {name: roles['proposer_from_answer']['tokens'] for name, roles in share.items()}
    # Whole episodes are not the measure: any of several facts may be asked for.
    assert proposals['answers/base'] > proposals['base'] + 0.005
    checks = {name: roles['answer_from_documents']['episodes'] for name, roles in share.items()}
    assert checks['answers/base'] > checks['base'] + 0.05
    assert share['answers/base']['solver']['episodes'] < 0.4


def test_the_checkpoint_for_the_format_reward_solves_more_than_base_and_proposes_like_it():
    assert trained_steps('hops/base') == {stage.name: stage.steps for stage in base_hops.STAGES}
    share = {name: log_of(name)[-1]['teacher_forced'] for name in ('base', 'hops/base')}
    episodes = {name: roles['solver']['episodes'] for name, roles in share.items()}
    assert episodes['base'] < episodes['hops/base'] < 0.7
    proposals = {name: roles['proposer']['tokens'] for name, roles in share.items()}
    assert abs(proposals['hops/base'] - proposals['base']) < 0.03


@pytest.mark.parametrize(
    ('module', 'folder', 'roles', 'errors'),
    [
        (base_open, 'open', open_demos.ROLES, open_demos.OpenErrors()),
        (base_answers, 'answers', demos.ROLES, demos.ErrorRates()),
        (base_hops, 'hops', demos.ROLES, demos.ErrorRates()),
    ],
)
def test_commands_train_their_own_stages_and_roles(module, folder, roles, errors, monkeypatch):
    calls = []
    monkeypatch.setattr(base_model, 'build_from_clean', lambda *args: calls.append(args))
    monkeypatch.setattr('sys.argv', [module.__name__, '--seed', '3'])
    module.main()
    assert calls == [(base_model.MINI / folder, 3, module.STAGES, roles, errors)]
    stages = module.STAGES
    # Every role that a stage draws is one that the command can write.
    assert all(set(stage.shares) <= set(roles) for stage in stages)


def test_stage_names_give_different_streams():
    stages = (*STAGES, *base_open.STAGES, *base_answers.STAGES, *base_hops.STAGES)
    keys = [zlib.crc32(stage.name.encode()) for stage in stages]
    assert len(set(keys)) == len(keys)
