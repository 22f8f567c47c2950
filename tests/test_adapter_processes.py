"""Two processes with adapters play and learn what one does (see test_hosts.py for whole weights)."""

import numpy as np
import pytest
from host_processes import finish, play
from python_process import config_flags
from safetensors.numpy import load_file
from test_hosts import read

# With fewer proposals no group of solves has different rewards, and the solver learns nothing.
ADAPTERS = config_flags('policy.adapters.rank=4 proposer.steps=2 proposer.batch=12')
FILE = 'adapter_model.safetensors'


@pytest.mark.long
@pytest.mark.parametrize('weights', ['shared', 'separate'])
def test_two_processes_play_and_learn_what_one_does(tmp_path, weights):
    for count in (1, 2):
        finish(play(tmp_path / str(count), count, *ADAPTERS, f'--config.weights={weights}'))
    one, two = tmp_path / '1', tmp_path / '2'
    assert read(two, 'trajectories.jsonl') == read(one, 'trajectories.jsonl')
    folders = [path.parent.relative_to(one) for path in sorted((one / 'policy').rglob(FILE))]
    assert len(folders) == (1 if weights == 'shared' else 2)
    for folder in folders:
        ours, theirs = load_file(two / folder / FILE), load_file(one / folder / FILE)
        assert any(x.any() for name, x in theirs.items() if 'lora_B' in name)
        for name, x in theirs.items():
            assert np.linalg.norm(ours[name] - x) <= 1e-3 * np.linalg.norm(x), name
