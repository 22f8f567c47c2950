"""A copy of the project, for tests that change its files."""

import shutil
import subprocess

from python_process import PIPES, ROOT


def listed(*arguments):
    """Names of files of the project."""
    return subprocess.run(['git', 'ls-files', *arguments], cwd=ROOT, **PIPES).stdout.splitlines()


def copy_project(folder):
    """Copies what git tracks, or would, into a folder, and links the environment; returns the folder."""
    for name in listed('-co', '--exclude-standard'):
        # A deleted file is still listed.
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    (folder / '.venv').symlink_to(ROOT / '.venv')
    return folder
