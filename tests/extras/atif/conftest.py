"""A run to show as documents."""

from report_fixtures import run  # noqa: F401
