"""Which Spark masters can be given which servers, and how long a worker waits for one."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from lakehead.env.tls import Tls
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


TLS = Tls(b"the authority")


def told(*cons: Any) -> dict[str, str]:
    """The environment of workers that are told of these connections, one after the other."""
    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(master="local", environment={}))
    for known in cons:
        connections.tell_workers(spark, known)
    return dict(spark.sparkContext.environment)


def given(token: str | None, uri: str = "lakehead://127.0.0.1:9123", tls: Tls | None = None) -> Any:
    return SimpleNamespace(uri=uri, _given=(token, tls))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What workers connect with; the environment of this process is theirs."""
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(connections, "connect", lambda uri, **how: made.append((uri, how.get("token"), None)))
    monkeypatch.setattr(connections, "open_server", lambda uri, *, token, tls: made.append((uri, token, tls)))
    return made


def test_a_function_has_what_its_own_connection_was_given(
    opened: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever another session of the application was attached with to the same address, before it or since."""
    cons = [given("a"), given("b"), given(None), given("a", tls=TLS), given("c", "lakehead://box:1")]
    for name, value in told(*cons).items():
        monkeypatch.setenv(name, value)
    for known in cons:
        connections._connected(connections.worker_address(known))
    assert opened == [(known.uri, known._given[0], known._given[1]) for known in cons]
    opened.clear()
    for uri in ("lakehead://127.0.0.1:9123", "lakehead://localhost:9123", "lakehead://box:1", "lakehead://box:2"):
        connections._connected(uri)  # as the data source has it: with what was attached there last
    assert [(token, tls) for _, token, tls in opened] == [("a", TLS), ("a", TLS), ("c", None), (None, None)]


def test_a_connection_that_was_given_nothing_takes_back_what_was_given(
    opened: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(given(None)) == {}, "workers are told of nothing, and are those that there are"
    for name, value in told(given("a"), given(None)).items():
        monkeypatch.setenv(name, value)
    connections._connected("lakehead://127.0.0.1:9123")
    assert opened == [("lakehead://127.0.0.1:9123", None, None)]


def test_all_public_authorities_go_to_workers(opened: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux starts no process with more than 128 KiB in one environment variable."""
    many = Tls(b"-----BEGIN CERTIFICATE-----\n" * 10_000)
    large = told(given("a", tls=many))
    subprocess.run(["/bin/true"], env=large, check=True)
    for name, value in large.items():
        monkeypatch.setenv(name, value)
    connections._connected("lakehead://127.0.0.1:9123")
    assert opened == [("lakehead://127.0.0.1:9123", "a", many)]
