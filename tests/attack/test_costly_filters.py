"""Who keeps a server's cores busy with filters leaves others theirs, and goes on costing nothing once it has left."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.integration.conftest import ServerProcess
from tests.waiting import WAIT_SECONDS, wait_until

import lakehead as lh

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string())])
ROWS = 100_000
COSTLY = " or ".join(f"s like '%{i}a{'_' * 20}z%'" for i in range(100)) + f" or s like '%a{'_' * 20}z%'"
"""About a minute of one core for those rows."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("filters") / "data")
    r = random.Random(5)
    texts = ["".join(r.choices("ab", k=500)) for _ in range(500)]
    with process.connect() as con:
        table = con.create_table("a.t", SCHEMA)
        table.append(pa.table([list(range(ROWS)), texts * (ROWS // len(texts))], schema=SCHEMA))
        for name in ("flood", "other"):
            con.grant("read", "a", to=name)
    yield process
    process.kill()


def busy_seconds(process: ServerProcess) -> float:
    """Of all its cores, since it began."""
    fields = Path(f"/proc/{process.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_until_closed(con: lh.Connection) -> threading.Thread:
    def read() -> None:
        with pytest.raises(lh.LakeheadError):
            con.table("a.t").scan(where=COSTLY).count()

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def is_idle(process: ServerProcess) -> bool:
    before, pause = busy_seconds(process), threading.Event()
    pause.wait(0.5)
    return busy_seconds(process) - before < 0.1


def test_who_leaves_costs_no_more(server: ServerProcess) -> None:
    con = server.connect()
    threads = [read_until_closed(con) for _ in range(6)]
    before = busy_seconds(server)
    wait_until(lambda: busy_seconds(server) > before + 2)
    con.close()
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
    wait_until(lambda: is_idle(server), 10)


def test_a_flood_of_one_principal_leaves_others_their_turns(server: ServerProcess) -> None:
    with server.connect() as admin:
        tokens = {name: admin.create_token(name).token for name in ("flood", "other")}
    flood = lh.connect(server.uri, token=tokens["flood"])
    with lh.connect(server.uri, token=tokens["other"]) as other:
        table = other.table("a.t")
        threads = [read_until_closed(flood) for _ in range(30)]
        before = busy_seconds(server)
        wait_until(lambda: busy_seconds(server) > before + 1)
        began = time.monotonic()
        assert table.scan(where="n < 10 and s like '%a%'").count() == 10
        assert table.scan(where="n = 17").count() == 1
        took = time.monotonic() - began
    flood.close()
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
    assert took < 10, "the small scans waited for all that the flood had asked for"
