"""A server with TLS, as clients of a network, this user's own processes and Spark's workers reach it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Authority
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from lakehead.api import connection
from lakehead.api.embedded import serve
from lakehead.client import patience
from lakehead.config import ServerConfig
from lakehead.protocol.grants import WhoAmI
from lakehead.server.host import ServerHost
from lakehead.spark import connections

ROWS = [{"k": 1}, {"k": 2}]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> tuple[Path, Path]:
    return authority.signed("server", "DNS:localhost", "DNS:lake.test")


@contextmanager
def served(
    folder: Path, certificate: tuple[Path, Path], client_ca: Path | None = None, port: int | None = 0
) -> Iterator[ServerHost]:
    cert, key = map(str, certificate)
    assert port is not None
    config = ServerConfig(token="t", port=port, tls_cert=cert, tls_key=key, tls_client_ca=client_ca and str(client_ca))
    host = serve(folder, config)
    try:
        yield host
    finally:
        host.close()
        assert host.wait_stopped(10)


def named(host: ServerHost) -> str:
    return f"lakehead://localhost:{host.port}"


def test_rows_go_through_tls(tmp_path: Path, authority: Authority, certificate: tuple[Path, Path]) -> None:
    with served(tmp_path / "data", certificate) as host:
        with lh.connect(named(host), token="t", tls_ca=authority.ca) as con:
            table = con.create_table("a.t", [("k", "int64")])
            table.append(ROWS)
            assert table.scan().count() == 2
            assert [r["k"] for r in next(iter(table.subscribe("earliest"))).rows.to_pylist()] == [1, 2]
        with pytest.raises(lh.AuthenticationError):
            lh.connect(named(host), token="another", tls_ca=authority.ca)
        with lh.connect(named(host), tls_ca=authority.ca) as found:  # this user's token, in this user's file
            assert found.tables() == ["a.t"]


def test_who_speaks_another_language_is_told(
    tmp_path: Path, authority: Authority, certificate: tuple[Path, Path]
) -> None:
    other = Authority(tmp_path / "other")
    with served(tmp_path / "data", certificate) as host:
        with pytest.raises(lh.UnavailableError, match="tls_ca="):
            lh.connect(named(host), token="t")
        with pytest.raises(lh.UnavailableError, match="tls_ca= signed"):
            lh.connect(named(host), token="t", tls_ca=other.ca)
        with pytest.raises(lh.UnavailableError, match="tls_ca= signed"):
            lh.connect(f"lakehead://127.0.0.1:{host.port}", token="t", tls_ca=authority.ca)  # no name of its own
        with pytest.raises(lh.InvalidPropertyError, match="speaks no TLS"):
            lh.connect(host.local_uri, token="t", tls_ca=authority.ca)


def test_this_users_processes_find_a_folder_that_is_served_with_tls(
    tmp_path: Path, certificate: tuple[Path, Path], authority: Authority
) -> None:
    with served(tmp_path / "data", certificate, client_ca=authority.ca) as host:
        assert host.local_uri.startswith("lakehead:///") and host.local_uri != host.uri
        with lh.connect(tmp_path / "data") as attached:
            attached.create_table("a.t", [("k", "int64")]).append(ROWS)
            assert attached.uri == host.local_uri
        with lh.connect(host.local_uri) as con:
            assert con.table("a.t").scan().count() == 2
        with pytest.raises(lh.AuthenticationError):
            lh.connect(host.local_uri, token="another")


def test_clients_without_a_certificate_are_not_served(
    tmp_path: Path, authority: Authority, certificate: tuple[Path, Path]
) -> None:
    cert, key = authority.signed("me", "URI:spiffe://lake.test/me")
    strangers = Authority(tmp_path / "strangers").signed("stranger", "URI:spiffe://lake.test/me")
    with served(tmp_path / "data", certificate, client_ca=authority.ca) as host:
        trusted: dict[str, Any] = {"token": "t", "tls_ca": authority.ca}
        with lh.connect(named(host), **trusted, tls_cert=cert, tls_key=key) as con:
            assert con.tables() == []
        with pytest.raises(lh.UnavailableError, match="tls_cert="):
            lh.connect(named(host), **trusted)
        with pytest.raises(lh.UnavailableError, match="is tls_cert= signed by an authority that it trusts"):
            lh.connect(named(host), **trusted, tls_cert=strangers[0], tls_key=strangers[1])


def test_what_has_expired_is_told(tmp_path: Path, authority: Authority) -> None:
    with (
        served(tmp_path / "data", authority.signed("old", "DNS:localhost", days=-1)) as host,
        pytest.raises(lh.UnavailableError, match=r"a certificate that has not expired\?.*certificate has expired\)"),
    ):
        lh.connect(named(host), token="t", tls_ca=authority.ca)


def installed(folder: Path, authority: Authority) -> dict[str, Path]:
    """Files that somebody renews: of an authority, and of a certificate that it signed for both sides, with its key."""
    folder.mkdir(exist_ok=True)
    made = (authority.ca, *authority.signed("both", "URI:spiffe://lake.test/me", "DNS:localhost"))
    there = {name: folder / f"{name}.pem" for name in ("tls_ca", "tls_cert", "tls_key")}
    for path, file in zip(there.values(), made, strict=True):
        path.write_bytes(file.read_bytes())
        path.chmod(0o600)
    return there


def test_clients_come_with_the_certificates_that_there_are_now(tmp_path: Path, authority: Authority) -> None:
    """A stream and a writer go on when all certificates were renewed, by another authority, while the server was away;
    also where the new files are not all there yet when it is back."""
    mine = installed(tmp_path / "mine", authority)
    with (
        served(tmp_path / "data", (mine["tls_cert"], mine["tls_key"]), mine["tls_ca"]) as host,
        lh.connect(host.local_uri) as owner,
    ):
        owner.create_table("a.t", [("k", "int64")])
        owner.grant("read,write", "a", to="spiffe://lake.test/me")
        port = host.port
        con = lh.connect(named(host), **mine)
        table = con.table("a.t")
        table.append([{"k": 1}])
        feed = iter(table.subscribe("earliest"))
        assert next(feed).rows["k"].to_pylist() == [1]
    renewed = installed(tmp_path / "renewed", Authority(tmp_path / "other", "other"))
    mine["tls_key"].write_bytes(renewed["tls_key"].read_bytes())  # of another certificate than is there
    with served(tmp_path / "data", (renewed["tls_cert"], renewed["tls_key"]), renewed["tls_ca"], port) as host:
        with pytest.raises(lh.UnavailableError, match="tls_ca= signed"):
            con._server.call(WhoAmI())
        for name in ("tls_cert", "tls_ca"):
            mine[name].write_bytes(renewed[name].read_bytes())
        table.append([{"k": 2}])
        assert next(feed).rows["k"].to_pylist() == [2]
        feed.close()
        con.close()


def test_certificates_that_cannot_be_are_refused_before_anything_listens(
    tmp_path: Path, authority: Authority, certificate: tuple[Path, Path]
) -> None:
    cert, key = map(str, certificate)
    other = str(authority.signed("other", "DNS:other")[1])
    (tmp_path / "open.key").write_text(Path(key).read_text())
    (tmp_path / "open.key").chmod(0o644)
    (tmp_path / "empty.pem").write_text("nothing")
    for config, words in [
        (ServerConfig(tls_cert=cert, tls_key=other), "is not the key"),
        (ServerConfig(tls_cert=cert, tls_key=str(tmp_path / "open.key")), "chmod 600"),
        (ServerConfig(tls_cert=str(tmp_path / "none.pem"), tls_key=key), "No such file"),
        (ServerConfig(tls_cert=str(tmp_path / "empty.pem"), tls_key=key), "is not the key"),
        (ServerConfig(tls_cert=cert, tls_key=key, tls_client_ca=str(tmp_path / "empty.pem")), "no certificates"),
    ]:
        with pytest.raises(lh.InvalidPropertyError, match=words):
            serve(tmp_path / "data", config)
    uri = "lakehead://localhost:1"
    for how, words in [
        ({"tls_ca": tmp_path / "empty.pem"}, "no certificates"),
        ({"tls_ca": tmp_path / "none.pem"}, "No such file"),
        ({"tls_cert": cert, "tls_key": key}, "tls_ca"),
        ({"tls_ca": authority.ca, "tls_cert": cert}, "belong together"),
        ({"tls_ca": authority.ca, "tls_cert": cert, "tls_key": other}, "is not the key"),
    ]:
        with pytest.raises(lh.InvalidPropertyError, match=words):
            lh.connect(uri, **how)  # type: ignore[arg-type]
    serve(tmp_path / "data", ServerConfig()).close()  # nobody holds the folder


def test_sparks_workers_get_what_the_driver_was_given(
    tmp_path: Path, authority: Authority, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Context:
        applicationId = "an application"
        master = "local"
        environment: dict[str, str] = {}  # noqa: RUF012

    class Session:
        sparkContext = Context()

    cert, key = authority.signed("spark", "URI:spiffe://lake.test/spark")
    with served(tmp_path / "data", certificate, client_ca=authority.ca) as host:
        with lh.connect(named(host), token="t", tls_ca=authority.ca, tls_cert=cert, tls_key=key) as con:
            connections.tell_workers(Session(), con)  # type: ignore[arg-type]
            con.create_table("a.t", [("k", "int64")]).append(ROWS)
        for name, value in Context.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HOME", str(tmp_path))  # where no token is found
        with connections._connected(named(host)) as worker:
            assert worker.table("a.t").scan().count() == 2


def test_sparks_workers_of_nobodys_session_get_what_their_environment_says_of_one_address(
    tmp_path: Path, authority: Authority, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions of Spark Connect and plain ones, which made no connection, and a token that must not go elsewhere."""
    cert, key = authority.signed("spark", "URI:spiffe://lake.test/spark")
    with served(tmp_path / "data", certificate, client_ca=authority.ca) as host:
        given = {"TOKEN": "t", "TLS_CA": authority.ca, "TLS_CERT": cert, "TLS_KEY": key, "URI": named(host)}
        for name, value in given.items():
            monkeypatch.setenv(f"LAKEHEAD_{name}", str(value))
        monkeypatch.setenv("HOME", str(tmp_path))  # where no token is found
        with connections._connected(named(host)) as worker:
            worker.create_table("a.t", [("k", "int64")]).append(ROWS)
            done = subprocess.run([sys.executable, "-m", "lakehead.cli.main", "table", "list"], capture_output=True)
            assert done.returncode == 0 and b"a.t" in done.stdout, done.stderr
        assert connection.presented(f"lakehead://127.0.0.1:{host.port}", os.environ) == connection.presented(
            f"lakehead://LOCALHOST:{host.port}", os.environ
        )
        assert connection.presented(f"lakehead://127.0.0.2:{host.port}", os.environ) == {}
        assert connection.presented(str(tmp_path), {"LAKEHEAD_URI": str(tmp_path), "LAKEHEAD_TOKEN": "t"}) == {}


def test_the_command_line_speaks_tls(
    tmp_path: Path, authority: Authority, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PATIENCE_SECONDS", 0.5)
    cert, key = authority.signed("cli", "URI:spiffe://lake.test/cli")
    lakehead = [sys.executable, "-m", "lakehead.cli.main"]
    own = ["--tls-cert", certificate[0], "--tls-key", certificate[1], "--tls-client-ca", authority.ca]
    listen = ["--listen", "0.0.0.0:0", "--tier", "-o", "json"]
    with subprocess.Popen(
        [*lakehead, "server", "--data", tmp_path / "data", *own, *listen], stdout=subprocess.PIPE
    ) as server:
        try:
            assert server.stdout is not None
            port = json.loads(server.stdout.readline())["uri"].rpartition(":")[2]
            with lh.connect(tmp_path / "data") as owner:
                owner.create_table("a.t", [("k", "int64")])
                owner.grant("describe", "a", to="spiffe://lake.test/cli")
            tls = ["--tls-ca", authority.ca, "--tls-cert", cert, "--tls-key", key]
            uri = ["--uri", f"lakehead://localhost:{port}"]
            done = subprocess.run([*lakehead, *tls, *uri, "table", "list"], capture_output=True, check=True)
            assert b"a.t" in done.stdout
        finally:
            server.terminate()
        assert server.wait(WAIT_SECONDS) == 0
    assert os.listdir(tmp_path / "data")


@pytest.mark.spark
def test_spark_reads_and_writes_through_tls_as_a_principal(
    tmp_path: Path, authority: Authority, certificate: tuple[Path, Path]
) -> None:
    import lakehead.spark as lhs

    cert, key = authority.signed("job", "URI:spiffe://lake.test/job")
    with served(tmp_path / "data", certificate, client_ca=authority.ca) as host:
        with lh.connect(tmp_path / "data") as owner:
            for name in ("a.t", "a.hidden"):
                owner.create_table(name, [("k", "int64")], lake="iceberg").append(ROWS)
            owner.grant("read, write", "a.t", to="spiffe://lake.test/job")
        with lh.connect(named(host), tls_ca=authority.ca, tls_cert=cert, tls_key=key) as con:
            spark = lhs.session(con)
            assert lhs.table(spark, "a.t").count() == 2
            spark.range(10, 13).toDF("k").write.format("lakehead").options(uri=con.uri, table="a.t").mode(
                "append"
            ).save()
            assert sorted(r.k for r in lhs.table(spark, "a.t").collect()) == [1, 2, 10, 11, 12]
            with pytest.raises(Exception, match="no privilege to describe"):
                lhs.table(spark, "a.hidden").count()
