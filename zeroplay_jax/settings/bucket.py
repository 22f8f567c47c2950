"""Config fields of runs whose workdir is in a bucket; `schema.Run` has them as a section."""

from __future__ import annotations

from typing import Annotated

from zeroplay_jax.settings.bounds import PositiveFloat, Section, requires


class Bucket(Section):
    """Runs with --workdir=gs://bucket/path ([workdirs in a bucket](buckets.md))."""

    spool: Annotated[str, requires(lambda x: '://' not in x, 'name a local folder')] = ''
    """Local folder in which such runs work before their files are uploaded; '' is in the user's cache
    ($XDG_CACHE_HOME, ~/.cache). It needs room for checkpoint.keep + 2 checkpoints. Several hosts need not share it."""
    seconds: PositiveFloat = 600.0
    """How long an upload is tried again before the run ends. With one process, what it saved stays in the local folder
    and is uploaded by the same command; with several, the run resumes from the newest complete step in the bucket."""
