"""`Scan`: a consistent read of a table, pinned when it is made, carried out when it is asked for rows."""

from __future__ import annotations

import datetime as dt
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from lakehead.api.display import Handle
from lakehead.api.subscription import chosen_columns
from lakehead.client.table import TableHandle
from lakehead.env.late_imports import load
from lakehead.errors import InvalidRequestError, MissingDependencyError
from lakehead.lake.keyed_read import KeyedRead
from lakehead.lake.union_read import UnionRead, pin
from lakehead.predicate import parse_predicate
from lakehead.predicate.read_spec import ReadSpec
from lakehead.types import Tier, require_tier

if TYPE_CHECKING:
    import pandas
    import polars

_ROWS_MAX = (1 << 63) - 1
"""More than any table has."""


def _whole(given: object, wanted: str) -> int:
    """A number of Python's or NumPy's that is not negative, as listings and columns have them."""
    try:
        number = -1 if isinstance(given, bool) else operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise InvalidRequestError(wanted)
    return int(number)


class Scan(Handle):
    """Rows of a table as of the moment the scan was made; may be read any number of times.

    Order: offset order within a tablet, lake rows before hot rows; none across tablets.
    """

    def __init__(
        self,
        handle: TableHandle,
        *,
        columns: Sequence[str] | None,
        where: str | pc.Expression | None,
        tier: Tier,
        snapshot: int | dt.datetime | None,
        limit: int | None,
        system_columns: bool,
    ) -> None:
        """See `Table.scan`."""
        require_tier(tier)
        if limit is not None:
            limit = _whole(limit, f"limit={limit!r} must be a whole number that is not negative")
        if snapshot is not None and not isinstance(snapshot, dt.datetime):
            snapshot = _whole(snapshot, f"snapshot={snapshot!r}: give the id of a lake snapshot, or a datetime")
        if snapshot is not None and tier == "hot":
            raise InvalidRequestError("a lake snapshot has no hot rows: leave out tier='hot', or snapshot=")
        self._where = where
        self._tier = "lake" if snapshot is not None else tier
        self._handle = handle
        predicate = None if where is None else parse_predicate(where, handle.desc.schema)
        most = limit if limit is None else min(limit, _ROWS_MAX)
        spec = ReadSpec(tuple(chosen_columns(handle.desc, columns)), predicate, most, system_columns)
        by_key = KeyedRead.of(handle, spec) if self._tier == "union" else None
        self._read = by_key or UnionRead(handle, pin(handle, tier=tier, snapshot=snapshot), spec)

    def _facts(self) -> Mapping[str, object]:
        read = self._read
        lake, ranges = (read.pinned.lake, read.pinned.ranges) if isinstance(read, UnionRead) else (None, {})
        return {
            "table": repr(str(self._handle.desc.path)),
            "columns": self.schema.names,
            "where": None if self._where is None else str(self._where),
            "tier": self._tier,
            "lake_snapshot": lake.snapshot_id if lake is not None else None,
            "log_records": sum(end - start for start, end in ranges.values()) if ranges else None,
            "connection": None if self._handle.open else "closed",
        }

    @property
    def schema(self) -> pa.Schema:
        """Columns of the result."""
        return self._read.schema

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        """Rows, read as they are consumed."""
        return self._read.batches()

    def to_reader(self) -> pa.RecordBatchReader:
        """Rows as a stream."""
        return pa.RecordBatchReader.from_batches(self.schema, self.to_batches())

    def to_arrow(self) -> pa.Table:
        """All rows."""
        return pa.Table.from_batches(self.to_batches(), self.schema)

    def to_pandas(self) -> pandas.DataFrame:
        """All rows, as pandas; needs pandas installed.

        Raises:
            InvalidRequestError: pandas has no such value, as a day after the year 9999.
        """
        _installed("pandas")
        rows = self.to_arrow()
        try:
            return rows.to_pandas()
        except (ValueError, OverflowError) as e:
            raise InvalidRequestError(f"pandas has no such value ({e}): to_arrow() and to_polars() have") from e

    def to_polars(self) -> polars.DataFrame:
        """All rows, as Polars; needs Polars installed."""
        frame: polars.DataFrame = _installed("polars").from_arrow(self.to_arrow())
        return frame

    def count(self) -> int:
        """Number of rows; from metadata alone where that is possible."""
        return self._read.count()

    def explain(self) -> str:
        """What the scan reads from where."""
        return self._read.explain()

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        return self.to_reader().__arrow_c_stream__(requested_schema)


def _installed(package: str) -> Any:
    try:
        return load(package)
    except ImportError as e:
        raise MissingDependencyError(f"{package} is not installed: pip install 'lakehead[{package}]'") from e
