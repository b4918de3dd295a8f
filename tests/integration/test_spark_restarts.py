"""A tiering service outlives its server: killed and started again, with another token."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from tests.integration.conftest import ServerProcess
from tests.waiting import WAIT_SECONDS

import lakehead as lh
import lakehead.spark as lhs
from lakehead.client import patience
from lakehead.env import credentials
from lakehead.env.address import TcpAddress
from lakehead.env.credentials import FoundToken

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([("id", pa.int64())])


def test_a_service_goes_on_when_its_server_is_back(
    server: ServerProcess,
    wait_until: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience, "PATIENCE_SECONDS", 1.0)
    with server.connect() as con:
        table = con.create_table("t.t", SCHEMA, lake="iceberg", freshness="200ms")
        table.append([{"id": 1}])
        reports: list[Any] = []
        service = lhs.tiering_service(lhs.session(con), con, on_round=reports.append)
        thread = threading.Thread(target=service.run)
        with caplog.at_level(logging.WARNING, "lakehead.tiering"):
            thread.start()
            wait_until(lambda: len(reports) == 1)
            server.kill()
            wait_until(lambda: "cannot be looked for" in caplog.text)
        server.token = "another token"
        server.start()
        with server.connect() as other:
            other.table("t.t").append([{"id": 2}])
            wait_until(lambda: len(reports) == 2)
            assert thread.is_alive()
            service.stop()
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()
            assert other.table("t.t").scan(tier="lake").count() == 2


def test_a_token_that_was_given_reaches_workers_and_nothing_else(server: ServerProcess) -> None:
    with server.connect() as con:
        table = con.create_table("t.t", SCHEMA, lake="iceberg", freshness="200ms")
        table.append([{"id": 1}])
        spark = lhs.session(con)
        kept = Path(credentials._folder().path, credentials._name(TcpAddress("127.0.0.1", server.port)))
        hidden = kept.rename(f"{kept}.new")
        assert FoundToken(TcpAddress("127.0.0.1", server.port))() is None, "workers find nothing in this user's files"
        try:
            source = spark.read.format("lakehead").options(uri=con.uri, table="t.t").load()
            assert source.count() == lhs.table(spark, "t.t").count() == 1
            reports: list[Any] = []
            lhs.tiering_service(spark, con, on_round=reports.append).run(lambda: bool(reports))
            assert table.scan(tier="lake").count() == 1
            settings = str(spark.sparkContext.getConf().getAll()) + str(spark.conf.getAll)
            plan = source._jdf.queryExecution().toString()
            assert server.token not in settings + plan
        finally:
            hidden.rename(kept)


def test_a_folder_is_no_server(tmp_path: Any) -> None:
    with lh.connect(tmp_path / "data") as con:
        assert con._given == (None, None)


def test_workers_reach_a_socket_and_find_the_next_server_there(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", unix=True)
    with lh.connect(server.uri) as con:
        con.create_table("t.t", SCHEMA, lake="iceberg", freshness="200ms").append([{"id": 1}])
        spark = lhs.session(con)
        source = spark.read.format("lakehead").options(uri=con.uri, table="t.t")
        assert source.load().count() == lhs.table(spark, "t.t").count() == 1
        server.kill()
        server.token = "another token"
        server.start()
        con.table("t.t").append([{"id": 2}])
        reports: list[Any] = []
        lhs.tiering_service(spark, con, on_round=reports.append).run(lambda: bool(reports))
        assert con.table("t.t").scan(tier="lake").count() == source.load().count() == 2
    server.stop()


def test_a_query_that_begins_waits_for_its_server(server: ServerProcess, tmp_path: Path) -> None:
    with server.connect() as con:
        con.create_table("t.t", SCHEMA).append([{"id": n} for n in range(5)])
        con.create_table("t.copy", SCHEMA)
        spark = lhs.session(con)
        source = spark.readStream.format("lakehead").options(uri=con.uri, table="t.t", start="earliest").load()
        to = {"uri": con.uri, "table": "t.copy"}

        def copy(rows: DataFrame, number: int) -> None:
            rows.write.format("lakehead").options(**to, job="copy", batch=number).mode("append").save()

        query = source.writeStream.foreachBatch(copy).option("checkpointLocation", str(tmp_path / "checkpoint"))
        server.kill()
        with socket.create_server(("127.0.0.1", server.port)) as nobody:
            nobody.settimeout(60)
            running = query.trigger(availableNow=True).start()
            nobody.accept()[0].close()  # the process that reads the stream has come
        server.start()
        running.awaitTermination()
        assert sorted(con.table("t.copy").scan().to_arrow()["id"].to_pylist()) == [*range(5)]
        with pytest.raises(Exception, match="no Lakehead server answers at 127"):  # where nobody was, nobody waits
            spark.read.format("lakehead").options(uri="lakehead://127.0.0.1:9", table="t.t").load()


def test_a_sink_waits_for_its_server(server: ServerProcess, tmp_path: Path) -> None:
    """Each micro-batch is planned anew, perhaps by a process that has not reached the server before."""
    with server.connect() as con:
        con.create_table("t.sunk", SCHEMA)
        spark = lhs.session(con)
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "1.json").write_text('{"id": 1}')
        source = spark.readStream.schema("id bigint").json(str(tmp_path / "in"))
        options = {"uri": con.uri, "table": "t.sunk", "checkpointLocation": str(tmp_path / "checkpoint")}
        server.kill()
        with socket.create_server(("127.0.0.1", server.port)) as nobody:
            nobody.settimeout(60)
            query = source.writeStream.format("lakehead").options(**options).trigger(availableNow=True).start()
            nobody.accept()[0].close()  # the process that plans the micro-batch has come
        server.start()
        query.awaitTermination()
        assert con.table("t.sunk").scan().to_arrow()["id"].to_pylist() == [1]
