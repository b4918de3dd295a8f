"""Processes attached to a folder whose owner ends, in any way: one of them becomes the owner, and all go on."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from tests.integration.conftest import ServerProcess
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from lakehead.client import patience
from lakehead.env.folder_lock import read_announcement

KV = pa.schema([("k", pa.int64()), ("a", pa.string())])

_OWNER = """
import sys, lakehead as lh
con = lh.connect(sys.argv[1])
print(con._folder is not None, flush=True)
sys.stdin.read()
if sys.argv[2] == "close":
    con.close()
    print("closed", flush=True)
    sys.stdin.close()
    __import__("threading").Event().wait()
"""

_WRITER = """
import sys, threading, lakehead as lh
con, me = lh.connect(sys.argv[1]), int(sys.argv[2])
table, over, n = con.table("t"), threading.Event(), 0
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
while not over.is_set():
    table.append([{"k": me * 1_000_000 + n, "a": None}])
    n += 1
    print(n, flush=True)
print("done", flush=True)
con.close()
"""


@contextmanager
def process(code: str, folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    args = [sys.executable, "-c", code, str(folder), *arguments]
    child = subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.wait(WAIT_SECONDS)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def finish(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.close()


@pytest.mark.parametrize("end", ["kill", "exit", "close"])
def test_an_attached_connection_outlives_the_owner(tmp_path: Path, end: str) -> None:
    with process(_OWNER, tmp_path, end) as owner:
        assert line(owner) == "True"
        con = lh.connect(tmp_path)
        first = con.uri
        log = con.create_table("log", KV)
        keyed = con.create_table("keyed", KV, primary_key="k")
        log.append([{"k": 0, "a": "x"}])
        keyed.upsert([{"k": 0, "a": "x"}])
        writer, named = log.writer(), keyed.writer("etl")
        named.upsert([{"k": 1, "a": "y"}])
        named.flush()
        feed, full, scan = log.subscribe("earliest"), keyed.subscribe("full"), log.scan()
        assert next(feed).rows["k"].to_pylist() == [0]
        assert sorted(next(full).rows["k"].to_pylist()) == [0, 1]
        if end == "kill":
            owner.kill()
            owner.wait(WAIT_SECONDS)
        else:
            finish(owner)
            assert line(owner) == ("closed" if end == "close" else "")
        writer.append([{"k": 1, "a": "y"}])
        writer.close()
        named.upsert([{"k": 2, "a": "z"}])
        named.close()
        assert next(feed).rows["k"].to_pylist() == [1] and next(full).rows["k"].to_pylist() == [2]
        assert scan.to_arrow()["k"].to_pylist() == [0] and log.scan().count() == 2
        assert keyed.get(2) == {"k": 2, "a": "z"} and con.tables() == ["default.keyed", "default.log"]
        assert con.create_table("new", KV).name == "default.new"
        assert con._server.serves and con.uri == first  # type: ignore[attr-defined]
        with lh.connect(tmp_path) as again, lh.connect(con.uri) as remote:
            assert again.table("log").scan().count() == remote.table("log").scan().count() == 2
            con.close()
            assert again.table("log").scan().count() == 2, "it serves as long as somebody here needs it"
        with pytest.raises(lh.ClosedError):
            log.scan()


def test_the_first_call_after_the_end_may_be_one_that_must_not_be_repeated(tmp_path: Path) -> None:
    with process(_OWNER, tmp_path, "exit") as owner:
        assert line(owner) == "True"
        con = lh.connect(tmp_path)
        con.create_table("t", KV).append([{"k": 0, "a": None}])
        owner.kill()
        owner.wait(WAIT_SECONDS)
        con.table("t").append([{"k": 1, "a": None}])
        con.drop_table("t")
        assert con.tables() == []
        con.close()


def test_many_race_to_be_the_next_owner(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    with ExitStack() as stack:
        owner = stack.enter_context(process(_OWNER, tmp_path, "exit"))
        assert line(owner) == "True"
        with lh.connect(tmp_path) as con:
            con.create_table("t", KV, buckets=2)
        writers = {n: stack.enter_context(process(_WRITER, tmp_path, str(n))) for n in (1, 2, 3)}
        done = dict.fromkeys(writers, 0)

        def progress(rows: int) -> None:
            for number, child in writers.items():
                goal = done[number] + rows
                while done[number] < goal:
                    said = line(child)
                    assert said.isdigit(), f"writer {number} ended after {done[number]} rows"
                    done[number] = int(said)

        def note() -> int:
            return int((read_announcement(str(tmp_path)) or {}).get("pid", 0))

        progress(5)
        owner.kill()
        owner.wait(WAIT_SECONDS)
        wait_until(lambda: note() != owner.pid)
        number, child = next((n, c) for n, c in writers.items() if c.pid == note())
        child.kill()
        child.wait(WAIT_SECONDS)
        del writers[number]
        progress(20)
        for number, child in writers.items():
            finish(child)
            while (said := line(child)) != "done":
                done[number] = int(said)
        for child in writers.values():
            assert child.wait(WAIT_SECONDS) == 0
    with lh.connect(tmp_path) as con:
        found = Counter(con.table("t").scan().to_arrow()["k"].to_pylist())
    assert set(found.values()) == {1}, "no row twice"
    for number, rows in done.items():
        mine = sorted(k % 1_000_000 for k in found if k // 1_000_000 == number)
        assert mine == list(range(len(mine))) and len(mine) >= rows
        if number in writers:
            assert len(mine) == rows


def test_who_was_given_no_lake_takes_no_server_over_that_has_one_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tables' rows would go to another catalog."""
    monkeypatch.setattr(patience, "PATIENCE_SECONDS", 0.5)
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/c.db", "warehouse": f"file://{tmp_path}/w"}
    lake = lh.LakeConfig(name="warehouse", catalog=catalog)
    server = ServerProcess(tmp_path / "d", lake, unix=True)
    try:
        with lh.connect(tmp_path / "d") as con:
            table = con.create_table("t", KV, lake="iceberg")
            table.append([{"k": 1, "a": None}])
            server.kill()
            calls: list[Callable[[], object]] = [
                lambda: table.append([{"k": 2, "a": None}]),
                lambda: table.scan().to_arrow(),
                lambda: con.create_table("n", KV, lake="iceberg"),
            ]
            for call in calls:
                with pytest.raises(lh.UnavailableError, match="another catalog"):
                    call()
            server.start()
            table.append([{"k": 3, "a": None}])
            con.tier("t")
            assert [r["k"] for r in table.scan(tier="lake").to_arrow().to_pylist()] == [1, 3]
            server.kill()
            with lh.connect(tmp_path / "d", lake=lake) as able:
                assert able.table("t").scan().count() == 2
                assert table.scan().count() == 2
    finally:
        server.kill()
