"""What every test shares: two workers for Spark, no silent skips in CI, Hypothesis without wall-clock verdicts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.lake_servers import database, lake_on, store
from tests.waiting import WAIT_SECONDS

from lakehead.client import patience
from lakehead.errors import LakeheadError
from lakehead.spark import class_archive
from lakehead.spark.java import find_java

__all__ = ["database", "lake_on", "store"]

# Machines under load are slow, which is no fault of the code; a failure prints what replays it.
settings.register_profile(
    "lakehead", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("lakehead")

# Calls wait as long for a server that a test starts again; tests of servers that stay away say how long.
patience.PATIENCE_SECONDS = WAIT_SECONDS

# Spark's Python workers begin in the folder where the JVM did, which may be one of a test's: they find `tests` by this.
_PATHS = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(p for p in _PATHS if p)

# JVMs of tests live for seconds: what the second compiler makes of their code costs more than it saves, and to load
# classes anew is what `make test` keeps them for.
_QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
os.environ.setdefault("SPARK_LAUNCHER_OPTS", _QUICK_JVM)
with contextlib.suppress(LakeheadError):
    if _archive := class_archive.find(str(Path(__file__).parent.parent / ".venv"), find_java()):
        _QUICK_JVM += f' "-XX:SharedArchiveFile={_archive}" -Xlog:cds=off'
for _options in ("SPARK_SUBMIT_OPTS", "SPARK_DAEMON_JAVA_OPTS"):
    os.environ.setdefault(_options, _QUICK_JVM)

NO_SKIP = os.environ.get("CI", "").lower() in ("1", "true")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep Spark tests in two workers: one for those with a session in the test's process, and one for those ``apart``,
    which start processes that have one. So there are two JVMs at a time, and the memory of two."""
    for item in items:
        if marker := item.get_closest_marker("spark"):
            item.add_marker(pytest.mark.xdist_group("spark-apart" if marker.kwargs.get("apart") else "spark"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail when the groups above are not honoured: many JVMs at once would fail later, and elsewhere."""
    grouped = not getattr(item.config.option, "loadgroup", False) or item.nodeid.endswith(("@spark", "@spark-apart"))
    if item.get_closest_marker("spark") and not grouped:
        pytest.fail("this pytest-xdist ignores xdist_group with this pytest: run make setup", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a skipped test fails: what is not tried there is tried nowhere."""
    report = yield
    if NO_SKIP and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"skipped in CI: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for whole modules (``importorskip``)."""
    report = yield
    if NO_SKIP and report.skipped:
        report.outcome, report.longrepr = "failed", f"skipped in CI: {report.longrepr}"
    return report
