"""Writing the files of a tiering round: Parquet data files and position-delete files.

Runs where the rows are, on a Spark executor too: all it needs is a `LakeWriteSpec`, all it returns are `IcebergFile`
values, both plain and picklable. Columns carry Iceberg's field ids. A file holds rows of one tablet in offset order.
Nothing here commits; files no commit names are removed by whoever planned them. Many processes write into one folder:
file names are random, whatever a process may draw otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.io import load_file_io
from pyiceberg.io.pyarrow import (
    MetricModeTypes,
    MetricsMode,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    schema_to_pyarrow,
)
from pyiceberg.schema import Schema
from pyiceberg.table.locations import load_location_provider

from lakehead.env.randomness import SystemRandomness
from lakehead.env.storage import storage_errors
from lakehead.env.threads import WorkerPool
from lakehead.env.usage import note_helper
from lakehead.errors import LakeStateError, SchemaMismatchError
from lakehead.format.schema import lake_type
from lakehead.format.storable import check_storable, is_coarse
from lakehead.iceberg.file_io import storage_properties
from lakehead.iceberg.settings import require_settings
from lakehead.iceberg.tablets import partition_values
from lakehead.lake.lake_table import WrittenFile
from lakehead.log.netchange import Offsets
from lakehead.predicate.bounds import after_prefix
from lakehead.types import OFFSET_COLUMN, TIMESTAMP_COLUMN, TabletKey

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table
    from pyiceberg.table.locations import LocationProvider

ROW_GROUP_ROWS = (128 << 10, 1 << 20)
"""A row group has at least and at most so many rows, where there are so many."""
ROW_GROUP_BYTES = (64 << 20, 256 << 20)
"""Arrow bytes that end a row group of the least number of rows, and of any number."""
SMALL_BYTES = 2 << 20
"""Arrow bytes of a data file that may share delete files with others."""
SMALL = "small-"
"""How its name begins: after those of all others, which are hexadecimal."""
_OURS = re.compile(rf"(?:{SMALL})?[0-9a-f]{{32}}\.parquet")
_SAMPLE_ROWS = 64 << 10
_DICTIONARY_SHARE = 4
"""A column gets a dictionary when each of its values is there at least so often on average."""
_DELTA_COLUMNS = (OFFSET_COLUMN, TIMESTAMP_COLUMN)

_PATH_ID, _POSITION_ID = 2147483546, 2147483545
_POSITION_SCHEMA = pa.schema(
    [
        pa.field("file_path", pa.string(), False, {"PARQUET:field_id": str(_PATH_ID)}),
        pa.field("pos", pa.int64(), False, {"PARQUET:field_id": str(_POSITION_ID)}),
    ]
)


@dataclass(frozen=True)
class LakeWriteSpec:
    """All that a worker needs to write files of one lake table; hashable and picklable.

    Attributes:
        location: the table's base address.
        schema_json: its Iceberg schema.
        spec_id: partition spec that new files have.
        properties: the table's properties.
        io_properties: what opens its storage.
        target_file_bytes: size at which the next file is begun.
    """

    location: str
    schema_json: str
    spec_id: int
    properties: tuple[tuple[str, str], ...]
    io_properties: tuple[tuple[str, str], ...] = field(repr=False)
    target_file_bytes: int

    @classmethod
    def of(cls, table: Table, *, target_file_bytes: int) -> LakeWriteSpec:
        """The spec for new files of a table as it is now.

        Raises:
            LakeStateError: it says in ways that cannot be read how they are written.
        """
        require_settings(table)
        return cls(
            table.location(),
            table.schema().model_dump_json(),
            table.spec().spec_id,
            tuple(sorted(table.properties.items())),
            tuple(sorted(storage_properties(table.io).items())),
            target_file_bytes,
        )


@dataclass(frozen=True)
class IcebergWriter:
    """Writes data files of one table; implements `lakehead.lake.lake_table.DataWriter`.

    Attributes:
        spec: how.
        partition_types: of the table's partition columns.
    """

    spec: LakeWriteSpec
    partition_types: tuple[pa.DataType, ...]

    def write(self, batches: Iterable[pa.RecordBatch], tablet: TabletKey) -> list[WrittenFile]:
        """See `DataWriter.write`."""
        files = write_data_files(self.spec, batches, partition_values(self.partition_types, tablet))
        return [WrittenFile(f.path, f.size, f.record_count, tablet, f) for f in files]


@dataclass(frozen=True)
class IcebergFile:
    """A file that is written and durable, but in no snapshot yet: data, or positions to delete.

    Attributes:
        path: its full address.
        size: bytes.
        record_count: rows, or deleted positions.
        spec_id: partition spec of ``partition``.
        partition: values as Iceberg holds them, in the order of the spec.
        statistics: what manifests keep about it, by the names of Iceberg's data file.
        deletes: whether it holds positions to delete.
    """

    path: str
    size: int
    record_count: int
    spec_id: int
    partition: tuple[object, ...]
    statistics: Mapping[str, Any] = field(repr=False)
    deletes: bool = False


def write_data_files(
    spec: LakeWriteSpec,
    batches: Iterable[pa.RecordBatch],
    partition: tuple[object, ...],
) -> list[IcebergFile]:
    """Write rows of one partition, in the order they come; a new file begins at ``spec.target_file_bytes``.

    Args:
        batches: rows with the table's columns, its own or the lake's types, and the system columns.
        partition: partition values of all these rows.

    Returns:
        The files; none when there are no rows. After an error none remains.

    Raises:
        LakeStateError: the lake table's columns do not fit the rows.
        StorageError: the storage refused.
    """
    tools = _tools(spec)
    written: list[IcebergFile] = []
    open_file: _DataFile | None = None
    try:
        for rows in _ahead(_row_groups(_to_lake(b, tools.arrow) for b in batches if b.num_rows)):
            with storage_errors(spec.location, "write lake files in"):
                open_file = open_file or _DataFile(tools, rows, _name(rows))
                open_file.write(rows)
                if open_file.size >= spec.target_file_bytes:
                    written.append(open_file.finish(partition))
                    open_file = None
        if open_file is not None:
            with storage_errors(spec.location, "write lake files in"):
                written.append(open_file.finish(partition))
    except BaseException:
        if open_file is not None:
            open_file.abandon()
        discard_files(tools.io, (f.path for f in written))
        raise
    return written


def _name(first: pa.Table) -> str:
    """A new name, from a file's first rows; those of small files are neighbours, and others do not lie between them."""
    return f"{SMALL if first.nbytes <= SMALL_BYTES else ''}{SystemRandomness().uuid_hex()}.parquet"


def is_small(path: str) -> bool:
    """Whether a data file is one of those that share delete files."""
    return path.rpartition("/")[2].startswith(SMALL)


def is_ours(path: str) -> bool:
    """Whether a data file has a name that we give, and others do not: its values fit the table's types."""
    return _OURS.fullmatch(path.rpartition("/")[2]) is not None


def write_position_deletes(
    spec: LakeWriteSpec,
    positions: Mapping[str, Offsets],
    *,
    spec_id: int,
    partition: tuple[object, ...],
) -> IcebergFile:
    """Write one position-delete file, as every reader can apply it.

    Readers look into it for every older data file of the partition whose address lies between those that it names.

    Args:
        positions: row positions, sorted, by the data file's address, exactly as its manifest spells it.
        spec_id, partition: those of the data files.

    Raises:
        StorageError: the storage refused; nothing is left of the file.
    """
    tools = _tools(spec)
    path = tools.locations.new_data_location(f"{SystemRandomness().uuid_hex()}-deletes.parquet")
    # In the order of their UTF-8 bytes, as Iceberg sorts.
    named = sorted(positions, key=str.encode)
    codes = np.repeat(np.arange(len(named), dtype=np.int32), [len(positions[p]) for p in named])
    paths = pa.DictionaryArray.from_arrays(codes, pa.array(named)).cast(pa.string())
    at = np.concatenate([positions[p] for p in named])
    rows = pa.Table.from_arrays([paths, pa.array(at, pa.int64())], schema=_POSITION_SCHEMA)
    try:
        with storage_errors(path, "write"), tools.io.new_output(path).create() as out:
            pq.write_table(
                rows,
                out,
                compression="zstd",
                use_dictionary=["file_path"],
                column_encoding={"pos": "DELTA_BINARY_PACKED"},
                store_schema=False,
                write_page_checksum=True,
            )
    except BaseException:
        discard_files(tools.io, [path])
        raise
    return IcebergFile(
        path,
        len(tools.io.new_input(path)),
        len(at),
        spec_id,
        partition,
        {"lower_bounds": {_PATH_ID: named[0].encode()}, "upper_bounds": {_PATH_ID: named[-1].encode()}},
        deletes=True,
    )


def discard_files(io: FileIO, paths: Iterable[str]) -> None:
    """Remove files that no snapshot names; what cannot be removed is left to orphan clean-up."""
    for path in paths:
        try:
            io.delete(path)
        except Exception:  # the reason for discarding matters more than one file left behind
            continue


def lake_arrow_schema(schema: Schema) -> pa.Schema:
    """Arrow's form of an Iceberg schema with field ids, and with plain strings and lists rather than large ones."""
    return pa.schema([_plain_field(f) for f in schema_to_pyarrow(schema)])


def _plain_field(f: pa.Field) -> pa.Field:
    return f.with_type(_plain(f.type))


def _plain(t: pa.DataType) -> pa.DataType:
    if pa.types.is_large_string(t):
        return pa.string()
    if pa.types.is_large_binary(t):
        return pa.binary()
    if pa.types.is_large_list(t) or pa.types.is_list(t):
        return pa.list_(_plain_field(t.value_field))
    if pa.types.is_map(t):
        return pa.map_(_plain_field(t.key_field), _plain_field(t.item_field))
    if pa.types.is_struct(t):
        return pa.struct([_plain_field(t.field(i)) for i in range(t.num_fields)])
    return t


@dataclass(frozen=True)
class _Tools:
    schema: Schema
    arrow: pa.Schema
    io: FileIO
    locations: LocationProvider
    spec: LakeWriteSpec


@functools.lru_cache(maxsize=64)
def _tools(spec: LakeWriteSpec) -> _Tools:
    schema = Schema.model_validate_json(spec.schema_json)
    io = load_file_io(dict(spec.io_properties), spec.location)
    locations = load_location_provider(spec.location, dict(spec.properties))
    return _Tools(schema, lake_arrow_schema(schema), io, locations, spec)


def _to_lake(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with the lake's columns and types; columns that others added there are null."""
    if unknown := set(batch.schema.names) - set(schema.names):
        raise LakeStateError(
            f"the lake table has no column {sorted(unknown)[0]!r} any more: someone changed its schema; add it again",
            column=sorted(unknown)[0],
        )
    columns = []
    for f in schema:
        if f.name in batch.schema.names:
            columns.append(_lake_column(batch, f))
        elif f.nullable:
            columns.append(pa.nulls(batch.num_rows, f.type))
        else:
            raise LakeStateError(
                f"the lake table has a required column {f.name!r} that the table lacks: someone added it; make it"
                " optional",
                column=f.name,
            )
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _lake_column(batch: pa.RecordBatch, f: pa.Field) -> pa.Array:
    column = batch.column(f.name)
    if column.type == f.type:
        return column
    if is_coarse(column.type):
        try:
            alone = batch.select([f.name])
            check_storable(alone, alone.schema, "a lake cannot hold a value")
        except SchemaMismatchError as e:
            raise _unstorable(batch, e) from e
        # What lies under nulls may be anything, and a cast that checks looks at it, too.
        column = column.cast(lake_type(column.type), safe=False)
    return column if column.type == f.type else column.cast(f.type)


def _unstorable(batch: pa.RecordBatch, e: SchemaMismatchError) -> LakeStateError:
    """For rows of before such values were refused."""
    row = e.context["row"]
    assert isinstance(row, int)
    place = f" at offset {batch.column(OFFSET_COLUMN)[row]}" if OFFSET_COLUMN in batch.schema.names else ""
    return LakeStateError(
        f"a row{place} cannot be tiered, nor can what follows it: {e.message}. An earlier version took it. In a"
        " primary-key table delete it or upsert another value; of a log table copy the other rows into a new one",
        column=str(e.context["column"]),
    )


def _row_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The batches gathered to tables of a row group's size; the last may be smaller, a huge batch larger."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        enough = rows >= ROW_GROUP_ROWS[0] and size >= ROW_GROUP_BYTES[0]
        if enough or rows >= ROW_GROUP_ROWS[1] or size >= ROW_GROUP_BYTES[1]:
            yield pa.Table.from_batches(held)
            held, rows, size = [], 0, 0
    if held:
        yield pa.Table.from_batches(held)


def _ahead(groups: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The same, of which each is read while the one before is written: a log is read over the network, and decoded."""
    with WorkerPool(1, "lakehead-lake-read") as reader:
        following = reader.submit(next, groups, None)
        while (rows := following.result()) is not None:
            following = reader.submit(next, groups, None)
            yield rows
        note_helper(reader.submit(time.thread_time).result())


class _DataFile:
    """One Parquet data file being written; its first rows decide the encodings."""

    def __init__(self, tools: _Tools, first: pa.Table, name: str) -> None:
        self._tools = tools
        self._path = tools.locations.new_data_location(name)
        dictionary = _repeating_columns(first.slice(0, _SAMPLE_ROWS))
        self._out = tools.io.new_output(self._path).create()
        self._nans: dict[str, int] = {}
        try:
            self._writer = pq.ParquetWriter(
                self._out,
                tools.arrow,
                compression="zstd",
                use_dictionary=dictionary or False,
                column_encoding={c: "DELTA_BINARY_PACKED" for c in _DELTA_COLUMNS if c not in dictionary},
                store_decimal_as_integer=True,
                store_schema=False,
                write_page_checksum=True,
            )
        except BaseException:
            with contextlib.suppress(Exception):
                self._out.close()
            discard_files(tools.io, [self._path])
            raise

    @property
    def size(self) -> int:
        """Bytes written so far, in whole row groups."""
        size: int = self._out.tell()
        return size

    def write(self, rows: pa.Table) -> None:
        self._writer.write_table(rows, row_group_size=ROW_GROUP_ROWS[1])
        for f in rows.schema:
            if pa.types.is_floating(f.type):
                self._nans[f.name] = self._nans.get(f.name, 0) + (pc.sum(pc.is_nan(rows[f.name])).as_py() or 0)

    def finish(self, partition: tuple[object, ...]) -> IcebergFile:
        self._writer.close()
        size = self.size
        self._out.close()
        metadata = self._writer.writer.metadata
        statistics = _statistics(metadata, self._tools)
        # Parquet's footer does not tell of NaN, which no bounds enclose.
        find = self._tools.schema.find_field
        nans = {find(name).field_id: count for name, count in self._nans.items()}
        statistics["nan_value_counts"] = nans
        # To engines that take NaN for greater than all numbers a bound would say that the file has nothing beyond.
        for bounds in ("lower_bounds", "upper_bounds"):
            statistics[bounds] = {i: bound for i, bound in statistics[bounds].items() if not nans.get(i)}
        return IcebergFile(self._path, size, metadata.num_rows, self._tools.spec.spec_id, partition, statistics)

    def abandon(self) -> None:
        """Close and remove it, whatever state it is in."""
        for close in (self._writer.close, self._out.close):
            try:
                close()
            except Exception:  # the error that led here is the one to report
                continue
        discard_files(self._tools.io, [self._path])


def _repeating_columns(sample: pa.Table) -> list[str]:
    out = []
    for f in sample.schema:
        if pa.types.is_nested(f.type) or pa.types.is_boolean(f.type) or f.name in _DELTA_COLUMNS:
            continue
        if isinstance(f.type, pa.BaseExtensionType):  # UUIDs that another engine added, all null here
            continue
        if pc.count_distinct(sample[f.name]).as_py() * _DICTIONARY_SHARE <= sample.num_rows:
            out.append(f.name)
    return out


def _statistics(metadata: pq.FileMetaData, tools: _Tools) -> dict[str, Any]:
    ids = parquet_path_to_id_mapping(tools.schema)
    plan = compute_statistics_plan(tools.schema, dict(tools.spec.properties))
    for field_id in _unbounded_columns(metadata, ids):
        if plan[field_id].mode.type is not MetricModeTypes.NONE:
            plan[field_id] = dataclasses.replace(plan[field_id], mode=MetricsMode(MetricModeTypes.COUNTS))
    statistics = data_file_statistics_from_parquet_metadata(metadata, plan, ids)
    for column in statistics.column_aggregates.values():
        if isinstance(column.current_max, str):
            column.current_max = _text_at_least(column.current_max, column.trunc_length)
    found: dict[str, Any] = statistics.to_serialized_dict()
    del found["record_count"]
    return found


def _text_at_least(value: str, characters_max: int | None) -> str | None:
    """The text, or a shorter one above it; None when no text is. PyIceberg's own may end in half of a character."""
    fits = characters_max is None or len(value) <= characters_max
    return value if fits else after_prefix(value[:characters_max])


def _unbounded_columns(metadata: pq.FileMetaData, ids: Mapping[str, int]) -> set[int]:
    """Columns that get no bounds: some of their values are outside of those that a row group knows, or cannot be told.

    A row group has no bounds for long strings and for nothing but NaN: PyIceberg takes the bounds of the other row
    groups for the whole file's, and readers would skip these rows. Dates and timestamps outside of the years 1 to 9999
    are no Python values, by which PyIceberg goes.
    """
    out = set()
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        for j in range(metadata.num_columns):
            column = group.column(j)
            if not _has_bounds(column.statistics, column.num_values):
                out.add(ids[column.path_in_schema])
    return out


def _has_bounds(s: pq.Statistics | None, values: int) -> bool:
    """Whether the bounds of a column's part enclose all its values."""
    if s is None or not s.has_min_max:
        return s is not None and s.has_null_count and bool(s.null_count == values)
    try:
        _ = s.min, s.max
    except (OverflowError, ValueError, ArithmeticError):
        return False
    return True
