"""What every folder of a trained policy has to hold."""

import hashlib


def check_hashes(folder):
    """Asserts that SHA256SUMS lists every other file of the folder with its digest."""
    digests = {}
    for line in (folder / 'SHA256SUMS').read_text().splitlines():
        digest, file = line.split('  ')
        digests[file] = digest
    assert set(digests) == {path.name for path in folder.iterdir()} - {'SHA256SUMS'}
    for file, digest in digests.items():
        assert hashlib.sha256((folder / file).read_bytes()).hexdigest() == digest
