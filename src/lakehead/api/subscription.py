"""`Subscription`: batches pushed by the server, as users see them."""

from __future__ import annotations

import datetime as dt
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc

from lakehead.api.display import Displayed, Handle
from lakehead.api.feed import Feed, FeedStart
from lakehead.client.table import TableHandle
from lakehead.env.forks import keep_in_children
from lakehead.errors import ColumnNotFoundError, InvalidRequestError, OffsetOutOfRangeError
from lakehead.format.changes import named_changes
from lakehead.format.schema import nearest_name
from lakehead.predicate import Predicate, parse_predicate
from lakehead.predicate.nodes import Field, walk
from lakehead.predicate.read_spec import ReadSpec
from lakehead.protocol.messages import Stream, StreamHeader
from lakehead.types import (
    BUCKET_COLUMN,
    CHANGE_TYPE_COLUMN,
    OFFSET_COLUMN,
    SYSTEM_FIELDS,
    TIMESTAMP_COLUMN,
    TableDescriptor,
    TabletId,
    TabletKey,
    field_id,
)

NamedStart = Literal["latest", "earliest", "full"]
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_OFFSET_MAX = (1 << 63) - 1


@dataclass(frozen=True, repr=False)
class Batch(Displayed):
    """Rows of one tablet, in offset order.

    Attributes:
        rows: the columns, then ``__change_type`` (keyed tables), ``__bucket``, ``__offset`` and ``__timestamp`` (null
            in the initial rows of a ``full`` subscription).
        tablet: where they come from.
        end_offset: where a subscription that goes on after this batch starts; None until the last initial batch of a
            tablet in a ``full`` subscription.
    """

    rows: pa.RecordBatch
    tablet: TabletId
    end_offset: int | None

    def _facts(self) -> Mapping[str, object]:
        return {"rows": self.rows.num_rows, "tablet": self.tablet, "end_offset": self.end_offset}


class Subscription(Handle):
    """An iterator of `Batch`. Iterate in one thread; `close` from any thread ends the iteration."""

    def __init__(self, desc: TableDescriptor, stream: Stream) -> None:
        self._desc = desc
        self._stream = stream
        self._items: Iterator[tuple[StreamHeader, pa.RecordBatch]] = iter(stream)
        self._tablets: dict[TabletKey, TabletId] = {}
        self._waits = False
        keep_in_children(self)

    def _facts(self) -> Mapping[str, object]:
        return {"table": repr(str(self._desc.path)), "columns": self._stream.schema.names}

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._waits:
            raise InvalidRequestError(
                "another thread waits for the next rows of this subscription: iterate in one, or subscribe in each"
            )
        try:
            self._waits = True
            header, rows = next(self._items)
        except StopIteration:
            raise
        except BaseException:
            # After an error or Ctrl-C the caller may go on with the batches that were not handed out.
            self._items = iter(self._stream)
            raise
        finally:
            self._waits = False
        key = TabletKey(header.partition, header.bucket)
        tablet = self._tablets.get(key)
        if tablet is None:
            tablet = self._tablets[key] = self._desc.tablet_id(key)
        return Batch(named_changes(rows), tablet, header.end_offset)

    def close(self) -> None:
        """End the iteration and free the server's side."""
        self._stream.close()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if ends():  # the process gives all back, and what this would call may be gone
            return
        stream: Stream | None = getattr(self, "_stream", None)
        if stream is not None:
            stream.close()


def changelog_schema(desc: TableDescriptor) -> pa.Schema:
    """Columns of ``t$changelog``: the table's, then `named_changes` and the system columns."""
    return pa.schema([*desc.schema, pa.field(CHANGE_TYPE_COLUMN, pa.string()), *SYSTEM_FIELDS])


def chosen_columns(
    desc: TableDescriptor, columns: Sequence[str] | None, there: Sequence[str] | None = None
) -> list[str]:
    """The columns asked for, checked; a name alone is one column.

    Args:
        there: those that can be chosen; None for the user's.

    Raises:
        ColumnNotFoundError: one does not exist; the message names the nearest.
    """
    names: list[str] = desc.schema.names if there is None else list(there)
    if not isinstance(columns, str | Iterable | None):
        raise InvalidRequestError(f"columns={columns!r} names no columns: give a list of names")
    columns = [columns] if isinstance(columns, str) else None if columns is None else list(columns)
    if not all(isinstance(c, str) for c in columns or ()):
        raise InvalidRequestError(f"columns={columns!r} holds what is no name of a column")
    if columns is not None and len(set(columns)) != len(columns):
        raise InvalidRequestError(f"columns={columns} names a column twice: name each once")
    for c in columns or ():
        if c not in names:
            raise ColumnNotFoundError(f"{desc.path} has no column {c!r}; {nearest_name(str(c), names)}", column=str(c))
    return names if columns is None else [str(c) for c in columns]  # numpy's texts are no plain ones


def subscribe(
    handle: TableHandle,
    *,
    start: NamedStart | dt.datetime | Mapping[TabletId, int],
    columns: Sequence[str] | None,
    where: str | pc.Expression | None,
    stop: Literal["now"] | Mapping[TabletId, int] | None,
) -> Subscription:
    """Open a subscription; see `Table.subscribe`."""
    if isinstance(columns, Iterable) and not isinstance(columns, str):
        columns = list(columns)  # which is asked for once more after each change of the table
    named: dict[tuple[str, ...], tuple[int | None, ...]] = {}

    def specify(desc: TableDescriptor) -> ReadSpec:
        fields = desc.schemas.current.fields
        for path, ids in named.items():
            if _ids_of(path, fields) != ids:
                name = ".".join(path)
                why = f"{desc.path} was altered, and has no column {name!r} any more, or another one of that name"
                raise ColumnNotFoundError(f"{why}: subscribe to what it has now", column=name)
        wanted = chosen_columns(desc, columns)
        predicate: Predicate | None = None if where is None else parse_predicate(where, desc.schema)
        read = [] if predicate is None else [n.path for n in walk(predicate.tree) if isinstance(n, Field)]
        named.update({path: _ids_of(path, fields) for path in ([(c,) for c in wanted if columns is not None] + read)})
        changes = [CHANGE_TYPE_COLUMN] if desc.keyed else []
        return ReadSpec((*wanted, *changes, BUCKET_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN), predicate)

    stream = Feed(handle, _start(handle.desc, start), _stops(handle, stop), specify)
    return Subscription(handle.desc, stream)


def _ids_of(path: tuple[str, ...], fields: pa.Schema | pa.StructType) -> tuple[int | None, ...]:
    """The ids of a column and of what is named inside of it, as far as there is such."""
    at = fields.get_field_index(path[0])
    if at < 0:
        return ()
    field, inside = fields.field(at), path[1:]
    return (field_id(field), *(_ids_of(inside, field.type) if inside and pa.types.is_struct(field.type) else ()))


def _start(desc: TableDescriptor, start: Any) -> FeedStart:
    for known in get_args(NamedStart):
        if isinstance(start, str) and start == known:
            return "earliest" if known == "full" and not desc.keyed else known
    if isinstance(start, dt.datetime):
        if start.tzinfo is None:
            raise InvalidRequestError("start= needs a datetime with a time zone: datetime(..., tzinfo=timezone.utc)")
        return (start - _EPOCH) // dt.timedelta(microseconds=1)
    if isinstance(start, Mapping):
        return _by_key(desc, start, "start")
    raise InvalidRequestError(f"start={start!r}: use 'latest', 'earliest', 'full', a datetime or offsets per TabletId")


def _stops(handle: TableHandle, stop: Any) -> dict[TabletKey, int] | None:
    if stop is None:
        return None
    if isinstance(stop, str) and stop == "now":
        return {t.key: t.high_watermark for t in handle.log.tablets()}
    if isinstance(stop, Mapping):
        return _by_key(handle.desc, stop, "stop")
    raise InvalidRequestError(f"stop={stop!r}: use None, 'now' or offsets per TabletId")


def _whole(offset: Any) -> int:
    if isinstance(offset, bool):
        raise TypeError(f"{offset!r} is no whole number")
    try:
        return operator.index(offset)
    except TypeError:
        raise TypeError(f"{offset!r} is no whole number") from None


def _by_key(desc: TableDescriptor, offsets: Mapping[Any, Any], name: str) -> dict[TabletKey, int]:
    try:
        keys = {desc.tablet_key(tablet): _whole(offset) for tablet, offset in offsets.items()}
        found = {TabletKey(key.partition, operator.index(key.bucket)): offset for key, offset in keys.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as e:
        raise InvalidRequestError(f"{name}= must map TabletId(partition, bucket) to offsets: {e}") from e
    for tablet, offset in found.items():
        if abs(offset) > _OFFSET_MAX or abs(tablet.bucket) > _OFFSET_MAX:
            raise InvalidRequestError(
                f"{name}= maps bucket {tablet.bucket!r} to {offset}: give numbers of tablets there are"
            )
        if name == "start" and offset < 0:  # a lake would begin with what it has
            raise OffsetOutOfRangeError(
                f"start= maps bucket {tablet.bucket!r} to {offset}: offsets begin with 0", table=str(desc.path)
            )
    return found
