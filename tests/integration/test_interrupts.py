"""Ctrl-C in an embedded process, at every line of a call: tables stay usable, and nothing is lost or written twice.

A tracer sends the main thread an interrupt at the first line of a call, then at the second, and so on, until the call
comes through. So every place is met where a signal could land, and a few where none can.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pyarrow as pa
import pytest
from tests.interrupting import interrupted
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from lakehead.api.relation import Reading
from lakehead.client.lookups import Lookups
from lakehead.env.interrupts import Latch

pytestmark = pytest.mark.timeout(method="thread")
"""A time limit by SIGALRM would itself be a signal whose handler raises."""

KV = pa.schema([("k", pa.int64()), ("v", pa.int64())])
TRACED = tuple(f"/lakehead/{layer}/" for layer in ("api", "client", "server", "env"))
TRACED += ("/threading.py", "/contextlib.py", "/queue.py")
"""Where there are threads, locks and handles; the layers below hold nothing."""
LINES_MAX = 3000


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """As in a terminal: a shell's background job begins with interrupts ignored, and Spark's driver takes them."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual or signal.SIG_DFL)


@cache
def _entry(code: CodeType, line: int) -> int:
    return min(start for start, _, at in code.co_lines() if at == line)


@cache
def _withs(code: CodeType) -> frozenset[int]:
    import linecache

    lines = {at for _, _, at in code.co_lines() if at}
    return frozenset(n for n in lines if linecache.getline(code.co_filename, n).lstrip().startswith("with "))


@cache
def _traced(code: CodeType) -> bool:
    return any(part in code.co_filename for part in TRACED) and "/tests/" not in code.co_filename


class InterruptAt:
    """Interrupts at the n-th line that the main thread runs inside."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __enter__(self) -> None:
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if _traced(frame.f_code) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event != "line" or self.left <= 0:
            return self._line
        if frame.f_code is threading.Condition.wait.__code__:
            return self._line  # Python itself loses its lock where it is interrupted in there
        # Leaving a with-block is a line again, before the lock is given back; no signal is looked at there.
        if frame.f_lineno in _withs(frame.f_code) and frame.f_lasti != _entry(frame.f_code, frame.f_lineno):
            return self._line
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)
        return self._line


def at_every_line(call: Callable[[int], Any], after: Callable[[int, bool], None], *, every: int = 1) -> int:
    """Call, interrupted at the n-th line (of which only some, if not ``every`` one, are met), then ``after(n, came
    through)``, with n = 1, 2, ...; returns how often it was called."""
    assert threading.current_thread() is threading.main_thread(), "only there an interrupt lands"
    through = 0
    for n in range(1, LINES_MAX):
        interrupt, landed = InterruptAt((n - 1) * every + 1), False
        try:
            with interrupt:
                call(n)
        except KeyboardInterrupt:
            landed = True
        sys.settrace(None)
        after(n, not landed)
        through = through + 1 if interrupt.left > 0 else 0
        if through == 2:
            return n
    raise AssertionError(f"the call has more than {LINES_MAX} lines")


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    """An embedded connection that must close in bounded time, too."""
    con = lh.connect(tmp_path)
    yield con
    bounded(con.close)


def bounded(call: Callable[[], Any]) -> Any:
    """The call by a thread that no interrupt reaches: it must come back."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(WAIT_SECONDS)


def test_appends(con: lh.Connection) -> None:
    table = con.create_table("t", KV, durability="os", buckets=2)
    acked: set[int] = set()

    def after(n: int, through: bool) -> None:
        acked.update([n] if through else [])
        bounded(lambda: table.append([{"k": -n, "v": 0}]))

    lines = at_every_line(lambda n: table.append([{"k": n, "v": n}]), after)
    assert lines > 100
    found = Counter(table.scan(["k"]).to_arrow()["k"].to_pylist())
    assert set(found.values()) == {1}
    assert {k for k in found if k < 0} == {-n for n in range(1, lines + 1)} and acked <= set(found)


def test_keyed_writes_and_lookups(con: lh.Connection) -> None:
    table = con.create_table("t", KV, primary_key="k", durability="os")

    def write(n: int) -> None:
        table.upsert([{"k": 0, "v": n}])
        table.get(0)
        table.delete([0])

    def after(n: int, through: bool) -> None:
        bounded(lambda: table.upsert([{"k": n, "v": n}]))
        assert bounded(lambda: table.get(n)) == {"k": n, "v": n}
        assert not through or table.get(0) is None

    lines = at_every_line(write, after)
    bounded(lambda: table.delete([0]))
    assert table.scan().count() == lines


def test_writers(con: lh.Connection) -> None:
    table = con.create_table("t", KV, durability="os")

    def write(n: int) -> None:
        with table.writer("etl") as writer:
            writer.append([{"k": n, "v": writer.last_sequence + 1}])
            writer.flush()

    def after(n: int, through: bool) -> None:
        with table.writer("etl") as writer:
            bounded(lambda: writer.append([{"k": -n, "v": writer.last_sequence + 1}]))

    lines = at_every_line(write, after, every=3)
    rows = table.scan().to_arrow().to_pylist()
    assert sorted(r["v"] for r in rows) == list(range(len(rows))), "each number once, none left out"
    assert {r["k"] for r in rows if r["k"] < 0} == {-n for n in range(1, lines + 1)}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt inside of a __del__
def test_reads_and_subscriptions(con: lh.Connection) -> None:
    table = con.create_table("t", KV, primary_key="k", durability="os")
    table.upsert([{"k": k, "v": k} for k in range(10)])

    def read(n: int) -> None:
        assert table.scan().count() >= 10
        with table.subscribe("full") as feed:
            next(feed)

    def after(n: int, through: bool) -> None:
        bounded(lambda: table.upsert([{"k": 100, "v": n}]))

    at_every_line(read, after, every=23)


def test_opening_and_closing(tmp_path: Path) -> None:
    def after(n: int, through: bool) -> None:
        def write() -> None:
            with lh.connect(tmp_path / "db") as con:
                table = con.create_table("t", KV, if_not_exists=True, durability="os")
                table.append([{"k": n, "v": n}])

        bounded(write)

    def connect(n: int) -> None:
        with lh.connect(tmp_path / "db") as con:
            con.tables()

    lines = at_every_line(connect, after, every=2)
    with lh.connect(tmp_path / "db") as con:
        assert con._folder is not None, "nobody else in this process still serves the folder"
        assert sorted(con.table("t").scan(["k"]).to_arrow()["k"].to_pylist()) == list(range(1, lines + 1))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt inside of a __del__
@pytest.mark.parametrize("keyed", [False, True])
def test_real_signals(con: lh.Connection, keyed: bool) -> None:
    table = con.create_table("t", KV, primary_key="k" if keyed else None, durability="os")
    write = table.upsert if keyed else table.append
    draws, acked = random.Random(7), []
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for n in range(400):
            try:
                signal.setitimer(signal.ITIMER_REAL, draws.uniform(0.00005, 0.001))
                write([{"k": n, "v": n}])
                signal.setitimer(signal.ITIMER_REAL, 0)
                acked.append(n)
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    bounded(lambda: write([{"k": -1, "v": 0}]))
    found = Counter(table.scan(["k"]).to_arrow()["k"].to_pylist())
    assert set(found.values()) == {1} and {*acked, -1} <= set(found)


LONG = "select sum(a.range * b.range) as s from t, range(10000000) a, range(1000000) b"
"""Takes hours."""
FETCHES: dict[str, Callable[[Any], object]] = {
    "fetchone": lambda r: r.fetchone(),
    "fetchmany": lambda r: r.fetchmany(10),
    "fetchall": lambda r: r.fetchall(),
    "df": lambda r: r.df(),
    "pl": lambda r: r.pl(),
    "to_arrow_table": lambda r: r.to_arrow_table(),
    "to_arrow_reader": lambda r: r.to_arrow_reader().read_all(),
    "the C interface": lambda r: pa.table(r),
    "shape": lambda r: r.shape,
    "len": lambda r: len(r),
    "execute": lambda r: r.execute(),
}


def interrupted_in_duckdb(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a call, and interrupt it once it is in DuckDB."""
    begun, usual = Latch(), Reading._pushing_less

    def run(*given: Any) -> Any:
        begun.open()
        return usual(*given)

    monkeypatch.setattr(Reading, "_pushing_less", run)
    interrupted(call, begun)
    monkeypatch.undo()


def statement_with_others(con: lh.Connection) -> tuple[Any, Callable[[], None]]:
    """A long statement, and what sees that it alone was ended."""
    con.create_table("t", KV, durability="os").append([{"k": k, "v": k} for k in range(5000)])
    other, long = con.sql("select k from t order by k"), con.sql(LONG)
    assert other.fetchone() == (0,)

    def after() -> None:
        assert other.fetchall() == [(k,) for k in range(1, 5000)]
        assert con.sql("select count(*) from t").fetchall() == [(5000,)]
        assert long.columns == ["s"]

    return long, after


@pytest.mark.parametrize("fetch", FETCHES)
def test_long_statements_end_and_nothing_else_does(
    con: lh.Connection, fetch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, after = statement_with_others(con)
    for _ in range(2):
        interrupted_in_duckdb(lambda: FETCHES[fetch](long), monkeypatch)
    after()


def test_long_statements_with_parameters_end(con: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    _, after = statement_with_others(con)
    interrupted_in_duckdb(lambda: con.sql(LONG + " where k >= $k", params={"k": 0}), monkeypatch)
    after()


BY_KEY = "select unnest(range(1000000000000)) from keyed where k = 3"
"""Its one row is found at once; what is made of it takes hours."""


def test_long_statements_by_key_end(con: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    _, after = statement_with_others(con)
    con.create_table("keyed", KV, primary_key="k").upsert([{"k": 3, "v": 3}])
    for _ in range(2):
        interrupted_in_duckdb(lambda: con.sql(BY_KEY), monkeypatch)
    assert con.sql("select v from keyed where k = 3").fetchall() == [(3,)]
    after()


def test_a_statement_that_asks_for_a_key_is_left_at_once(con: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not computed once the key has come."""
    con.create_table("keyed", KV, primary_key="k").upsert([{"k": 3, "v": 3}])
    asked, answer, left, row, runs = Latch(), Latch(), Latch(), Lookups.row, list[object]()

    def slow(lookups: Lookups, key: Any) -> Any:
        asked.open()
        assert answer.wait(WAIT_SECONDS)
        return row(lookups, key)

    def unless_stopped(*given: Any) -> Any:
        try:
            return usual(*given)
        finally:
            left.open()

    usual = Reading._unless_stopped
    monkeypatch.setattr(Lookups, "row", slow)
    monkeypatch.setattr(Reading, "_unless_stopped", unless_stopped)
    monkeypatch.setattr(Reading, "_pushing_less", lambda *given: runs.append(given))

    interrupted(lambda: con.sql(BY_KEY), asked)
    answer.open()
    assert left.wait(WAIT_SECONDS) and not runs
