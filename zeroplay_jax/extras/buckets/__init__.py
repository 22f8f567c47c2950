"""Runs whose workdir is in a bucket (gs://bucket/path): docs/buckets.md."""
