"""Settings of a session: the user's win, local ones only where executors are local."""

from __future__ import annotations

import pytest

from lakehead.spark.launch import is_local, session_settings


def test_user_wins() -> None:
    got = session_settings({"master": "local[4]", "app_name": "x", "spark.ui.enabled": True, "spark.a": 3})
    assert got["spark.master"] == "local[4]"
    assert got["spark.app.name"] == "x"
    assert got["spark.ui.enabled"] == "true"
    assert got["spark.a"] == "3"
    assert got["spark.sql.session.timeZone"] == "UTC"


def test_cluster_keeps_its_addresses() -> None:
    assert "spark.driver.host" in session_settings({})
    assert "spark.driver.host" not in session_settings({"spark.master": "spark://box:7077"})


@pytest.mark.parametrize(
    ("master", "local"),
    [("local", True), ("local[2]", True), ("local[*]", True), ("local-cluster[1,1,1024]", False), ("yarn", False)],
)
def test_is_local(master: str, local: bool) -> None:
    assert is_local(master) is local
