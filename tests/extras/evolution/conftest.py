"""A run with questions."""

from report_fixtures import run  # noqa: F401
