"""A copy of the project, for tests that change its files."""

import pathlib
import shutil
import subprocess

ROOT = pathlib.Path(__file__).parents[1]


def listed(*arguments):
    """Names of files of the project."""
    command = ['git', 'ls-files', *arguments]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return listing.stdout.splitlines()


def copy_project(folder):
    """Copies what git tracks, or would, into a folder, and links the environment; returns the folder."""
    for name in listed('-co', '--exclude-standard'):
        # A deleted file is still listed; a link to a folder stays a link.
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    (folder / '.venv').symlink_to(ROOT / '.venv')
    return folder
