"""Every request and reply, as plain values.

A request travels as MessagePack, tagged by its class name, with *attachments* beside it: buffers that hold row data and
are never copied into the message. What the attachments are, stands at each request. Bulk reads are *streams*: a schema,
then record batches, each with a `StreamHeader`. The type of a request says what answers it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import msgspec
import pyarrow as pa

from lakehead.config import LEASE_SECONDS
from lakehead.protocol.alterations import Alteration
from lakehead.protocol.privileges import Database, Privilege, Target
from lakehead.protocol.table_info import Int64 as Int64
from lakehead.protocol.table_info import Message as Message
from lakehead.protocol.table_info import TableInfo as TableInfo
from lakehead.types import TablePath, TabletKey, WriteKind

PROTOCOL_VERSION = 16

A_co = TypeVar("A_co", covariant=True)
R = TypeVar("R", bound="Reply")


class TabletRef(Message, frozen=True, kw_only=True):
    """A tablet of a table whose id stands in the request."""

    partition: str
    bucket: Int64

    @classmethod
    def of(cls, key: TabletKey) -> TabletRef:
        return cls(partition=key.partition, bucket=key.bucket)

    @property
    def key(self) -> TabletKey:
        return TabletKey(self.partition, self.bucket)


class TabletRange(TabletRef, frozen=True, kw_only=True):
    """Offsets ``[start, end)`` of a tablet."""

    start: Int64
    end: Int64


class StreamHeader(Message, frozen=True, kw_only=True):
    """What a streamed batch is: its tablet, and the offset up to which the tablet has now been sent.

    ``end_offset`` is None inside a tablet's initial rows of a ``full`` subscription; these are the rows live at
    ``live_at``. Of a subscription, an empty batch of neither says that the server lives, one with an ``end_offset``
    alone that nothing up to there was wanted. ``fill`` means nothing, see `lakehead.protocol.alignment`.
    """

    partition: str
    bucket: Int64
    end_offset: Int64 | None
    live_at: Int64 | None = None
    fill: bytes = b""


class Stream(Protocol):
    """Batches pushed by a server. Iterate once; `close` may be called from any thread and ends the iteration."""

    @property
    def schema(self) -> pa.Schema: ...

    def __iter__(self) -> Iterator[tuple[StreamHeader, pa.RecordBatch]]: ...

    def close(self) -> None: ...


class Reply(Message, frozen=True, kw_only=True, tag=True):
    """Base of replies."""


class Request(Message, Generic[A_co], frozen=True, kw_only=True, tag=True):
    """Base of requests. ``A_co`` is what answers: a class of replies, or `Stream`."""

    privilege: ClassVar[Privilege]

    @property
    def idempotent(self) -> bool:
        """Whether it may arrive twice, the second time late: then a call is repeated when its connection was lost."""
        return True

    @property
    def about(self) -> Sequence[str | TablePath]:
        """The tables that are asked for something, by id or by path."""
        return ()

    @property
    def needs(self) -> Sequence[tuple[Privilege, Target]]:
        """What the sender must be allowed to do, and on what: all of it."""
        return [(self.privilege, table) for table in self.about] or [(self.privilege, None)]


class TableRequest(Request[A_co], Generic[A_co], frozen=True, kw_only=True):
    """Base of requests about one table. A server of another folder than ``folder_id``, if one is given, refuses it:
    offsets, and numbers of writers, mean something in the log of one folder.

    ``schema_id`` is the definition under which the sender knows the table; -1 stands for the one in force. Ranges are
    read as it has them; whatever finds out where a read begins refuses one that is not in force any more
    (`SchemaChangedError`).
    """

    table_id: str
    folder_id: str = ""
    schema_id: Int64 = -1

    @property
    def about(self) -> Sequence[str | TablePath]:
        return (self.table_id,)


class NamedRequest(Request[A_co], Generic[A_co], frozen=True, kw_only=True):
    """Base of requests that find a table by its name; ``only`` if it has this id."""

    database: str
    table: str
    only: str = ""

    @property
    def path(self) -> TablePath:
        return TablePath(self.database, self.table)

    @property
    def about(self) -> Sequence[str | TablePath]:
        return (self.path,)


# ---- metadata -----------------------------------------------------------------------------------------------------


class HelloReply(Reply, frozen=True, kw_only=True):
    """Who answers: ``incarnation`` is the number of the start of that folder's owner."""

    folder_id: str
    version: Int64
    pid: Int64
    incarnation: Int64 = 0


class Hello(Request[HelloReply], frozen=True, kw_only=True):
    """First words of a connection."""

    privilege = Privilege.USAGE


class TableReply(Reply, frozen=True, kw_only=True):
    """A table, and the folder whose log its offsets are those of."""

    info: TableInfo
    folder_id: str = ""


class CreateTable(Request[TableReply], frozen=True, kw_only=True):
    """Create a table; ``info.table_id`` is ignored."""

    privilege = Privilege.CREATE
    info: TableInfo
    if_not_exists: bool

    @property
    def idempotent(self) -> bool:
        return self.if_not_exists

    @property
    def about(self) -> Sequence[str | TablePath]:
        return (TablePath(self.info.database, self.info.table),)

    @property
    def needs(self) -> Sequence[tuple[Privilege, Target]]:
        return [(self.privilege, Database(self.info.database))]


class GetTable(NamedRequest[TableReply], frozen=True, kw_only=True):
    privilege = Privilege.DESCRIBE


class TableNow(TableRequest[TableReply], frozen=True, kw_only=True):
    """The definition of a table that was opened before, whatever it is called now."""

    privilege = Privilege.DESCRIBE


class NamesReply(Reply, frozen=True, kw_only=True):
    names: list[str]


class ListTables(Request[NamesReply], frozen=True, kw_only=True):
    """The tables that the sender may know of. ``called``: none but those of these names, in any case, need be told."""

    privilege = Privilege.USAGE
    database: str | None
    called: list[str] | None = None


class ListDatabases(Request[NamesReply], frozen=True, kw_only=True):
    """The databases that the sender may know of."""

    privilege = Privilege.USAGE


class Done(Reply, frozen=True, kw_only=True):
    pass


class AlterTable(TableRequest[TableReply], frozen=True, kw_only=True):
    """Change a table's definition: all of it, in this order, or nothing. It is refused when the table was altered since
    ``schema_id``."""

    privilege = Privilege.MANAGE
    changes: list[Alteration]

    @property
    def idempotent(self) -> bool:
        return False


class RenameTable(NamedRequest[TableReply], frozen=True, kw_only=True):
    """Call a table something else; with ``swap`` the table of that name gets this one's, at once."""

    privilege = Privilege.MANAGE
    to_database: str
    to_table: str
    swap: bool = False

    @property
    def to(self) -> TablePath:
        return TablePath.parse(f"{self.to_database}.{self.to_table}")

    @property
    def idempotent(self) -> bool:
        return False

    @property
    def about(self) -> Sequence[str | TablePath]:
        return (self.path, TablePath(self.to_database, self.to_table))

    @property
    def needs(self) -> Sequence[tuple[Privilege, Target]]:
        create = (Privilege.CREATE, Database(self.to_database))
        return [(Privilege.MANAGE, self.path), (Privilege.MANAGE, self.to) if self.swap else create]


class TruncateReply(Reply, frozen=True, kw_only=True):
    """Ranges ``[0, end)`` of the tablets."""

    ends: list[TabletRange]


class Truncate(TableRequest[TruncateReply], frozen=True, kw_only=True):
    """Take all rows away; answers at which offsets.

    Of a log table with a lake, the lake decides: without ``ends`` nothing but what is told is made ready, and with
    them the log forgets what is below, as far as the lake holds that it is gone."""

    privilege = Privilege.MANAGE
    ends: list[TabletRange] | None = None


class DropTable(NamedRequest[Done], frozen=True, kw_only=True):
    """Drop a table and its log; with ``purge`` the lake table's files too."""

    privilege = Privilege.MANAGE
    purge: bool

    @property
    def idempotent(self) -> bool:
        return False


# ---- write --------------------------------------------------------------------------------------------------------


class WriteReply(Reply, frozen=True, kw_only=True):
    """Offsets ``[start, end)`` that each part got in this folder's log, durable as the table promises; ``incarnation``
    as in `HelloReply`."""

    offsets: list[tuple[Int64, Int64]]
    folder_id: str = ""
    incarnation: Int64 = 0


class Write(TableRequest[WriteReply], frozen=True, kw_only=True):
    """One batch of one writer, split by tablet; attachment i is the frame body for ``tablets[i]``.

    ``columns`` are those of the bodies' rows, in table order: all for append, some for a partial upsert, the primary
    key for delete.
    """

    privilege = Privilege.WRITE
    kind: WriteKind
    tablets: list[TabletRef]
    checksums: list[Int64]
    columns: list[str]


class WriterReply(Reply, frozen=True, kw_only=True):
    """The new epoch, the sequence up to which all batches are in every tablet they went to, and the writer's last
    sequence up to there in each tablet that has one."""

    epoch: Int64
    last_sequence: Int64
    tablets: list[TabletRef]
    sequences: list[Int64]


class OpenWriter(TableRequest[WriterReply], frozen=True, kw_only=True):
    """Take over a named writer."""

    privilege = Privilege.WRITE
    writer_id: bytes

    @property
    def idempotent(self) -> bool:
        return False


class CloseWriter(TableRequest[Done], frozen=True, kw_only=True):
    """A named writer ends and has seen every answer up to ``acked_through``; of a fenced one nothing is kept."""

    privilege = Privilege.WRITE
    writer_id: bytes
    epoch: Int64
    acked_through: Int64


# ---- read ---------------------------------------------------------------------------------------------------------


class LookupReply(Reply, frozen=True, kw_only=True):
    """``exact`` is False, and there are no rows, when one of the keys may have changed since ``as_of``."""

    exact: bool = True


class Lookup(TableRequest[LookupReply], frozen=True, kw_only=True):
    """Rows by key; attached is the IPC batch of keys, ``counts[i]`` for ``tablets[i]`` after those before. ``prefix``
    asks by leading columns. Reply: the IPC batch of rows found, in that order, then int64 positions in the keys (empty
    for prefixes). ``as_of``: those live at these ends of the tablets' logs; ``bytes_max``: no more of them."""

    privilege = Privilege.READ
    tablets: list[TabletRef]
    counts: list[Int64]
    prefix: list[str]
    as_of: list[Int64] | None = None
    bytes_max: Int64 | None = None


class GetReply(Reply, frozen=True, kw_only=True):
    """``row`` is plain, see `lakehead.format.plain`; None: there is none of that key."""

    row: list[Any] | None


class Get(TableRequest[GetReply], frozen=True, kw_only=True):
    """One row of a table that has plain rows, by its plain primary key, from the tablet where it belongs."""

    privilege = Privilege.READ
    tablet: TabletRef
    key: list[Any]


class TabletState(TabletRef, frozen=True, kw_only=True):
    """Readable offsets ``[log_start, high_watermark)``; ``at_timestamp`` answers ``at_timestamp_us``, None when the row
    asked for may have been trimmed; ``damage`` says what is known to be wrong with the tablet's files. Rows that a lake
    has from below ``overwritten`` are gone."""

    log_start: Int64
    high_watermark: Int64
    rows: Int64
    overwritten: Int64 = 0
    at_timestamp: Int64 | None = None
    damage: str | None = None


class WatermarksReply(Reply, frozen=True, kw_only=True):
    """The offsets are those of this folder's log; ``incarnation`` as in `HelloReply`."""

    tablets: list[TabletState]
    folder_id: str = ""
    incarnation: Int64 = 0


class Watermarks(TableRequest[WatermarksReply], frozen=True, kw_only=True):
    """Readable ranges of all tablets of a table at one moment; ``sync`` makes them durable, whatever its durability."""

    privilege = Privilege.READ
    sync: bool
    at_timestamp_us: Int64 | None = None


class TimestampsReply(Reply, frozen=True, kw_only=True):
    now_us: Int64
    timestamps_us: list[Int64 | None]


class TimestampsAt(TableRequest[TimestampsReply], frozen=True, kw_only=True):
    """Commit timestamps of the rows at ``start`` of each range."""

    privilege = Privilege.READ
    ranges: list[TabletRange]


LEASE_JOINT = "+"
"""Between the ids of leases of several servers, of which each takes its own."""


class LakeUse(Message, frozen=True, kw_only=True):
    """What a read needs of a lake table: one snapshot, None for all, of the version at this address, its metadata."""

    metadata: str
    snapshot: int | None = None


class LeasedTable(Message, frozen=True, kw_only=True):
    """A table that a read will use, and what of its lake table: files that must not be cleaned up."""

    table_id: str
    lake: LakeUse | None
    folder_id: str = ""
    schema_id: Int64 = -1


class Lease(Message, frozen=True, kw_only=True):
    """A lease, and what it holds; while ``incarnation``, the server, lasts, it has the same rows at these offsets."""

    lease: str
    tablets: list[TabletState]
    incarnation: str = ""


class LeasesReply(Reply, frozen=True, kw_only=True):
    """The leases, in the order of the tables, and for how many seconds they last when nobody uses or renews them."""

    leases: list[Lease]
    seconds: float = LEASE_SECONDS


class OpenLeases(Request[LeasesReply], frozen=True, kw_only=True):
    """Pin a read: what every tablet of these tables holds at one moment stays readable under the tables' leases, also
    once it is trimmed, until a lease is released or was neither used nor renewed for the server's ``lease_seconds``.

    ``release`` are leases of this client that are not needed any more. ``planned``: nobody will renew them, because
    others carry the read out; they last for ``planned_lease_seconds``, and give way when the server has no room.
    """

    privilege = Privilege.READ
    tables: list[LeasedTable]
    release: list[str]
    planned: bool = False

    @property
    def about(self) -> Sequence[str | TablePath]:
        return [t.table_id for t in self.tables]


class RenewLeases(Request[Done], frozen=True, kw_only=True):
    """Keep leases as if they had been used now; those that are over are passed by. ``release`` ends others."""

    privilege = Privilege.READ
    leases: list[str]
    release: list[str]


class LakeUsesReply(Reply, frozen=True, kw_only=True):
    uses: list[LakeUse]


class LeasedLake(TableRequest[LakeUsesReply], frozen=True, kw_only=True):
    """What pinned reads of the table still use of its lake table."""

    privilege = Privilege.TIER


class Read(TableRequest[Stream], frozen=True, kw_only=True):
    """Stream: rows of these ranges, each tablet's in offset order. Under a lease, of what the lease holds; one that is
    over reads what there is now. Where ``incarnation`` says which server's they are, another one refuses.

    ``columns`` may name user columns and ``__bucket``, ``__offset``, ``__timestamp``, ``__change_type`` (int8) and
    ``__prev_offset`` (int64, -1 for none). ``predicate`` is a serialised Arrow expression over user columns.
    """

    privilege = Privilege.READ
    ranges: list[TabletRange]
    columns: list[str]
    predicate: bytes | None
    lease: str | None = None
    incarnation: str = ""


class ReadLive(TableRequest[Stream], frozen=True, kw_only=True):
    """Stream: rows of a keyed table that are live at exactly the end of each range, in offset order per tablet; columns
    and others as in `Read`: as if each had just been inserted (+I), but for offset and commit time."""

    privilege = Privilege.READ
    ranges: list[TabletRange]
    columns: list[str]
    predicate: bytes | None
    lease: str | None = None
    incarnation: str = ""


class Subscribe(TableRequest[Stream], frozen=True, kw_only=True):
    """Stream without end: rows as soon as they are readable.

    ``starts`` are explicit offsets; tablets not named start at ``default``; tablets created later start at 0.
    ``full`` sends a keyed tablet's live rows as +I first. ``stops`` end a tablet at an offset; the stream ends when all
    of them are reached. Columns as in `Read`.
    """

    privilege = Privilege.READ
    starts: list[TabletRange]
    default: Literal["latest", "earliest", "full"]
    stops: list[TabletRange] | None
    columns: list[str]
    predicate: bytes | None


# ---- lake ---------------------------------------------------------------------------------------------------------


class LakeReply(Reply, frozen=True, kw_only=True):
    """``metadata_location`` is the current Iceberg metadata file; the catalog's name and properties open it for
    writing, the storage properties for reading.

    A commit may follow one of ``owner``, who is known to be the server's folder, or of ``incarnation``, the server.
    ``name`` is what the catalog calls the table, where that is known. Rows below the ends of ``overwritten`` are gone.
    """

    metadata_location: str
    catalog_name: str
    catalog_properties: dict[str, str]
    storage_properties: dict[str, str]
    incarnation: str = ""
    owner: str = ""
    name: str = ""
    overwritten: tuple[TabletRange, ...] = ()

    @property
    def may_commit(self) -> bool:
        """Whether this is all of it, and not what those get who may not commit."""
        return bool(self.catalog_name or self.catalog_properties)

    def for_reading(self) -> LakeReply:
        """The same for those who may not commit: without the catalog and its credentials."""
        return msgspec.structs.replace(self, catalog_name="", catalog_properties={})

    def __repr__(self) -> str:  # the properties hold credentials
        return f"LakeReply(metadata_location={self.metadata_location!r}, owner={self.owner!r})"


class LakeInfo(TableRequest[LakeReply], frozen=True, kw_only=True):
    """Where the table's lake stands now.

    Attributes:
        changelog: of what its lake keeps of its changelog.
    """

    privilege = Privilege.READ
    changelog: bool = False


class AdoptLake(TableRequest[NamesReply], frozen=True, kw_only=True):
    """Take the table's lake over from the folder that this one is a copy of; `NamesReply` of what was taken over."""

    privilege = Privilege.ADMIN


class ErrorReply(Reply, frozen=True, kw_only=True):
    """A `LakeheadError`."""

    code: Int64
    message: str
    context: dict[str, Any]


class Endpoint(Protocol):
    """Something that answers requests: a server in this process, or one behind a transport. Thread-safe."""

    def call(self, request: Request[R], attachments: Sequence[pa.Buffer] = ()) -> tuple[R, list[pa.Buffer]]:
        """The reply to one request, and its attachments.

        Raises:
            LakeheadError: the request was refused or the server cannot be reached.
        """
        ...

    def stream(self, request: Request[Stream]) -> Stream:
        """Open a stream; errors as in `call`, here or while iterating."""
        ...

    def close(self) -> None: ...
