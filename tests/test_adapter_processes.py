"""Two processes with adapters play and learn what one does (see test_hosts.py for whole weights)."""

import numpy as np
import pytest
from host_processes import finish, play
from safetensors.numpy import load_file
from test_hosts import read

ADAPTERS = ['--config.policy.adapters.rank=4', '--config.proposer.steps=2']


@pytest.mark.long
def test_two_processes_play_and_learn_what_one_does(tmp_path):
    for count in (1, 2):
        finish(play(tmp_path / str(count), count, *ADAPTERS))
    one, two = tmp_path / '1', tmp_path / '2'
    assert read(two, 'trajectories.jsonl') == read(one, 'trajectories.jsonl')
    file = 'policy/policy/adapter_model.safetensors'
    ours, theirs = load_file(two / file), load_file(one / file)
    assert any(x.any() for name, x in theirs.items() if 'lora_B' in name)
    for name, x in theirs.items():
        assert np.linalg.norm(ours[name] - x) <= 1e-3 * np.linalg.norm(x), name
