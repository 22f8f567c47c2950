"""A run to show as documents, and a browser."""

from report_fixtures import browser, run  # noqa: F401
