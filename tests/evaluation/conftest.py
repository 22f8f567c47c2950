"""Fixtures of reports."""

from report_fixtures import both, browser, other, page, run  # noqa: F401
