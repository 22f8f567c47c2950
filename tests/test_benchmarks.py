"""The benchmarks run: small sizes here, because a benchmark that broke is found when it is needed."""

import dataclasses
import functools
import json
import os
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packaging.requirements import Requirement
from python_process import run_python

from benchmarks import fresh, gpu, hops
from benchmarks import pins as small_runs
from benchmarks import rollout as bench
from benchmarks.command import RESULTS, read_lines
from benchmarks.peers import workload
from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.evaluation.statistics import difference, interval_text
from zeroplay_jax.mini.world import World
from zeroplay_jax.policy import transformer
from zeroplay_jax.types import UserError

pytestmark = pytest.mark.results

ROOT = pathlib.Path(__file__).parent.parent
PEERS = pathlib.Path(workload.__file__).parent


SMALL = dataclasses.replace(
    bench.MODEL,
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
)


@pytest.mark.parametrize(
    ('rollouts', 'dtype'),
    [
        (workload.Rollouts('even', 352, ((96, 96),) * 4), 'float32'),
        (workload.Rollouts('uneven', 512, ((), (20,), (30, 5, 150), (1, 99))), 'bfloat16'),
    ],
)
def test_rollouts_and_updates_of_the_speed_benchmark(rollouts, dtype):
    engine = bench.Engine(dataclasses.replace(SMALL, dtype=dtype), rollouts)
    engine.measure()
    # A further round reads the weights that the updates of the first one made.
    figures = engine.measure()
    assert set(figures) == {'generated_tokens_per_second', 'update_tokens_per_second'}
    assert all(value > 0 for value in figures.values())


@pytest.mark.long
def test_parts_of_the_gpu_benchmark(monkeypatch, capsys):
    # `main` sets it for the programs that it compiles.
    monkeypatch.setenv('XLA_FLAGS', os.environ.get('XLA_FLAGS', ''))
    monkeypatch.setattr(gpu, 'gpu_model', lambda: dataclasses.replace(SMALL, dtype='bfloat16'))
    monkeypatch.setattr(workload, 'LARGE', workload.Rollouts('', 512, ((), (20,), (30, 150))))
    printed = {}
    for part in ('slots', 'pages', 'update'):
        gpu.main([part])
        printed[part] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for (figures,) in printed.values():
        (rate,) = [value for name, value in figures.items() if 'tokens_per_second' in name]
        assert min(figures['seconds']) > 0 and rate > 0


def test_the_table_and_the_picture_of_self_play_and_a_control(tmp_path, capsys):
    for name, scores in {'selfplay': (0.5, 0.75), 'random': (0.25, 0.0)}.items():
        for seed, score in enumerate(scores):
            run = tmp_path / f'{name}-{seed}'
            run.mkdir()
            by_hop = {
                'before': {h: 0.25 for h in hops.HOPS},
                'after': {h: score for h in hops.HOPS},
            }
            (run / 'summary.json').write_text(json.dumps({'em_by_hop': by_hop}))
    (tmp_path / 'random-1.code').write_text('0123456789ab')
    picture = tmp_path / 'picture.svg'
    folder = ['--folder', str(tmp_path), '--seeds', '0', '1']
    hops.main([*folder, '--arms', 'selfplay', 'random', '--svg', str(picture)])
    printed = capsys.readouterr()
    assert printed.err == 'code of the runs: 0123456789ab, unknown\n'
    start, selfplay, control, gain = printed.out.splitlines()[2:]
    assert start == '| start | 0.25 | 0.25 | 0.25 | 0.25 | 0.25 | 0.25 | 0.25 |'
    assert selfplay.count('0.62 [0.50, 0.75]') == control.count('0.12 [0.00, 0.25]') == 7
    # -1/2 ± 12.706 · 1/4: Student's t with one degree of freedom.
    assert gain == '| random - selfplay |' + ' -0.500 [-3.677, +2.677] |' * 7
    assert 'shown to the start' in picture.read_text()
    with pytest.raises(SystemExit):
        hops.main([*folder, '--arms', 'selfplays'])
    assert "invalid choice: 'selfplays'" in capsys.readouterr().err


@pytest.mark.parametrize('name', hops.ARMS)
def test_every_arm_is_a_sound_config(name):
    arm = hops.ARMS[name]
    assert bool(arm.support) == bool(arm.contradiction)
    config = fields.config('quickstart')
    fields.set_fields(config, [f'--config.{flag}' for flag in arm.flags])
    rules.check(config)


def test_given_questions_have_the_shares_of_their_arm(tmp_path):
    file = tmp_path / 'questions.jsonl'
    hops.write_questions(file, hops.ARMS['supervised_same'].questions)
    questions = [json.loads(line) for line in file.read_text().splitlines()]
    of_hops = [question['hops'] for question in questions]
    assert [of_hops.count(number) for number in range(1, 5)] == [0, 0, 576, 192]
    # Self-play asks for these shares.
    assert fields.config('quickstart').schedule.hop_ratio == (0, 0, 3, 1)
    # The steps of the arm take each question once.
    config = fields.config('quickstart')
    flags = hops.ARMS['supervised_same'].flags
    fields.set_fields(config, [f'--config.{flag}' for flag in flags])
    assert len({question['question'] for question in questions}) == 768
    assert config.solver.steps * config.solver.batch == 768


@pytest.mark.parametrize('name', ['random', 'composed'])
def test_the_command_of_an_arm_is_sound(name, tmp_path):
    checked = run_python(*hops.words(name, 0, tmp_path / 'run'), '--check')
    assert 'the command is sound' in checked.stdout, checked.stderr


def cell_of(scores):
    if len(scores) < 3:
        return ', '.join(f'{score:.2f}' for score in scores)
    return f'{np.mean(scores):.2f} [{min(scores):.2f}, {max(scores):.2f}]'


def test_the_page_has_the_figures_of_the_stored_runs():
    # Two lines say how the runs were made.
    lines = (RESULTS / 'hops.tsv').read_text().splitlines()[2:]
    of_arm = {}
    for line in lines[1:]:
        arm, _, *scores = line.split('\t')
        of_arm.setdefault(arm, []).append([float(scores[2]), float(scores[3])])
    assert set(of_arm) == {'start', *hops.ARMS}
    page = (ROOT / 'docs' / 'results.md').read_text().replace('**', '')
    for scores in of_arm.values():
        cells = map(cell_of, zip(*scores, strict=True))
        assert f'| {" | ".join(cells)} |' in page
    readme = (ROOT / 'README.md').read_text()

    def means(arm):
        return ' | '.join(f'{np.mean(values):.2f}' for values in zip(*of_arm[arm], strict=True))

    random_cells = ' | '.join(map(cell_of, zip(*of_arm['random'], strict=True)))
    for row in (
        f'| before | {means("start")} |',
        f'| after self-play (mean of 5 seeds) | {means("selfplay")} |',
        f'| after random rewards (2 seeds) | {random_cells} |',
        f'(mean of 3 seeds) | {means("supervised_same")} |',
    ):
        assert row in readme.replace('**', '')


def rows_of_other_starts():
    # Two lines say how the runs were made.
    lines = (RESULTS / 'starts.tsv').read_text().splitlines()[2:]
    columns = lines[0].split('\t')
    return [dict(zip(columns, line.split('\t'), strict=True)) for line in lines[1:]]


def of_starts(variant, arm, when, lengths):
    """Cells of a page: exact match by hops, of each seed or their mean with the lowest and the highest."""
    rows = [r for r in rows_of_other_starts() if (r['variant'], r['arm']) == (variant, arm)]
    by_hops = [[float(row[f'{when} {hops} hops']) for row in rows] for hops in lengths]
    if when == 'start':
        by_hops = [scores[:1] for scores in by_hops]
    return ' | '.join(map(cell_of, by_hops))


def test_the_pages_have_the_figures_of_other_starts():
    page = (ROOT / 'docs' / 'results.md').read_text()
    for row in rows_of_other_starts():
        if row['arm'] == 'selfplay':
            name = row['variant'] or 'of the package'
            before, after = (
                of_starts(row['variant'], 'selfplay', when, (3, 4)) for when in ('start', 'after')
            )
            assert f'| {name} | {before} | {row["long proposals"]} | {after} |' in page
    lengths = (3, 4, 5, 6)
    assert f'| start | {of_starts("parts last", "selfplay", "start", lengths)} |' in page
    for arm in ('selfplay', 'composed_six', 'supervised_six'):
        assert f'| {of_starts("parts last", arm, "after", lengths)} |' in page


def test_fresh_questions_are_about_other_facts(monkeypatch, capsys):
    monkeypatch.setattr(fresh, '_run', lambda *words: '')
    written = {}

    def measure(folder, policy):
        written['passages'] = read_lines(folder / 'corpus.jsonl')
        written['questions'] = [read_lines(folder / f'{number}.jsonl') for number in hops.HOPS]
        return [0.5] * len(hops.HOPS)

    monkeypatch.setattr(fresh, 'measure', measure)
    fresh.main(['base', '--questions', '4'])
    assert capsys.readouterr().out.splitlines()[1].split('\t') == ['base', *['0.5'] * 6]
    texts = {each['title']: each['text'] for each in written['passages']}
    of_quickstart = World(12, 'evaluation').passages
    common = [each for each in of_quickstart if each.title in texts]
    assert len(common) > 100
    same = [each for each in common if texts[each.title] == each.text]
    # By chance a river has the same source.
    assert len(same) < 0.05 * len(common)
    counts = [[each['hops'] for each in questions] for questions in written['questions']]
    assert counts == [[number] * 4 for number in range(1, 7)]


def test_the_page_has_the_figures_of_fresh_questions():
    # Two lines say how the runs were made.
    lines = (RESULTS / 'fresh.tsv').read_text().splitlines()[3:]
    of_arm = {}
    for line in lines:
        policy, *scores = line.split('\t')
        arm = policy.split('/')[2].rpartition('-')[0] if policy.startswith('runs/') else 'start'
        of_arm.setdefault(arm, []).append(list(map(float, scores[2:])))
    page = (ROOT / 'docs' / 'results.md').read_text().replace('**', '')
    for scores in of_arm.values():
        cells = map(cell_of, zip(*scores, strict=True))
        assert f'| {" | ".join(cells)} |' in page


def test_the_page_says_what_credit_per_turn_has_shown():
    # Two lines say how the runs were made.
    lines = (RESULTS / 'turn_credit.tsv').read_text().splitlines()[2:]
    means = {}
    for line in lines:
        arm, *_, mean = line.split('\t')
        if arm.endswith('_credit'):
            means.setdefault(arm, []).append(float(mean))
    gain = difference([0.0], np.subtract(means['turn_credit'], means['outcome_credit']))
    page = (ROOT / 'examples/turn_credit/README.md').read_text()
    assert interval_text(gain, sign='+') in page


def test_a_reward_for_form_is_for_any_answer():
    assert [hops.answered(text, ['Lomi']) for text in ('Rome', ' ', None)] == [1, 0, 0]
    assert hops.no_difficulty(2, 5, 0.5) == 0


def test_random_rewards_are_fair_and_repeatable():
    texts = [(f'answer {number}', ['Lomi']) for number in range(1000)]
    scores = [hops.random_score(*text) for text in texts]
    assert scores == [hops.random_score(*text) for text in texts]
    assert set(scores) == {0.0, 1.0} and 0.45 < np.mean(scores) < 0.55


def test_counted_operations_are_those_of_the_compiled_program():
    # One layer, so that XLA's own count needs no loop; dense attention does twice the causal products.
    model = dataclasses.replace(SMALL, layers=1, logit_chunk=10**6, attention='dense')
    shapes = jax.eval_shape(functools.partial(transformer.init, model), jax.random.key(0))
    places = jax.ShapeDtypeStruct((1, 64), jnp.int32)
    step = jax.jit(jax.grad(lambda p, *batch: transformer.score(model, p, *batch)[0].sum()))
    compiled = step.lower(shapes, places, places, places).compile().cost_analysis()
    need = 3 * transformer.forward_operations(model, 64, 64)
    attention = 3 * 64 * model.layers * 2 * model.heads * model.head_dim * 64
    assert 0.9 < compiled['flops'] / (need + attention) < 1.25


# The other engines of the speed benchmark


def test_the_workload_is_uneven_and_its_tokens_are_those_of_our_requests():
    rollouts = workload.UNEVEN
    rows = range(len(rollouts))
    assert {rollouts.turns(row) for row in rows} == {1, 2, 3, 4, 5}
    assert max(rollouts.length(row) for row in rows) <= rollouts.context
    codec = bench._Codec(workload.VOCAB_SIZE)
    request = bench.make_request(rollouts, 4, codec, bench._Search())
    observations = [rollouts.observation(4, turn) for turn in (0, 1)]
    assert request.prompt.tolist() == rollouts.prompt(4)
    assert [request.env.observation(None).tolist() for _ in observations] == observations
    texts = [rollouts.prompt(4), rollouts.prompt(5), *observations]
    assert len(set(map(tuple, texts))) == len(texts)
    for ids in texts:
        # No special ones.
        assert workload.FIRST_TOKEN <= min(ids) and max(ids) < workload.VOCAB_SIZE


def pins(path):
    """Name → version for Python 3.11, the oldest one, on which the other engines run."""
    found = {}
    for line in path.read_text().splitlines():
        if '==' in line and not line.startswith('#'):
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or marker.evaluate({'python_version': '3.11'}):
                found[requirement.name] = str(requirement.specifier)
    return found


def test_both_jax_engines_run_on_the_same_jax():
    peer_pins = pins(PEERS / 'requirements.txt')
    own_pins = pins(bench.ROOT / 'requirements.txt')
    for package in ('jax', 'flax', 'optax'):
        assert peer_pins[package] == own_pins[package]


@pytest.fixture
def fake_peers(tmp_path, monkeypatch):
    """A folder of scripts that print rates at once, and this interpreter to run them."""
    monkeypatch.setenv('PEERS_PYTHON', sys.executable)
    monkeypatch.setattr(bench, 'PEERS_FOLDER', tmp_path)
    script = (
        'import sys\n'
        'from benchmarks.peers import workload\n'
        'rollouts = workload.WORKLOADS[sys.argv[2]]\n'
        "workload.print_rates('engine', rollouts, rollout_seconds=1.0, update_seconds=2.0)\n"
    )
    for name in bench.PEERS:
        (tmp_path / f'peer_{name}.py').write_text(script)
    return tmp_path


def test_rates_of_another_engine_are_read_from_its_output(fake_peers):
    updated_tokens = workload.TRAIN_BATCH * workload.TRAIN_LEN
    for name, batch in (('tunix', workload.EVEN), ('hf', workload.UNEVEN)):
        rates = bench.peer(name, batch.name)
        assert rates == {'rollout': batch.generated, 'train': updated_tokens / 2}


def test_a_failing_script_of_another_engine_is_one_line(fake_peers):
    (fake_peers / 'peer_hf.py').write_text('import a_missing_engine\n')
    with pytest.raises(UserError, match='No module named .a_missing_engine.; install') as error:
        bench.peer('hf', 'even')
    assert '\n' not in str(error.value)


def test_ratios_of_a_round_are_ours_over_theirs(fake_peers, capsys):
    figures = {'generated_tokens_per_second': 6144.0, 'update_tokens_per_second': 4096.0}
    engine = types.SimpleNamespace(measure=lambda: figures)
    arguments = bench.parse_arguments(['--rounds', '2'])
    our_figures, ratios = bench.compare(engine, arguments)
    assert our_figures == [figures] * 2
    # The fake engines generate 3072 tokens in a second and update 4096 tokens in two.
    assert ratios == {
        'rollout_vs_tunix': [2.0, 2.0],
        'update_vs_tunix': [2.0, 2.0],
        'rollout_vs_hf': [2.0, 2.0],
        'update_vs_hf': [2.0, 2.0],
    }
    assert capsys.readouterr().out.count('hf: rollout 3072, train 2048 tokens/s') == 2


def test_runs_that_differ_by_the_clock_alone_have_one_hash(tmp_path):
    record = {'step': 1, 'truncated_rate': 0.25, 'seconds/update': 1.0, 'run': 'a'}

    def hashes_of(weights=b'w', **changes):
        folder = tmp_path / 'policy' / 'solver'
        folder.mkdir(parents=True, exist_ok=True)
        (folder / 'model.safetensors').write_bytes(weights)
        for name in ('metrics.jsonl', 'tasks.jsonl'):
            (tmp_path / name).write_text(json.dumps(record | changes) + '\n')
        return small_runs.hashes(tmp_path)

    first = hashes_of()
    assert all(first.values()) and first == hashes_of(**{'seconds/update': 2.0, 'run': 'b'})
    other = hashes_of(truncated_rate=0.5)
    assert other['weights'] == first['weights']
    assert other['metrics'] != first['metrics'] and other['rollouts'] != first['rollouts']
    assert hashes_of(weights=b'v')['weights'] != first['weights']


@pytest.mark.long
def test_the_rollout_and_update_of_transformers(monkeypatch):
    from benchmarks.peers import peer_hf

    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    monkeypatch.setattr(workload, 'QWEN3', workload.QWEN3 | sizes | heads)
    monkeypatch.setattr(
        workload, 'random_tokens', lambda seed, tokens, _: [seed % 50 + 10] * tokens
    )
    rollouts = workload.Rollouts('', 99, ((9, 3), ()), prompt_tokens=5, turn_tokens=4)
    model = peer_hf.make_model()
    contexts = peer_hf.rollout(model, rollouts)
    assert [len(context) for context in contexts] == [29, 9]
    assert contexts[0][:5] == [10] * 5 and contexts[1][:5] == [11] * 5
    # Row 0 after its first turn: seed 1000.
    assert contexts[0][9:18] == [10] * 9
    losses = [peer_hf.make_update(model)() for _ in range(2)]
    assert np.isfinite(losses).all()
