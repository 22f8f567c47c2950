"""What is read from the folder of a run."""

import json

CLOCKS = ('seconds', 'tokens_per_second')


def lines(workdir, name='metrics.jsonl'):
    text = (workdir / name).read_text(encoding='utf-8')
    return [json.loads(line) for line in text.split('\n') if line]


def without_clock(records):
    """Records of metrics without what another run of the same config has otherwise."""
    kept_records = []
    for record in records:
        kept = {name: x for name, x in record.items() if not any(c in name for c in CLOCKS)}
        kept_records.append(kept)
    return kept_records


def summary_of(workdir):
    return json.loads((workdir / 'summary.json').read_text())
