"""`Relation`: what `Connection.sql` answers with, a DuckDB relation whose errors are Lakehead's."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import duckdb
import pyarrow as pa

from lakehead.api.display import THIS_PROCESS
from lakehead.api.pushdown import MEANT_OTHERWISE
from lakehead.api.sandbox import OTHERWISE
from lakehead.env.forks import keep_in_children
from lakehead.env.interrupts import stoppable
from lakehead.errors import ClosedError, InvalidRequestError, LakeheadError, MissingDependencyError, SqlError

T = TypeVar("T")

_WRITES = ("write_parquet", "to_parquet", "write_csv", "to_csv")

_CREATES = ("create", "to_table", "create_view", "to_view", "insert_into", "insert", "update")
"""What changes a DuckDB database."""

_PIECEWISE = ("fetchone", "fetchmany", "fetch_df_chunk")
"""Each call of these answers with the next rows of one run."""

_UNMADE = "pyarrow.lib.check_status"
"""What errors name that DuckDB met while it made a filter for Arrow: Python has no datetime for some of its values."""

_UNABLE = re.compile(r"Pushdown Filter|Unsupported comparison type .* for NaN")
"""What it says of conditions that it would push down and cannot make for Arrow."""

_HERE = ("show",)
"""What writes to the caller's output, which notebooks tell apart by thread; DuckDB itself looks for interrupts then."""

INTERRUPTED = "Query interrupted"
"""DuckDB's words for Ctrl-C."""

_ENDED = re.compile(rf"^INTERRUPT Error|{INTERRUPTED}")
"""Its words for what another thread has ended."""

_MET_BY_ROWS = re.compile(r"(?:\A|Python exception: .*^)KeyboardInterrupt", re.DOTALL | re.MULTILINE)

_PLANS_LESS = threading.RLock()


def require_uninterrupted(e: Exception) -> None:
    """Raise the interrupt that came while DuckDB worked, or read rows from Python: it has an error of its own."""
    told = str(e)
    if _MET_BY_ROWS.search(told) or (isinstance(e, RuntimeError) and INTERRUPTED in told):  # other errors tell values
        raise KeyboardInterrupt from e


class Reading:
    """What one statement holds while it is read, and why a read of it failed.

    Attributes:
        held: kept alive as long as anything of the statement is: its cursor, its pins.
    """

    def __init__(self, held: duckdb.DuckDBPyConnection, engine: object = None, *, closed: bool = False) -> None:
        """``closed``: nothing is to run, as the connection was closed before."""
        self.held = held
        self._engine = engine  # whose folder the statement spills to
        self._kept: list[object] = []
        self._failures: list[LakeheadError] = []
        self._less = False  # runs without push-down
        self._turn = threading.RLock()  # of DuckDB's own two calls would wait for each other, or end the process
        self._runs = self._stopped = False
        self._closed = self._refuses = closed
        keep_in_children(self)

    def keep(self, rows: object) -> None:
        """Keep what a view reads, which DuckDB knows by its address alone."""
        self._kept.append(rows)

    def noted(self, read: Callable[..., Iterator[T]]) -> Callable[..., Iterator[T]]:
        """The same, noting what is raised: DuckDB hands on its text only.

        It does not hold this, which holds the cursor: DuckDB holds what its views read, where no collector sees it, and
        neither would ever be let go of.
        """
        failures = self._failures

        @functools.wraps(read)
        def reading(*args: Any) -> Iterator[T]:
            try:
                yield from read(*args)
            except LakeheadError as e:
                failures.append(e)
                raise

        return reading

    def run(self, call: Callable[[], T], again: Callable[[], T] | None = None, *, here: bool = False) -> T:
        """Call into DuckDB, one call after the other, where Ctrl-C ends it: in most calls it looks at no signals.

        Args:
            again: what to call when the call cannot be answered with conditions pushed down; None: nothing, as the
                caller has rows of this run already.
            here: in the thread of the caller, whatever it is.

        Raises:
            LakeheadError: what a read of a table raised; else, for DuckDB's own errors:
            SqlError: in DuckDB's words.
            MissingDependencyError: rows were wanted in the form of a package that is not installed.
            ClosedError: the connection was closed meanwhile.
            KeyboardInterrupt: the call was ended by it; or DuckDB met one, and calls it an error of its own.
        """
        with self._turn:
            return self._run(call, again, here=here)

    def _run(self, call: Callable[[], T], again: Callable[[], T] | None, *, here: bool) -> T:
        try:
            if here:
                return self._pushing_less(call, again)
            return stoppable(lambda: self._unless_stopped(call, again), self._interrupt)
        except KeyboardInterrupt:
            self._failures.clear()  # of reads that were ended with the call
            raise
        except (duckdb.Error, pa.ArrowException) as e:
            if self._failures:
                raise self._failures.pop() from e
            self._require_open(e)
            require_uninterrupted(e)
            closed = isinstance(e, duckdb.PermissionException) and "by configuration" in str(e)
            raise SqlError(f"con.sql() reads tables and frames: {OTHERWISE}. {e}" if closed else str(e)) from e
        except ModuleNotFoundError as e:  # as of pl()
            raise MissingDependencyError(f"{e.name} is not installed: pip install {e.name}") from e
        except RuntimeError as e:
            self._require_open(e)
            require_uninterrupted(e)
            raise

    def stop(self) -> bool:
        """End a call of `run`, now or later, which is part of something that is stopped; False: there is none now."""
        self._stopped = True  # first: a call that is about to begin sees it, or is seen
        return self._ended()

    def close(self) -> bool:
        """End a call of `run` that another thread has begun, which raises `ClosedError`; whether there is one. Waits
        for nothing."""
        self._closed = True
        return self._ended()

    def _ended(self) -> bool:
        runs = self._runs
        if runs:
            self._interrupt()
        return runs

    def _require_open(self, e: Exception | None = None) -> None:
        """Raise what it means that a call was ended by `close`, or that nothing may begin any more."""
        if self._refuses if e is None else self._closed and _ENDED.search(str(e)):
            raise ClosedError("the connection was closed while this ran: connect again") from e

    def _unless_stopped(self, call: Callable[[], T], again: Callable[[], T] | None) -> T:
        self._runs = True
        try:
            self._require_open()
            if self._stopped:
                raise KeyboardInterrupt
            return self._pushing_less(call, again)
        finally:
            self._runs = False

    def _interrupt(self) -> None:
        with contextlib.suppress(duckdb.Error):  # it was closed meanwhile
            self.held.interrupt()

    def _pushing_less(self, call: Callable[[], T], again: Callable[[], T] | None) -> T:
        """Call; once more without push-down where DuckDB pushes a condition down that means something else there."""
        if not self._less:
            try:
                return call()
            except (duckdb.Error, pa.ArrowException) as e:
                unable = isinstance(e, duckdb.NotImplementedException) and _UNABLE.search(str(e)) is not None
                unable |= not self._failures and _UNMADE in str(e)
                lost = any(f.context.get("pushed") == MEANT_OTHERWISE for f in self._failures)
                if again is None or not (unable or lost):
                    raise
            self._failures.clear()
            self._less, call = True, again
        with self._planning_less():
            return call()

    @contextmanager
    def _planning_less(self) -> Iterator[None]:
        """While this lasts, DuckDB pushes no condition down, which it can be told for all its statements only: those
        that others plan meanwhile read more than they need."""
        with _PLANS_LESS:
            settings = self.held.cursor()
            settings.execute("set disabled_optimizers = 'filter_pushdown,join_filter_pushdown'")
            try:
                yield
            finally:
                settings.execute("reset disabled_optimizers")

    def batches(self, reader: pa.RecordBatchReader, make: Callable[[], pa.RecordBatchReader]) -> pa.RecordBatchReader:
        """The same stream with these errors; ``make`` makes it once more, from its first row."""

        def anew() -> pa.RecordBatch:
            nonlocal reader
            reader = make()
            return reader.read_next_batch()

        def rows() -> Iterator[pa.RecordBatch]:
            again: Callable[[], pa.RecordBatch] | None = anew
            while True:
                try:
                    yield self.run(lambda: reader.read_next_batch(), again)
                except StopIteration:
                    return
                again = None
                self._refuses |= self._closed  # whatever it reads: it would go on for ever

        return pa.RecordBatchReader.from_batches(reader.schema, rows())


class Relation:
    """A `duckdb.DuckDBPyRelation`, method for method; relations made from it are of this class, too.

    Read as of the moment of `Connection.sql`; any number of times, until the connection is closed.

    Raises:
        SqlError: DuckDB found an error while it ran.
        LakeheadError: a table could not be read.
    """

    def __init__(self, inner: duckdb.DuckDBPyRelation, reading: Reading) -> None:
        self._inner = inner
        self._reading = reading
        self._begun = False  # some rows of a run have been given to the caller

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return duckdb.DuckDBPyRelation

    def __getattr__(self, name: str) -> Any:
        if name in ("_inner", "_reading", "_begun"):  # of a copy that is not made yet
            raise AttributeError(name)
        if name in _WRITES:
            return functools.partial(self._write, name)
        if name in _CREATES:
            return functools.partial(self._create, name)
        if not callable(getattr(duckdb.DuckDBPyRelation, name, None)):
            return self._run(lambda: getattr(self._inner, name))
        found = getattr(self._inner, name)

        @functools.wraps(found)
        def call(*args: Any, **options: Any) -> Any:
            plain = [_plain(a) for a in args]
            named = {k: _plain(v) for k, v in options.items()}
            return self._run(lambda: found(*plain, **named), piecewise=name in _PIECEWISE, here=name in _HERE)

        return call

    def _run(self, call: Callable[[], Any], *, piecewise: bool = False, here: bool = False) -> Any:
        def again() -> Any:
            if piecewise:
                self._inner.execute()  # what failed is its result still
            return call()

        value = self._reading.run(call, None if self._begun else again, here=here)
        self._begun |= piecewise
        if type(value) is duckdb.DuckDBPyRelation:
            return Relation(value, self._reading)
        return self._reading.batches(value, call) if isinstance(value, pa.RecordBatchReader) else value

    def _create(self, name: str, *args: Any, **options: Any) -> Any:
        """What an attached database is given; without its name it would be given to this statement alone."""
        why = f"{name}() would change nothing that a later statement sees"
        if "." in str(next(iter([*args, *options.values()]), "")) and not name.endswith("view"):
            try:
                return self._run(lambda: getattr(self._inner, name)(*args, **options))
            except SqlError as e:
                why = str(e)
        raise SqlError(
            f"con.sql() reads tables and frames: {why}. Write rows with table.append(relation) or"
            " table.upsert(relation), and read a relation again with frames="
        )

    def __reduce_ex__(self, protocol: object) -> Any:
        raise InvalidRequestError(THIS_PROCESS.format(type(self).__name__))

    def _write(self, name: str, *args: Any, **options: Any) -> None:
        """Write a file: that the caller asks for, not the statement's text, so another DuckDB does it."""

        def write() -> None:
            rows = self._inner.to_arrow_reader()
            getattr(duckdb.connect(":memory:").from_arrow(rows), name)(*args, **options)

        self._run(write)

    def __getitem__(self, name: str) -> Any:
        return self._run(lambda: self._inner[name])

    def __len__(self) -> int:
        return int(self._run(lambda: len(self._inner)))

    def __contains__(self, name: str) -> bool:
        return name in self._inner

    def __repr__(self) -> str:
        return str(self._run(lambda: repr(self._inner)))

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        return self._run(self._inner.to_arrow_reader).__arrow_c_stream__(requested_schema)


def as_duckdb(relation: Relation) -> duckdb.DuckDBPyRelation:
    """A relation under the type whose methods it has."""
    return cast("duckdb.DuckDBPyRelation", relation)


def _plain(value: object) -> object:
    return value._inner if type(value) is Relation else value
