"""Options of the data source, for batches and for streams."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

import pytest

from lakehead.api.table_names import Suffix
from lakehead.errors import InvalidPropertyError, SqlError
from lakehead.spark.options import ReadOptions
from lakehead.spark.sink import WriteOptions
from lakehead.types import TabletKey

B = TabletKey("", 1)


def parsed(table: str = "a.t", **options: str) -> ReadOptions:
    return ReadOptions.parse({"uri": "lakehead://u:1", "table": table, **options})


def test_options() -> None:
    got = ReadOptions.parse({"URI": "lakehead://h:1", "Table": "a.b", "columns": "x, y", "snapshot": "7"})
    assert (got.columns, got.tier, got.snapshot, got.ranges) == (("x", "y"), "union", 7, None)
    assert ReadOptions.parse({"uri": "lakehead://u:1", "table": "t", "columns": '["a, b"]'}).columns == ("a, b",)
    assert (parsed(where="x = 1").where, parsed().where) == ("x = 1", None)
    assert ReadOptions.parse({"uri": "lakehead://u:1", "table": "t", "ranges": '{"/1": [3, 5]}'}).ranges == {B: (3, 5)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"table": "t"}, "con.uri"),
        ({"uri": "lakehead://u:1"}, "db.table"),
        ({"uri": "nonsense", "table": "t"}, "con.uri is one"),
        ({"uri": "./data", "table": "t"}, "not a server address"),
        ({"uri": "lakehead://u:1", "table": "t", "tiers": "hot"}, "'tier'"),
        ({"uri": "lakehead://u:1", "table": "t", "tier": "warm"}, "'union', 'hot' or 'lake'"),
        ({"uri": "lakehead://u:1", "table": "t", "snapshot": "last"}, "lake snapshot"),
    ],
)
def test_bad_options(options: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidPropertyError, match=words):
        ReadOptions.parse(options)


@pytest.mark.parametrize("name", ["path", "Path", "paths"])
@pytest.mark.parametrize("parse", [ReadOptions.parse, WriteOptions.parse])
def test_a_path_is_not_how_a_table_is_named(parse: Callable[[dict[str, str]], object], name: str) -> None:
    """``load("a.t")``, ``save("a.t")`` and ``start("a.t")`` become such options."""
    with pytest.raises(InvalidPropertyError, match=r"name the table with \.option\('table', 'db\.table'\)"):
        parse({"uri": "lakehead://u:1", name: "a.t"})


def test_names_say_what_is_read() -> None:
    assert parsed("a.t").suffix is None
    assert (parsed("a.t$lake").tier, parsed("a.t$LAKE").table) == ("lake", "a.t")
    assert parsed("a.t$lake$files").suffix is Suffix.FILES
    assert parsed("a.t$changelog").changelog and parsed(changelog="true").changelog
    assert not parsed(changelog="False").changelog
    with pytest.raises(SqlError, match="no such suffix"):
        parsed("a.t$lakes")
    for table, options in (("a.t$lake", {"changelog": "true"}), ("a.t$changelog", {"changelog": "false"})):
        with pytest.raises(InvalidPropertyError, match="contradicts the name"):
            parsed(table, **options)
    with pytest.raises(InvalidPropertyError, match="contradicts the name"):
        parsed("a.t$lake", tier="hot")


def test_times() -> None:
    noon = dt.datetime(2026, 5, 1, 12, tzinfo=dt.UTC)
    assert parsed(timestamp="2026-05-01T12:00:00Z").snapshot == noon
    assert parsed(timestamp=str(int(noon.timestamp() * 1000))).snapshot == noon
    assert parsed(start="2026-05-01 14:00:00+02:00").start == noon
    for name in ("timestamp", "start"):
        for bad in ("2026-05-01T12:00:00", "yesterday", "9" * 30):
            with pytest.raises(InvalidPropertyError, match="a time with a zone"):
                parsed(**{name: bad})
    with pytest.raises(InvalidPropertyError, match="give one"):
        parsed(timestamp="0", snapshot="1")


def test_where_a_stream_starts() -> None:
    assert parsed().start == "latest" and parsed(start="Earliest").start == "earliest"
    assert parsed(start='{"1": 7, "day=2026-05-01/0": 3}').start == {B: 7, TabletKey("day=2026-05-01", 0): 3}
    for bad in ('{"1": -7}', '{"1": "x"}', '{"one": 1}', "{1: 2}"):
        with pytest.raises(InvalidPropertyError, match="offsets per tablet"):
            parsed(start=bad)


def test_limits() -> None:
    options = parsed(max_rows_per_trigger="10", max_bytes_per_trigger="7")
    assert (options.max_rows, options.max_bytes) == (10, 7)
    for bad in ("0", "-1", "many"):
        with pytest.raises(InvalidPropertyError, match="positive number"):
            parsed(max_rows_per_trigger=bad)


def test_each_kind_of_read_has_options_of_its_own() -> None:
    parsed(snapshot="1").require_batch()
    parsed(start="full", changelog="true").require_stream(limited=True)
    with pytest.raises(InvalidPropertyError, match=r"start is for spark\.readStream, not for spark\.read"):
        parsed(start="full").require_batch()
    with pytest.raises(InvalidPropertyError, match=r"snapshot is for spark\.read, not for spark\.readStream"):
        parsed(snapshot="1").require_stream(limited=True)
    with pytest.raises(InvalidPropertyError, match="as a stream"):
        parsed("a.t$lake").require_stream(limited=True)
    with pytest.raises(InvalidPropertyError, match=r"not for \$changelog"):
        parsed("a.t$changelog", snapshot="1").require_batch()
