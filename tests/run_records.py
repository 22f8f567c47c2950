"""Records of runs (`run.json`) for tests: as a run writes them, and changed by hand."""

import json

from zeroplay_jax.configuration.fields import frozen
from zeroplay_jax.run import run_folder
from zeroplay_jax.runtime import record
from zeroplay_jax.runtime.workdir import claim


def write_record(workdir, config, **fields):
    """Writes the record of a run with a config, a ConfigDict or a plain dict, into a folder."""
    workdir.mkdir(parents=True, exist_ok=True)
    content = config if isinstance(config, dict) else frozen(config).to_dict()
    record.write(workdir, record.Record(record.plain_config(content), **fields))


def begin(workdir, config, **options):
    """Claims a workdir with a config, and options of `claim`; writes the record of a run that is not there yet."""
    content = config if isinstance(config, dict) else frozen(config).to_dict()
    with claim(workdir, content, **options):
        if record.read(workdir) is None:
            write_record(workdir, content)


def begin_run(workdir, config, inputs=None, is_resumed=True, **known):
    """Writes what a run that is possible records, and of one that is resumed pretends a checkpoint; its identity."""
    folder = workdir / 'checkpoints' / '1' if is_resumed else workdir
    folder.mkdir(parents=True, exist_ok=True)
    options = dict(index='', template={}, roles={}, weights={}, policies={}) | known
    return run_folder.begin(workdir, config, inputs or {}, is_resumed=is_resumed, **options)


def stored_config(workdir):
    return json.loads((workdir / 'run.json').read_text())['config']


def change_record(workdir, **fields):
    """Replaces entries of a record, whatever they are; None removes one."""
    path = workdir / 'run.json'
    content = json.loads(path.read_text()) | fields
    path.write_text(
        json.dumps({name: value for name, value in content.items() if value is not None})
    )
