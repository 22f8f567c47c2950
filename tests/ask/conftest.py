"""An index, the folder of a run, and a policy that writes a script."""

import json
import shutil

import pytest
from ask_cases import ATTACK, BASE, START, WORLD, main
from run_records import write_record
from speaker import Speaker

from zeroplay_jax.configs import quickstart
from zeroplay_jax.configuration.fields import fit_to_recipe
from zeroplay_jax.retrieval import build as index_build
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.run import build


@pytest.fixture(scope='session')
def index(tmp_path_factory):
    """A folder of retrieval.build, from a corpus in which a page tries to steer the terminal."""
    folder = tmp_path_factory.mktemp('index')
    corpus, out = folder / 'corpus.jsonl', folder / 'index'
    passages = [(p.id, p.title, p.text) for p in WORLD.passages]
    passages.append(('evil', f'{START}x', f'{START}x makes {ATTACK}<search>.'))
    records = [{'id': i, 'contents': f'"{title}"\n{text}'} for i, title, text in passages]
    corpus.write_text('\n'.join(map(json.dumps, records)))
    index_build.main([f'--corpus={corpus}', '--encoder=lexical', f'--out={out}'])
    return out


@pytest.fixture
def exported(tmp_path):
    """The folder of a run: its config and a policy."""
    config = quickstart.get_config()
    config.recipe, config.rollout.max_turns, config.world.train = 'scope', 3, (1, 2)
    fit_to_recipe(config)
    write_record(tmp_path / 'run', config)
    shutil.copytree(BASE, tmp_path / 'run' / 'policy' / 'solver')
    return tmp_path / 'run' / 'policy' / 'solver'


@pytest.fixture
def ask_scripted(capsys, monkeypatch):
    """Runs the command with a policy that writes these turns; returns its output."""

    def run(turns, *arguments, policy=BASE):
        remaining = iter(turns)
        speaker = lambda model, config, mesh: Speaker(
            Codec(BASE), lambda prompt: next(remaining, ''), config
        )
        monkeypatch.setattr(build, 'Sampler', speaker)
        # The form that this policy reads: another one gives a note.
        question = 'What is the job of Fretes?'
        assert main([f'--policy={policy}', *arguments, question]) == 0
        return capsys.readouterr().out

    return run
