"""Writes the trained weights of a run as Hugging Face folders: of one that is running, was killed or has finished.

    zeroplay export runs/mini --out exported
    zeroplay export runs/mini --best --out exported

Takes the newest checkpoint, or with --best that of the best evaluation (config.checkpoint.best). Needs no accelerator.
Every folder has a model card: base, recipe, prompts, stop strings and how to run it.
The folders can be asked (zeroplay ask --policy exported/solver --index …), evaluated and trained on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ml_collections import ConfigDict
from safetensors import SafetensorError

from zeroplay_jax.configuration.fields import read_stored_config
from zeroplay_jax.configuration.places import fetch_model
from zeroplay_jax.retrieval.command import Parser, exit_status, show_messages
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.runtime import signals
from zeroplay_jax.runtime.workdir import local_run
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT
from zeroplay_jax.types import UserError

if TYPE_CHECKING:
    # It imports JAX, whose devices are chosen first.
    from zeroplay_jax.learner.weights_view import FrozenBase
    from zeroplay_jax.run.branch import Source

EXAMPLES = """examples:
  zeroplay export runs/mini --out exported
  zeroplay export runs/mini --best --out exported
"""


def main(argv: list[str] | None = None) -> int:
    """Writes the folders and prints their paths; returns the exit status (`exit_status`)."""
    signals.raise_again()
    # `export` turns errors of --out into UserErrors; others are of the run or its starting checkpoint.
    return exit_status('zeroplay export', lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    arguments = _parser().parse_args(argv)
    checkpoints = 'best' if arguments.best else 'checkpoints'
    workdir = local_run(arguments.workdir, checkpoints)
    for path in export(workdir, arguments.out, arguments.best):
        print(path)


def _parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(
        prog='zeroplay export',
        description=__doc__,
        epilog=EXAMPLES,
    )
    parser.add_argument(
        'workdir', metavar='WORKDIR', help='workdir of the run, or gs://bucket/path'
    )
    parser.add_argument(
        '--out',
        type=pathlib.Path,
        required=True,
        metavar='FOLDER',
        help='gets a folder for each set of weights, such as FOLDER/solver',
    )
    parser.add_argument(
        '--best', action='store_true', help='the best evaluation instead of the last step'
    )
    return parser


def export(workdir: pathlib.Path, out: pathlib.Path, best: bool = False) -> list[pathlib.Path]:
    """Writes the weights of a run's newest or best checkpoint to `out`/<name of the weights>; returns the folders.

    The run is only read, and may be in progress.

    Raises:
      UserError: the folder is no workdir, has no whole checkpoint, or one of the folders exists; or the checkpoint
        that the run began from has other bytes now, or `out` cannot be written.
      OSError: a file of the run cannot be read.
    """
    config = read_stored_config(workdir)
    if config is None:
        raise UserError(
            f'{workdir}: is not the workdir of a run; name one with a {run_record.FILE_NAME}'
        )
    if best and not (workdir / 'best').is_dir():
        raise UserError(
            f'{workdir}: keeps no best checkpoint; leave --best out, or train with '
            '--config.checkpoint.best=em/mean'
        )
    # The devices of the run may be in use by it. Read when JAX is imported.
    os.environ['JAX_PLATFORMS'] = 'cpu'
    from zeroplay_jax.run import branch, run_folder

    start = pathlib.Path(
        fetch_model('config.policy.path', config.policy.path) or BUILT_IN_CHECKPOINT
    )
    # The Hub or this clone may have another checkpoint of the same name since.
    run_folder.check_start(workdir, start)
    with _output_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        # Gets links to the files of the checkpoint, which the run may remove meanwhile.
        links = tempfile.TemporaryDirectory(prefix='.', dir=out.parent)
    with links as folder:
        source = branch.newest_checkpoint(
            workdir / 'best' if best else workdir, pathlib.Path(folder)
        )
        folders = _export(config, workdir, start, source, out)
    source.print_use()
    return folders


def _export(
    config: ConfigDict,
    workdir: pathlib.Path,
    start: pathlib.Path,
    source: Source,
    out: pathlib.Path,
) -> list[pathlib.Path]:
    """Writes the weights of a checkpoint of the run in a workdir; arguments and errors as of `export`."""
    from zeroplay_jax.policy import hf
    from zeroplay_jax.run import branch, policies

    model = hf.read_config(start)
    names = branch.policy_names(source)
    folders = [out / name for name in names]
    if config.policy.adapters.merge:
        folders.extend(map(policies.merged_folder, folders[:]))
    for folder in folders:
        if os.path.lexists(folder):
            raise UserError(f'{folder}: exists already; choose another --out or remove it')
    identity = run_record.identity_of_checkpoint(source.folder)
    texts = run_record.recorded(workdir).texts_of_policies(identity)
    base = _load_base(config, start) if config.policy.adapters.merge else None
    try:
        for name in names:
            params = branch.read_params(source, name)
            with _output_errors(out):
                policies.write_policy(
                    config, start, model, base, params, texts.get(name, {}), out / name
                )
    except BaseException:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return folders


def _load_base(config: ConfigDict, start: pathlib.Path) -> FrozenBase:
    """Returns the base of a run with adapters, from its folder, in the dtype and quantisation of the run."""
    from zeroplay_jax.policy import hf, sharding
    from zeroplay_jax.run.build import load_weights

    model = dataclasses.replace(hf.read_config(start), dtype=config.policy.dtype)
    mesh = sharding.make_mesh()
    _, base = load_weights(config, start, model, mesh, uses_adapters=True, shows_progress=True)
    assert base is not None
    return base


@contextlib.contextmanager
def _output_errors(out: pathlib.Path) -> Iterator[None]:
    """Turns errors of the disk while the output folder is written into one line."""
    try:
        yield
    # The library that writes the weights raises a type of its own.
    except (OSError, SafetensorError) as error:
        reason = getattr(error, 'strerror', None) or error
        raise UserError(f'{out}: {reason}; choose another --out') from None


if __name__ == '__main__':
    show_messages(logging.WARNING)
    sys.exit(main())
