"""The command line against a folder and against a real server, as people and scripts call it."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from lakehead.cli import main as cli
from lakehead.cli.metrics import ServerMetrics, new_registry
from lakehead.client import patience

LAKEHEAD = [sys.executable, "-m", "lakehead.cli.main"]


@dataclass(frozen=True)
class Done:
    """What a command that ended has printed."""

    stdout: bytes
    stderr: bytes


def lakehead(*arguments: object, stdin: bytes = b"", code: int = 0, **environ: str) -> Done:
    """Run one command in this process, as its entry point does, and check its exit code."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(stdin))))  # type: ignore[arg-type]
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        for name, value in environ.items():
            patch.setenv(name, value)
        found = cli.main([str(a) for a in arguments])
        out.flush()
        err.flush()
    done = Done(out.buffer.getvalue(), err.buffer.getvalue())  # type: ignore[attr-defined]
    assert found == code, (found, done)
    return done


def documents(*arguments: object, **settings: Any) -> list[Any]:
    """What a command prints with ``-o json``: one value a line."""
    return [json.loads(line) for line in lakehead(*arguments, "-o", "json", **settings).stdout.splitlines()]


@contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """A command that goes on; ended at the latest with the block."""
    with subprocess.Popen(
        [*LAKEHEAD, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A running server: its URI and process."""
    with started("server", "--data", tmp_path / "data", "--listen", "127.0.0.1:0") as process:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert line.startswith(f"serving {tmp_path / 'data'} at lakehead://127.0.0.1:"), line
        yield line.split()[-1], process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_stops_while_clients_are_connected(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PATIENCE_SECONDS", 0.5)
    with started("server", "--data", tmp_path, "--listen", "127.0.0.1:0", "-o", "json") as process:
        assert process.stdout is not None and process.stderr is not None
        ready = json.loads(process.stdout.readline())
        with lh.connect(ready["uri"]) as con:
            con.create_table("a.t", pa.schema([("id", pa.int64())])).append([{"id": 1}])
            process.send_signal(number)
            assert process.wait(WAIT_SECONDS) == 0
            with pytest.raises(lh.UnavailableError):
                con.tables()
        assert process.stderr.read() == b""
    assert not (tmp_path / "endpoint.json").exists()
    with lh.connect(tmp_path) as con:
        assert con.table("a.t").scan().count() == 1


def test_a_folder_has_one_server(server: tuple[str, subprocess.Popen[bytes]], tmp_path: Path) -> None:
    done = lakehead("server", "--data", tmp_path / "data", "--listen", "127.0.0.1:0", code=3)
    assert b"another process serves" in done.stderr and server[0].encode() in done.stderr
    assert lakehead("--uri", tmp_path / "data", "table", "list").stdout == b""


def test_a_server_refuses_what_is_unsafe_or_unknown(tmp_path: Path) -> None:
    listen = ("server", "--data", tmp_path / "d", "--listen", "0.0.0.0:0")
    assert b"--insecure" in lakehead(*listen, code=2, LAKEHEAD_TOKEN="t").stderr
    assert b"set a token" in lakehead(*listen, "--insecure", code=2).stderr
    (tmp_path / "l.toml").write_text("[server]\nlistne = '127.0.0.1:0'\n")
    done = lakehead("server", "--data", tmp_path / "d", "--config", tmp_path / "l.toml", code=2)
    assert b"did you mean 'listen'?" in done.stderr
    assert not (tmp_path / "d").exists()


def test_settings_of_a_server_from_file_and_environment(tmp_path: Path) -> None:
    (tmp_path / "l.toml").write_text("[server]\nlisten = '127.0.0.1:0'\ntoken = 'secret'\n")
    (tmp_path / "l.toml").chmod(0o644)
    done = lakehead("server", "--data", tmp_path / "d", "--config", tmp_path / "l.toml", code=2)
    assert b"chmod 600" in done.stderr and b"[server] token" in done.stderr and not (tmp_path / "d").exists()
    (tmp_path / "l.toml").chmod(0o600)
    with started("server", "--data", tmp_path / "d", "--config", tmp_path / "l.toml") as process:
        assert process.stdout is not None
        uri = process.stdout.readline().decode().split()[-1]
        assert lakehead("table", "list", "--uri", uri, LAKEHEAD_TOKEN="secret").stdout == b""
        done = lakehead("table", "list", "--uri", uri, LAKEHEAD_TOKEN="wrong", code=2)
        assert b"refused the token" in done.stderr


@pytest.mark.parametrize("where", ["folder", "server"])
def test_rows_go_in_and_come_out(where: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    uri = request.getfixturevalue("server")[0] if where == "server" else str(tmp_path / "data")
    create = ("table", "create", "--uri", uri)
    schema = "id bigint, city string, price decimal(8,2)"
    lakehead(*create, "shop.log", "--schema", schema, "--buckets", 2, "--property", "durability=os")
    lakehead(*create, "shop.keyed", "--schema", schema, "--primary-key", "id", "--lake", "iceberg", "--freshness", "5s")
    environ = {"LAKEHEAD_URI": uri}

    (tmp_path / "a.csv").write_text("id,city,price\n1,Oslo,1.50\n2,,\n")
    assert documents("append", "shop.log", tmp_path / "a.csv", **environ) == [{"table": "shop.log", "rows": 2}]
    line = b'{"id": 3, "city": "Troms\xc3\xb8", "price": 2.10}\n'
    assert lakehead("append", "shop.log", stdin=line, **environ).stdout == b"1 row appended to shop.log\n"
    rows = documents("sql", "select * from shop.log order by id", **environ)
    assert rows[0] == {"id": 1, "city": "Oslo", "price": "1.50"} and rows[2]["city"] == "Tromsø"

    table = pa.table({"id": [1, 2, 3], "city": ["a", "b", "c"], "price": pa.array([1, 2, 3], pa.decimal128(8, 2))})
    pq.write_table(table, tmp_path / "p.parquet")
    assert documents("upsert", "shop.keyed", tmp_path / "p.parquet", **environ)[0]["rows"] == 3
    (tiered,) = documents("tier", "once", "shop.keyed", **environ)
    assert (tiered["rows"], tiered["deletes"], tiered["files"]) == (3, 0, 1)
    assert tiered["offsets"] == [{"partition": [], "bucket": 0, "end": 3}]
    lakehead("upsert", "shop.keyed", "-", "--format", "csv", stdin=b"id,city\n2,changed\n", **environ)
    keys = b'{"id": 3, "other": true}\n{"id": 99, "other": true}\n'
    done = lakehead("-o", "json", "delete", "shop.keyed", "-f", "jsonl", stdin=keys, **environ)
    assert json.loads(done.stdout)["rows"] == 1, "there was no 99"
    assert documents("get", "shop.keyed", 2, **environ) == [{"id": 2, "city": "changed", "price": "2.00"}]
    assert b"no row of shop.keyed has the key 3" in lakehead("get", "shop.keyed", 3, code=8, **environ).stderr
    assert b"changed" in lakehead("sql", "select * from shop.keyed", **environ).stdout

    changes = documents("tail", "shop.keyed", "--start", "earliest", "--stop-now", "--where", "id > 1", **environ)
    assert [c["__change_type"] for c in changes] == ["+I", "+I", "-U", "+U", "-D"]
    assert {c["__bucket"] for c in changes} == {0} and [c["__offset"] for c in changes] == [1, 2, 3, 4, 5]
    assert len(documents("tail", "shop.log", "--start", "earliest", "--limit", 2, "--columns", "id", **environ)) == 2

    (state,) = [t for t in documents("status", **environ)[0]["tables"] if t["table"] == "shop.keyed"]
    assert (state["kind"], state["rows"], state["lake"], state["lag_rows"]) == ("primary-key", 2, "iceberg", 3)
    (tablet,) = documents("status", "shop.keyed", **environ)[0]["tablets"]
    assert (tablet["high_watermark"], tablet["tiered_offset"]) == (6, 3)
    (queued,) = documents("tier", "status", **environ)[0]["tables"]
    assert (queued["table"], queued["freshness_seconds"], queued["lag_rows"]) == ("shop.keyed", 5.0, 3)
    rounds = [(r["rows"], r["deletes"], r["records"], list(r["seconds"])) for r in queued["rounds"]]
    # Known to the server that they were reported to, which in a folder ends with each command.
    assert rounds == ([(3, 0, 3, ["plan", "resolve", "write", "commit"])] if where == "server" else [])
    assert all(r["cpu_seconds"] > 0 for r in queued["rounds"])
    (queued,) = documents("tier", "status", "--files", **environ)[0]["tables"]
    (bucket,) = queued["files"]
    assert bucket.pop("bytes") > 0
    assert bucket == {"partition": "", "bucket": 0, "files": 1, "delete_files": 0}
    assert b"delete files" in lakehead("tier", "status", "--files", **environ).stdout
    looks = documents("top", "--every", 0.1, "--times", 2, **environ)
    assert [{t["table"]: t["rows_per_second"] for t in look["tables"]} for look in looks] == [
        {"shop.keyed": None, "shop.log": None},
        {"shop.keyed": 0.0, "shop.log": 0.0},
    ]
    assert b"shop.keyed" in lakehead("top", "--times", 1, **environ).stdout
    for words in (["status"], ["status", "shop.log"], ["tier", "status"], ["table", "describe", "shop.keyed"]):
        assert b"shop." in lakehead(*words, **environ).stdout

    for segment in (tmp_path / "data" / "tables").rglob("*.log"):
        assert documents("inspect", "segment", segment)[0]["problems"] == []
    assert b"--yes" in lakehead("table", "drop", "shop.log", code=2, **environ).stderr
    assert documents("table", "list", **environ) == [["shop.keyed", "shop.log"]]
    lakehead("table", "drop", "shop.log", "--yes", **environ)
    assert lakehead("table", "list", "shop", **environ).stdout == b"shop.keyed\n"


def test_a_line_without_a_header_is_not_lost_in_silence(tmp_path: Path) -> None:
    uri = ("--uri", tmp_path / "data")
    lakehead(*uri, "table", "create", "a.log", "--schema", "id bigint, url string")
    lakehead(*uri, "table", "create", "a.keyed", "--schema", "id bigint, url string", "--primary-key", "id")
    lakehead(*uri, "upsert", "a.keyed", stdin=b"id,url\n2,/x\n")
    for verb, table, line in (
        ("append", "a.log", b"8,/x\n"),
        ("upsert", "a.keyed", b"8,/x\n"),
        ("delete", "a.keyed", b"2\n"),
        ("append", "a.log", b'[{"id": 8, "url": "/a"}]\n'),
    ):
        found = lakehead(*uri, verb, table, stdin=line, code=2)
        assert (b"is not a JSON object" if line[:1] == b"[" else b"column") in found.stderr, found
    assert lakehead(*uri, "append", "a.log", stdin=b"id,url\n").stdout == b"0 rows appended to a.log\n"
    assert documents(*uri, "sql", "select count(*) as n from a.keyed") == [{"n": 1}]


def test_types_that_arrow_lacks_are_written_as_duckdb_does(tmp_path: Path) -> None:
    odd = """select '1010'::bit "b""c", timetz '10:00:00+02' t, interval '1 day' i, 7 n, ['01'::bit] l,
        {'BIT': interval '1 day', 'e': 'BIT'::enum('BIT')} s, 'infinity'::timestamp f, ['-infinity'::date] d"""
    uri = ("--uri", tmp_path / "data")
    lakehead(*uri, "table", "create", "a.t", "--schema", "id bigint")
    of_plain = {'b"c': "1010", "t": "10:00:00+02", "i": "1 day", "n": 7}
    deeper = {"l": ["01"], "s": {"BIT": "1 day", "e": "BIT"}, "f": "infinity", "d": ["-infinity"]}
    assert documents(*uri, "sql", odd) == [of_plain | deeper]
    assert b"1010" in lakehead(*uri, "sql", odd).stdout
    assert len(documents(*uri, "sql", "select interval '1 day' a, 1 a")) == 1


def test_tiering_without_spark(tmp_path: Path) -> None:
    uri = ("--uri", tmp_path / "data")
    for name in ("a.t", "a.u"):
        lakehead(*uri, "table", "create", name, "--schema", "id bigint", "--lake", "iceberg", "--freshness", "200ms")
        lakehead(*uri, "append", name, stdin=b'{"id": 1}\n')
    lakehead(*uri, "table", "create", "a.plain", "--schema", "id bigint")
    assert [d["rows"] for d in documents(*uri, "tier", "once", "--all")] == [1, 1]
    assert lakehead(*uri, "tier", "once", "--all").stdout == b"a.t: nothing to move\na.u: nothing to move\n"
    for wrong in (["tier", "once"], ["tier", "once", "a.t", "--all"], ["tier", "run", "--local", "--master", "local"]):
        assert b"InvalidRequest" in lakehead(*uri, *wrong, "-o", "json", code=2).stderr
    lakehead(*uri, "append", "a.t", stdin=b'{"id": 2}\n{"id": 3}\n')
    lakehead(*uri, "append", "a.u", stdin=b'{"id": 2}\n')
    (moved,) = documents(*uri, "tier", "run", "--local", "--table", "a.t", "--until-idle")
    assert (moved["table"], moved["rows"]) == ("a.t", 2)
    (moved,) = documents(*uri, "tier", "run", "--local", "--until-idle")
    assert (moved["table"], moved["rows"]) == ("a.u", 1)
    assert documents(*uri, "tier", "run", "--local", "--until-idle") == []
    assert lakehead(*uri, "tier", "run", "--local", "--until-idle").stdout == b"nothing is left to move\n"
    wrong = lakehead(*uri, "tier", "run", "--local", "--table", "a.tt", "--table", "b.*", "--until-idle", code=2)
    assert b"there is no lake table a.tt and no b.*: see `lakehead status`" in b" ".join(wrong.stderr.split())
    wrong = lakehead(*uri, "tier", "run", "--local", "--table", "a.t", "--table", "a.tt", "--until-idle", code=2)
    assert b"there is no lake table a.tt: see" in b" ".join(wrong.stderr.split())


def test_a_table_that_exists_is_shown_as_it_is(tmp_path: Path) -> None:
    made = ("--uri", tmp_path / "data", "table", "create", "a.t", "--schema", "id bigint")
    lakehead(*made)
    (before,) = documents("--uri", tmp_path / "data", "table", "describe", "a.t")
    again = (*made, "--if-not-exists", "--lake", "iceberg", "--buckets", 4)
    assert lakehead(*again).stdout == b"kept a.t: log table, 1 bucket\n"
    assert documents(*again) == [before]
    made = ("--uri", tmp_path / "data", "table", "create", "a.u", "--schema", "id bigint", "--if-not-exists")
    assert lakehead(*made).stdout == b"created a.u: log table, 1 bucket\n"
    assert b"lakehead table describe a.u" in lakehead(*made[:-2], "id int", "--if-not-exists", code=2).stderr
    assert b"--if-not-exists" in lakehead(*made[:-1], code=2).stderr


def test_a_table_is_altered(tmp_path: Path) -> None:
    uri = ("--uri", tmp_path / "data")
    columns = "id bigint, units int not null, city string, old string, price decimal(8,2)"
    lakehead(*uri, "table", "create", "a.t", "--schema", columns, "--primary-key", "id")
    lakehead(*uri, "upsert", "a.t", stdin=b'{"id": 1, "units": 2, "city": "Oslo", "old": "x", "price": 1.5}\n')
    alter = (*uri, "table", "alter", "a.t")
    (now,) = documents(
        *(*alter, "--add", "city int, tags list<string>", "--add", "n:int", "--after", "id", "--nullable", "amount"),
        *("--rename", "city:town", "--rename", "units:amount", "--drop", "old", "--widen", "price decimal(12,2)"),
        *("--widen", "amount:bigint", "--set", "freshness=1s", "--set", "durability=os", "--reset", "durability"),
    )
    assert [(c["name"], c["type"], c["nullable"]) for c in now["columns"]] == [
        ("id", "int64", False),
        ("city", "int32", True),
        ("tags", "list<item: string>", True),
        ("n", "int32", True),
        ("amount", "int64", True),
        ("town", "string", True),
        ("price", "decimal128(12, 2)", True),
    ]
    assert (now["properties"]["freshness"], now["properties"]["durability"]) == ("1000ms", "sync")
    assert documents(*uri, "get", "a.t", "1") == [
        {"id": 1, "city": None, "tags": None, "n": None, "amount": 2, "town": "Oslo", "price": "1.50"}
    ]
    assert lakehead(*alter, "--drop", "n,tags").stdout == b"altered a.t: 5 columns\n"
    assert lakehead(*alter, "--set", "freshness=1s", "--nullable", "town").stdout == b"kept a.t: 5 columns\n"
    assert documents(*uri, "sql", "alter table a.t add column note varchar") == []
    assert lakehead(*uri, "sql", "alter table a.t drop column note").stdout
    added = ("--add", "fee decimal(5,2), on date", "--default", "fee=1.5", "--default", "on=2026-01-31")
    assert lakehead(*alter, *added).stdout == b"altered a.t: 7 columns\n"
    assert [(r["fee"], r["on"]) for r in documents(*uri, "get", "a.t", "1")] == [("1.50", "2026-01-31")]
    assert b"2026-01-31" in lakehead(*uri, "table", "describe", "a.t").stdout
    (last,) = documents(*uri, "table", "describe", "a.t")
    assert [c.get("default") for c in last["columns"][-2:]] == ["1.50", "2026-01-31"]
    for wrong, kind in {
        (): "InvalidRequestError",
        ("--after", "id"): "InvalidRequestError",
        ("--rename", "city"): "InvalidRequestError",
        ("--rename", "a:b:c"): "InvalidRequestError",
        ("--add", "x int", "--drop", "cty"): "ColumnNotFoundError",
        ("--add", "x int", "--widen", "amount int"): "InvalidSchemaError",
        ("--add", "x int not null"): "InvalidSchemaError",
        ("--add", "x integr"): "InvalidSchemaError",
        ("--add", "x int", "--default", "y=1"): "InvalidRequestError",
        ("--add", "x int", "--default", "x"): "InvalidRequestError",
        ("--add", "x int", "--default", "x=one"): "SchemaMismatchError",
        ("--add", "x tinyint", "--default", "x=300"): "InvalidSchemaError",
        ("--add", "x int", "--drop", "id"): "InvalidSchemaError",
        ("--add", "x int", "--set", "freshness"): "InvalidPropertyError",
        ("--add", "x int", "--reset", "freshnes"): "InvalidPropertyError",
    }.items():
        assert json.loads(lakehead(*alter, *wrong, "-o", "json", code=2).stderr)["error"]["kind"] == kind, wrong
    assert documents(*uri, "table", "describe", "a.t") == [last]


def test_a_lake_is_maintained_by_hand(tmp_path: Path) -> None:
    uri = ("--uri", tmp_path / "data")
    lakehead(*uri, "table", "create", "a.t", "--schema", "id bigint", "--lake", "iceberg")
    assert lakehead(*uri, "lake", "compact", "a.t").stdout == b"a.t: nothing to compact\n"
    for n in range(5):
        lakehead(*uri, "append", "a.t", stdin=b'{"id": %d}\n' % n)
        lakehead(*uri, "tier", "once", "a.t")
    (done,) = documents(*uri, "lake", "compact", "a.t")
    assert (done["rows"], done["files_before"], done["files_after"]) == (5, 5, 1)
    assert b"nothing to compact" in lakehead(*uri, "lake", "compact", "a.t").stdout
    assert b"0 snapshots expired" in lakehead(*uri, "lake", "expire", "a.t").stdout
    (expired,) = documents(*uri, "lake", "expire", "a.t", "--older-than", "0s", "--keep", 1)
    assert expired["snapshots"] == 5 and expired["files"] > 5
    assert b"keep" in lakehead(*uri, "lake", "expire", "a.t", "--keep", 0, code=2).stderr
    assert documents(*uri, "sql", "select count(*) n from a.t$lake") == [{"n": 5}]
    stray = next((tmp_path / "data" / "lake").rglob("*.parquet")).with_name("0" * 32 + ".parquet")
    stray.write_bytes(b"")
    (listed,) = documents(*uri, "lake", "orphans", "a.t", "--older-than", "0s", "--dry-run")
    assert [f["path"].endswith(stray.name) for f in listed["files"]] == [True] and stray.exists()
    assert b"1 orphan removed" in lakehead(*uri, "lake", "orphans", "a.t", "--older-than", "0s").stdout
    assert not stray.exists() and documents(*uri, "sql", "select count(*) n from a.t") == [{"n": 5}]


def scraped(url: str) -> dict[str, float]:
    """What an exporter says, by the metric's name and labels."""
    with urllib.request.urlopen(url, timeout=WAIT_SECONDS) as answer:
        lines = answer.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_metrics_of_a_server_and_of_a_service(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    with started(
        "server", "--data", tmp_path, "--listen", "127.0.0.1:0", "--tier", "--metrics", "127.0.0.1:0", "-o", "json"
    ) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        with lh.connect(told["uri"]) as con:
            table = con.create_table("a.t", pa.schema([("id", pa.int64())]), lake="iceberg", freshness="200ms")
            table.append([{"id": n} for n in range(3)])
            con.create_table("a.plain", pa.schema([("id", pa.int64())])).append([{"id": 1}])
            wait_until(lambda: 'lakehead_rounds_total{table="a.t"}' in scraped(told["metrics"]))
            found = scraped(told["metrics"])
        (job,) = [name for name in found if name.startswith("lakehead_tiering_job_tables")]
        assert found[job] == found["lakehead_up"] == 1
        assert found['lakehead_log_records_total{table="a.t"}'] == found['lakehead_round_rows_total{table="a.t"}'] == 3
        assert found['lakehead_rows{table="a.plain"}'] == 1 and found['lakehead_lake_lag_records{table="a.t"}'] == 0
        assert found['lakehead_last_round_seconds{phase="commit",table="a.t"}'] > 0
        assert found['lakehead_last_round_cpu_seconds{table="a.t"}'] > 0
        assert any(n.startswith("lakehead_tiering_job_memory_bytes") and v > 1 << 20 for n, v in found.items())
        assert found["process_resident_memory_bytes"] > 0 and not [n for n in found if "lag" in n and "plain" in n]
        with started("tier", "run", "--uri", told["uri"], "--local", "--metrics", "127.0.0.1:0") as service:
            assert service.stdout is not None
            url = service.stdout.readline().decode().split()[-1]
            wait_until(lambda: "process_cpu_seconds_total" in scraped(url))
    for address in ("9464", "127.0.0.1:x", "127.0.0.1:99999", "256.0.0.1:0"):
        assert b"--metrics" in lakehead("server", "--data", tmp_path / "x", "--metrics", address, code=2).stderr


def test_metrics_of_one_table_do_not_hang_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with lh.connect(tmp_path / "data") as con:
        for name in ("a.broken", "a.dropped", "a.t"):
            con.create_table(name, pa.schema([("id", pa.int64())])).append([{"id": 1}])
        (log,) = (tmp_path / "data").glob("tables/a.broken-*/**/*.log")
        names = con.tables()
        con.drop_table("a.dropped")
        monkeypatch.setattr(con, "tables", lambda: names)
        registry = new_registry()
        registry.register(ServerMetrics(con))

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"lakehead_{name}", labels)

        assert [value("table_up", table=t) for t in names] == [1, None, 1]
    log.write_bytes(b"x" * 100 + log.read_bytes()[100:])
    with lh.connect(tmp_path / "data") as con:
        registry = new_registry()
        registry.register(ServerMetrics(con))
        assert value("up") == 1 and value("rows", table="a.t") == 1
        assert [value("table_up", table=t) for t in ("a.broken", "a.t")] == [0, 1]
    assert value("up") == 0 and value("table_up", table="a.t") is None, "the server is away"


def test_a_server_that_tiers(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    with started("server", "--data", tmp_path, "--listen", "127.0.0.1:0", "--tier", "-o", "json") as process:
        assert process.stdout is not None and process.stderr is not None
        with lh.connect(json.loads(process.stdout.readline())["uri"]) as con:
            table = con.create_table("a.t", pa.schema([("id", pa.int64())]), lake="iceberg", freshness="200ms")
            for n in range(3):
                table.append([{"id": n}])
                wait_until(lambda: table.status()["lag_rows"].to_pylist() == [0])
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0 and process.stderr.read() == b""
    with lh.connect(tmp_path) as con:
        assert con.table("a.t").scan(tier="lake").count() == 3


def test_errors_in_the_middle_say_what_was_written(tmp_path: Path) -> None:
    uri = ("--uri", tmp_path / "data")
    lakehead(*uri, "table", "create", "a.t", "--schema", "id bigint")
    lines = b'{"id": 1}\n' * 20_000 + b'{"id": "x"}\n'
    done = lakehead(*uri, "append", "a.t", stdin=lines, code=2)
    assert b"(20000 rows before it were written)" in done.stderr and done.stderr.count(b"\n") == 1
    assert documents(*uri, "sql", "select count(*) n from a.t") == [{"n": 20_000}]


def test_wrong_calls_change_nothing_and_have_their_codes(tmp_path: Path) -> None:
    uri = ("--uri", tmp_path / "data")
    lakehead(*uri, "table", "create", "a.log", "--schema", "id bigint")
    lakehead(*uri, "table", "create", "a.keyed", "--schema", "id bigint, v string", "--primary-key", "id")
    cases: list[tuple[list[object], str]] = [
        (["table", "create", "a.log", "--schema", "id bigint"], "TableExistsError"),
        (["table", "create", "a.x", "--schema", "id bigit"], "InvalidSchemaError"),
        (["table", "create", "a.x", "--schema", "id bigint", "--buckets", "0"], "InvalidSchemaError"),
        (["table", "create", "a.x", "--schema", "id bigint", "--property", "durabilty=os"], "InvalidPropertyError"),
        (["table", "create", "a.x", "--schema", "id bigint", "--property", "durability"], "InvalidPropertyError"),
        (["table", "create", "a.x", "--schema", "id bigint", "--primary-key", "nope"], "InvalidSchemaError"),
        (["table", "describe", "a.nope"], "TableNotFoundError"),
        (["append", "a.keyed"], "WrongTableKindError"),
        (["upsert", "a.log"], "WrongTableKindError"),
        (["delete", "a.log"], "WrongTableKindError"),
        (["append", "a.log", tmp_path / "none.csv"], "InvalidFileError"),
        (["append", "a.log"], "InvalidFileError"),
        (["upsert", "a.keyed", "--columns", "id,nope", "-f", "csv"], "ColumnNotFoundError"),
        (["get", "a.log", "1"], "WrongTableKindError"),
        (["get", "a.keyed", "x"], "SchemaMismatchError"),
        (["get", "a.keyed", "1", "2"], "SchemaMismatchError"),
        (["tail", "a.log", "--start", "soon"], "InvalidRequestError"),
        (["tail", "a.log", "--limit", "0"], "InvalidRequestError"),
        (["tail", "a.log", "--columns", "nope"], "ColumnNotFoundError"),
        (["tail", "a.log", "--where", "nope > 1"], "InvalidPredicateError"),
        (["sql", "selec 1"], "SqlError"),
        (["sql", "select 'x'::int"], "SqlError"),
        (["tier", "once", "a.log"], "NoLakeError"),
    ]
    with lh.connect(tmp_path / "data") as con:
        for arguments, kind in cases:
            stdin = b"id,v\n1,a\n" if "--columns" in arguments else b""
            done = lakehead("--uri", con.uri, *arguments, "-o", "json", stdin=stdin, code=2)
            error = json.loads(done.stderr)["error"]
            assert error["kind"] == kind and len(error["message"]) > 10, (arguments, error)
        assert con.tables() == ["a.keyed", "a.log"]
        assert [con.table(t).scan().count() for t in con.tables()] == [0, 0]


@pytest.mark.parametrize("where", ["folder", "server"])
def test_ctrl_c_ends_tail_quietly(where: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    uri = request.getfixturevalue("server")[0] if where == "server" else str(tmp_path / "data")
    lakehead("table", "create", "a.t", "--schema", "id bigint", "--uri", uri)
    lakehead("append", "a.t", "--uri", uri, stdin=b'{"id": 1}\n')
    with started("tail", "a.t", "--start", "earliest", "--uri", uri) as process:
        assert process.stdout is not None and process.stderr is not None
        assert b"id=1" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_SECONDS) == 130
        assert (process.stdout.read(), process.stderr.read()) == (b"", b"")


def test_rows_are_pushed_to_tail(server: tuple[str, subprocess.Popen[bytes]]) -> None:
    uri, _ = server
    with lh.connect(uri) as con:
        table = con.create_table("a.t", pa.schema([("id", pa.int64())]))
        table.append([{"id": 1}])
        with started("tail", "a.t", "--start", "earliest", "-o", "json", "--uri", uri) as process:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["id"] == 1
            table.append([{"id": 2}])
            assert json.loads(process.stdout.readline())["id"] == 2
            process.terminate()


def test_a_broken_pipe_is_quiet(tmp_path: Path) -> None:
    uri = ("--uri", str(tmp_path / "data"))
    lakehead(*uri, "table", "create", "a.t", "--schema", "id bigint")
    with started(*uri, "sql", "select * from range(2000000)", "-o", "json") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(WAIT_SECONDS) == 141
        assert process.stderr.read() == b""


def test_a_process_of_its_own_reads_standard_input(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        table = con.create_table("a.t", pa.schema([("id", pa.int64())]))
        command = [*LAKEHEAD, "append", "a.t", "--uri", str(tmp_path)]
        done = subprocess.run(command, input=b"id\n1\n2\n", capture_output=True, timeout=WAIT_SECONDS, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"2 rows appended to a.t\n", b"")
        assert table.scan().count() == 2


def test_names_and_grants(server: tuple[str, subprocess.Popen[bytes]]) -> None:
    at = ("--uri", server[0])
    lakehead(*at, "table", "create", "shop.orders", "--schema", "id bigint")
    (made,) = documents(*at, "token", "create", "report", "--expires", "1h")
    token = lakehead(*at, "token", "create", "report").stdout.decode().strip()
    assert made["token"].startswith(f"lh_{made['id']}_") and token != made["token"]
    listed = documents(*at, "token", "list")
    assert [(t["principal"], t["expires"] is None) for t in listed] == [("report", False), ("report", True)]
    shown = lakehead(*at, "token", "list").stdout
    assert b"never" in shown and token.split("_", 2)[2].encode() not in shown
    assert lakehead(*at, "grant", "read, write", "shop.orders", "--to", "role:r").stdout.startswith(b"granted")
    lakehead(*at, "grant", "role:r", "--to", "report")
    assert documents(*at, "grant") == [
        {"to": "role:r", "on": "shop.orders", "privileges": ["read", "write"]},
        {"to": "report", "on": "role:r", "privileges": []},
    ]
    assert b"who may do all" in lakehead(*at, "whoami").stdout
    (me,) = documents(*at, "whoami", LAKEHEAD_TOKEN=token)
    assert (me["principal"], me["roles"], me["grants"][0]["on"]) == ("report", ["role:r"], "shop.orders")
    assert b"shop.orders" in lakehead(*at, "whoami", LAKEHEAD_TOKEN=token).stdout
    assert (
        b"no privilege to manage"
        in lakehead(*at, "table", "drop", "shop.orders", "--yes", code=2, LAKEHEAD_TOKEN=token).stderr
    )
    lakehead(*at, "revoke", "write", "shop.orders", "--from", "role:r", "-o", "json")
    assert documents(*at, "grant")[0]["privileges"] == ["read"]
    lakehead(*at, "token", "revoke", listed[1]["id"])
    assert b"refused the token" in lakehead(*at, "whoami", code=2, LAKEHEAD_TOKEN=token).stderr
    assert b"--to" in lakehead(*at, "grant", "read", "shop", code=2).stderr
    assert b"--from" in lakehead(*at, "revoke", "read", "shop", code=2).stderr


@pytest.mark.parametrize(
    ("query", "row"),
    [
        ("select 1 as a, 2 as a_2, 3 as a", {"a": 1, "a_2": 2, "a_3": 3}),
        ("select 1 as a, 2 as a, 3 as a_1, 4 as a", {"a": 1, "a_2": 2, "a_1": 3, "a_3": 4}),
        ("select 1 as a, 2 as a", {"a": 1, "a_1": 2}),
    ],
)
def test_columns_of_one_name_are_all_printed(tmp_path: Path, query: str, row: dict[str, int]) -> None:
    assert documents("--uri", tmp_path, "sql", query) == [row]
