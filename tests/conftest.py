"""Where the golden files are, a test that does without them fails: it must not pass unseen."""

import pytest

from tests.golden import SHARED


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.skipped and SHARED.is_dir() and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if "golden" in reason or "beside the repository" in reason:
            report.outcome = "failed"
            report.longrepr = f"skipped although {SHARED.name} is there: {reason}"
