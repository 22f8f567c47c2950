"""Fixtures of reports."""

from report_fixtures import both, browser, open_run, other, page, run  # noqa: F401
