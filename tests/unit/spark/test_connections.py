"""Which Spark masters can be given which servers, and how long a worker waits for one."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from lakehead.errors import InvalidRequestError, UnavailableError
from lakehead.spark import connections
from lakehead.spark.connections import in_worker, require_reachable

HERE = ["local", "local[2]", "local[*]", "local[2, 3]", "local-cluster[1,2,1024]", "spark://127.0.0.1:7077",
        "spark://localhost:7077"]  # fmt: skip
ELSEWHERE = ["yarn", "spark://box:7077", "k8s://https://box:443", "spark://127.0.0.1.evil.org:1", "local.example.org"]


def con(uri: str) -> Any:
    return SimpleNamespace(uri=uri)


@pytest.mark.parametrize("master", HERE)
def test_workers_of_this_machine_reach_a_socket(master: str) -> None:
    require_reachable(con("lakehead:///home/ada/.lakehead/sockets/a.sock"), master)


@pytest.mark.parametrize("master", ELSEWHERE)
def test_those_of_others_need_an_address(master: str) -> None:
    with pytest.raises(InvalidRequestError, match="--listen HOST:PORT"):
        require_reachable(con("lakehead:///home/ada/.lakehead/sockets/a.sock"), master)


@pytest.mark.parametrize("master", HERE + ELSEWHERE)
def test_an_address_is_theirs_to_reach(master: str) -> None:
    require_reachable(con("lakehead://127.0.0.1:9123"), master)


@pytest.mark.parametrize("known", [True, False], ids=["that was reached", "that was not"])
def test_a_server_is_waited_for_once(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []

    def waited(uri: str) -> Any:
        waits.append("for a connection")
        raise UnavailableError("gone", gone=True)

    def gone(uri: str) -> Any:
        raise UnavailableError("gone", gone=True)

    def call(reached: Any) -> None:
        waits.append("as calls wait")
        raise UnavailableError("gone", gone=True)

    held = {(os.getpid(), "x"): SimpleNamespace(close=lambda: None)} if known else {}
    monkeypatch.setattr(connections, "_of_process", held)
    monkeypatch.setattr(connections, "_waited_for", waited)
    monkeypatch.setattr(connections, "_connected", gone)
    with pytest.raises(UnavailableError):
        in_worker("x", call, planned=True)
    assert waits == ["as calls wait" if known else "for a connection"]
    with pytest.raises(UnavailableError):
        in_worker("x", call)
    assert len(waits) == 1, "an address that nobody planned with fails at once"
