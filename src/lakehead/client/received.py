"""What a server sent, looked at before anything is computed with it: columns that point outside of themselves would end
this process, and what contradicts the request, or itself, is no error of whoever asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lakehead.errors import CorruptionError
from lakehead.format.ipc_message import UNREADABLE, read_received
from lakehead.format.joins import CHANGE_BYTES_MAX
from lakehead.format.plain import are_plain
from lakehead.protocol import messages as m
from lakehead.protocol.codec import decode_stream_header
from lakehead.protocol.messages import StreamHeader
from lakehead.types import (
    BUCKET_COLUMN,
    CHANGE_SYMBOLS,
    CHANGE_TYPE_COLUMN,
    OFFSET_COLUMN,
    PREV_OFFSET_COLUMN,
    SYSTEM_FIELDS,
    TableDescriptor,
    TabletKey,
)

_SYSTEM = {
    **{f.name: f.type for f in SYSTEM_FIELDS},
    CHANGE_TYPE_COLUMN: pa.int8(),
    PREV_OFFSET_COLUMN: pa.int64(),
}
_Told = TypeVar("_Told", bound=m.TabletRef)
_ID_MAX, _SEQUENCE_MAX = 1 << 31, 1 << 62
_NEVER_NULL = (BUCKET_COLUMN, OFFSET_COLUMN, CHANGE_TYPE_COLUMN, PREV_OFFSET_COLUMN)


def streamed(chunk: Any, *, from_own: bool) -> tuple[StreamHeader, pa.RecordBatch]:
    """What one item of a stream says, and its rows.

    Costs about 3 ns for each text, next to nothing for other types.

    Args:
        from_own: a server of this user sent it, which checked it when it was written.

    Raises:
        CorruptionError: it is no item of a stream, or holds values that cannot be.
    """
    try:
        header = decode_stream_header(chunk.app_metadata.to_pybytes())
        chunk.data.validate(full=not from_own)
        if not from_own:
            _require_system_values(chunk.data)
    except (AttributeError, ValueError, *UNREADABLE) as e:
        raise CorruptionError(f"the server sent what is no part of a stream: {e}") from e
    return header, chunk.data


def found_rows(message: pa.Buffer, schema: pa.Schema) -> pa.RecordBatch:
    """The rows that a tablet has of the keys asked for.

    Raises:
        CorruptionError: they are not rows of this schema, or hold values that cannot be.
        LimitExceededError: they take more memory than any answer may.
    """
    return read_received(message, schema, bytes_max=CHANGE_BYTES_MAX)


def found_places(data: pa.Buffer, *, rows: int, asked: int) -> NDArray[np.int64]:
    """Which of so many keys these rows are of.

    Raises:
        CorruptionError: of none that was asked for.
    """
    if data.size == 8 * rows:
        places = np.frombuffer(data, np.int64)
        # Negative ones are large ones, so that one look is enough.
        if not rows or places.view(np.uint64).max() < asked:
            return places
    raise CorruptionError("the server found rows of keys that it was not asked for")


def require_answers(request: m.Request[Any], reply: Any) -> None:
    """Return if a reply has as much as the request asked for.

    Raises:
        CorruptionError: it contradicts the request, or itself.
    """
    wrong = _CONTRADICTS.get(type(request))
    if wrong is not None and wrong(request, reply):
        raise CorruptionError(f"the server's answer to {type(request).__name__} contradicts what was asked, or itself")


_CONTRADICTS: dict[type, Callable[[Any, Any], bool]] = {
    m.Write: lambda asked, told: (
        len(told.offsets) != len(asked.tablets) or any(not 0 <= start <= end for start, end in told.offsets)
    ),
    m.OpenWriter: lambda asked, told: (
        len(told.tablets) != len(told.sequences)
        or not 0 <= told.epoch < _ID_MAX
        or not all(-1 <= n < _SEQUENCE_MAX for n in (told.last_sequence, *told.sequences))
    ),
    m.OpenLeases: lambda asked, told: (
        len(told.leases) != len(asked.tables)
        or not told.seconds > 0
        or any(_cannot_be(tablet) for lease in told.leases for tablet in lease.tablets)
    ),
    m.Watermarks: lambda asked, told: any(_cannot_be(tablet) for tablet in told.tablets),
    m.TimestampsAt: lambda asked, told: len(told.timestamps_us) != len(asked.ranges),
    m.Lookup: lambda asked, told: not told.exact and asked.as_of is None,
}


def _cannot_be(tablet: m.TabletState) -> bool:
    end = tablet.high_watermark
    return not (0 <= tablet.log_start <= end and 0 <= tablet.rows <= end and 0 <= tablet.overwritten <= end)


def told_table(info: m.TableInfo) -> TableDescriptor:
    """A definition that a server told.

    Raises:
        InvalidRequestError: a name, a property or the schema's text is none.
        CorruptionError: it is no definition of a table.
    """
    desc = info.descriptor()
    columns = set(desc.schema.names)
    lists = (desc.schema.names, desc.primary_key, desc.partition_by, desc.bucket_key)
    in_bounds = 1 <= desc.buckets < _ID_MAX and 0 <= desc.schema_id < _ID_MAX
    if not in_bounds or not all(set(names) <= columns and len(set(names)) == len(names) for names in lists):
        raise CorruptionError(f"the server's definition of {desc.path} contradicts itself")
    return desc


def told_tablets(desc: TableDescriptor, tablets: Sequence[_Told]) -> Sequence[_Told]:
    """The same tablets, each of which the table may have, once.

    Raises:
        CorruptionError: they are others.
    """
    keys = {t.key for t in tablets}
    if len(keys) != len(tablets) or not all(map(desc.may_have, keys)):
        raise CorruptionError(f"the server told of tablets that {desc.path} cannot have")
    return tablets


def require_columns(desc: TableDescriptor, names: Sequence[str], schema: pa.Schema) -> None:
    """Return if a stream of a table has the columns that were asked for.

    Raises:
        CorruptionError: it has others.
    """
    wanted = [_SYSTEM[name] if name in _SYSTEM else desc.schema.field(name).type for name in names]
    if schema.names != list(names) or schema.types != wanted:
        raise CorruptionError(f"the server streams other columns of {desc.path} than were asked for")


def require_tablet(desc: TableDescriptor, key: TabletKey) -> None:
    """Return if rows may be of this tablet.

    Raises:
        CorruptionError: they may not.
    """
    if not desc.may_have(key):
        raise CorruptionError(f"the server sent rows of a tablet that {desc.path} cannot have")


def found_row(row: list[Any] | None, schema: pa.Schema) -> list[Any] | None:
    """The plain row of a key.

    Raises:
        CorruptionError: it is none of this schema.
    """
    if row is not None and not are_plain(row, schema):
        raise CorruptionError("the server found a row whose values are not those of the table's columns")
    return row


def _require_system_values(rows: pa.RecordBatch) -> None:
    for name in _NEVER_NULL:
        at = rows.schema.get_field_index(name)
        if at >= 0 and rows.column(at).null_count:
            raise ValueError(f"nulls in {name}")
    at = rows.schema.get_field_index(CHANGE_TYPE_COLUMN)
    if at >= 0 and rows.num_rows and pa.types.is_int8(rows.column(at).type):
        codes = np.frombuffer(rows.column(at).buffers()[1], np.uint8)[rows.column(at).offset :][: rows.num_rows]
        if codes.max() >= len(CHANGE_SYMBOLS):
            raise ValueError("a change that is none")
