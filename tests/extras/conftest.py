"""Fixtures of reports."""

from report_fixtures import browser, open_run, run  # noqa: F401
