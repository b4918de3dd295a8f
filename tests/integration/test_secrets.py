"""Tokens and the credentials of catalogs show in no repr, message, error or log: whatever holds them keeps them."""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api.embedded import serve
from lakehead.client.flight import FlightEndpoint
from lakehead.config import LakeConfig, ServerConfig
from lakehead.env.address import TcpAddress
from lakehead.iceberg.lake_catalog import LakeCatalog
from lakehead.protocol import messages as m
from lakehead.protocol.codec import AnyCall, answer_type

SECRET = "open-sesame"
CREDENTIALS = {
    "type": "sql",
    "uri": f"postgresql+psycopg2://user:{SECRET}@127.0.0.1:1/none",
    "warehouse": "s3://bucket",
    "s3.access-key-id": SECRET,
    "s3.secret-access-key": SECRET,
    "token": SECRET,
    "credential": f"client:{SECRET}",
}
KV = pa.schema([("k", pa.int64())])


def own(roots: list[object]) -> Iterator[object]:
    """Every object of Lakehead's classes that can be reached from these, whatever holds it."""
    seen: dict[int, object] = {}
    left = list(roots)
    while left:
        found = left.pop()
        if (
            id(found) in seen
            or isinstance(found, type)
            or type(found).__module__.split(".")[0] in ("threading", "_thread")
        ):
            continue
        seen[id(found)] = found
        ours = type(found).__module__.startswith("lakehead")
        if ours:
            yield found
        if ours or isinstance(found, dict | list | tuple | set | frozenset):
            left += gc.get_referents(found)


def test_nothing_that_is_held_shows_them(tmp_path: Path) -> None:
    lake = LakeConfig(
        catalog={"type": "sql", "uri": f"sqlite:///{tmp_path}/lake.db", "warehouse": f"file://{tmp_path}/w"}
    )
    lake.catalog["s3.secret-access-key"] = SECRET
    config = ServerConfig(token=SECRET, lake=lake)
    host = serve(tmp_path / "data", config)
    try:
        with lh.connect(host.uri, token=SECRET) as con:
            table = con.create_table("t", KV, lake="iceberg")
            table.append([{"k": 1}])
            con.tier("t")
            scan, feed, writer = table.scan(), table.subscribe("earliest"), table.writer("w")
            batch = next(feed)
            roots = [config, host, con, table, scan, feed, writer, batch, table.lake, LakeCatalog(lake, str(tmp_path))]
            shown = [(type(x).__name__, text) for x in own(roots) for text in (repr(x), str(x))]
            assert {"FlightServer", "Channel", "LakeConfig", "CatalogLakeState"} <= {name for name, _ in shown}
            assert not [name for name, text in shown if SECRET in text]
            feed.close()
    finally:
        host.close()
        host.wait_stopped(10)


def filled(kind: Any) -> Any:
    """A message whose every text is the secret, but for those that name things."""
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        if field.type == dict[str, str]:
            values[field.name] = {"token": SECRET}
        else:
            values[field.name] = field.default if field.default is not msgspec.NODEFAULT else None
    return kind(**values)


@pytest.mark.parametrize("call", get_args(AnyCall), ids=lambda c: c.__name__)
def test_no_message_shows_them(call: type[m.Request[Any]]) -> None:
    for kind in (call, answer_type(call)):
        assert SECRET not in repr(filled(kind)) + str(filled(kind))


def told(error: BaseException) -> str:
    context = str(error.context) if isinstance(error, lh.LakeheadError) else ""
    return "".join(traceback.format_exception(error)) + repr(error) + context


def test_no_error_and_no_log_tells_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    host = serve(tmp_path / "data", ServerConfig(token=SECRET))
    with pytest.raises(lh.AuthenticationError) as wrong:
        lh.connect(host.uri, token=f"{SECRET}-but-wrong")
    host.close()
    endpoint = FlightEndpoint(TcpAddress("127.0.0.1", host.port), token=SECRET)
    with pytest.raises(lh.UnavailableError) as gone:
        endpoint.call(m.Hello())
    endpoint.close()
    texts = [told(wrong.value), told(gone.value)]
    for broken in (
        CREDENTIALS,
        {**CREDENTIALS, "uri": f"no-such-engine://user:{SECRET}@host/none"},
        {"uri": f"odd://u:{SECRET}@host"},
    ):
        with lh.connect(tmp_path / "other", lake=LakeConfig(catalog=dict(broken))) as con:
            with pytest.raises(lh.LakeheadError) as failed:
                con.create_table("t", KV, lake="iceberg")
            texts.append(told(failed.value))
    assert not [text for text in (*texts, caplog.text) if SECRET in text]
