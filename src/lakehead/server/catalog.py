"""Changes of the catalog: what may be asked of it, what that comes to, and how it is done.

`plan` reads, refuses what cannot be, and completes a command with the numbers that it gets; `apply` does a planned
command, and is the only thing that changes the catalog. The same planned commands in the same order make the same
catalog, wherever they are applied. SQLite is where it is kept (`lakehead.server.metadata`).
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence
from typing import Self, TypeAlias, TypeVar

import msgspec

from lakehead.errors import LimitExceededError, PermissionDeniedError, TableExistsError
from lakehead.protocol.privileges import OF_MAKER, Privilege
from lakehead.protocol.schemas import schema_to_text
from lakehead.protocol.staging import PLANNED_KEPT, PLANNED_KNOWN
from lakehead.protocol.table_info import TableInfo
from lakehead.types import TableDescriptor, TablePath

DIGEST = "sha256 "


class _Definition(msgspec.Struct, frozen=True, tag=True):
    """A table's definition; ``schemas`` are ids and texts of all that it ever had."""

    info: TableInfo
    schemas: list[tuple[int, str]]

    @classmethod
    def of(cls, desc: TableDescriptor) -> Self:
        return cls(TableInfo.of(desc), [(s.id, schema_to_text(s)) for s in desc.schemas.known])


class CreateTable(_Definition, frozen=True, tag=True):
    """Make a table, and its database where it is the first in it. ``maker`` is granted what `OF_MAKER` says. Its lake
    table is to be made next."""

    maker: str = ""


class LakeMade(msgspec.Struct, frozen=True, tag=True):
    """The lake table of a new table is there."""

    table_id: str


class AlterTable(_Definition, frozen=True, tag=True):
    """Give a table another definition."""


class RenameTables(msgspec.Struct, frozen=True, tag=True):
    """Call tables something else, all at once: they may have each other's names. Two that change places change grants:
    whoever may read what a name means may read what it means then."""

    infos: list[TableInfo]


class DropTable(msgspec.Struct, frozen=True, tag=True):
    """Forget a table; its folder is remembered until it is removed."""

    table_id: str
    folder: str


class TruncateTable(msgspec.Struct, frozen=True, tag=True):
    """No row of a table below these offsets, by `str` of its `TabletKey`, is there any more; the tablets follow."""

    table_id: str
    ends: dict[str, int]


class EndTruncation(msgspec.Struct, frozen=True, tag=True):
    """All tablets have followed."""

    table_id: str


class ForgetFolder(msgspec.Struct, frozen=True, tag=True):
    """Nothing of a dropped table's folder is left."""

    folder: str


class CreatePartition(msgspec.Struct, frozen=True, tag=True):
    """Make a partition, unless it is there. ``number`` is planned: no other partition of the folder ever has it."""

    table_id: str
    name: str
    number: int = 0


class RegisterWriter(msgspec.Struct, frozen=True, tag=True):
    """Let somebody write under a name, and nobody else any more. ``epoch`` is planned: higher than any before.

    The name is then ``owner``'s, a principal's, or nobody's in particular. Whose it was before keeps it, unless
    ``taking`` it is allowed.
    """

    table_id: str
    writer_id: bytes
    writers_max: int
    epoch: int = 0
    owner: str = ""
    taking: bool = True


class EndWriter(msgspec.Struct, frozen=True, tag=True):
    """Remember what a named writer had seen answered when it ended; nothing happens when another has its name."""

    table_id: str
    writer_id: bytes
    epoch: int
    acked_through: int


Part: TypeAlias = tuple[str, int] | bytes


class BeginPublication(msgspec.Struct, frozen=True, tag=True):
    """What a job has for a batch is to be part of its tables, which are known by their ids: ``parts`` are attempts, and
    how many pieces each has staged, or the bytes of one piece that was not. Rows of tables below the offsets in
    ``truncates``, per tablet, are gone then; in ``overwrites`` are those of tables whose lake may hold such rows, where
    the offsets stay known. Jobs that were never ``lasting`` and ended before ``forget_before_us`` are
    forgotten. ``planned`` is what the batch is made of, as of `lakehead.protocol.staging.Publish`."""

    job: str
    batch: int
    parts: dict[str, list[Part]]
    lasting: bool
    jobs_max: int
    forget_before_us: int
    truncates: dict[str, dict[str, int]] = {}
    overwrites: dict[str, dict[str, int]] = {}
    planned: str = ""


class EndPublication(msgspec.Struct, frozen=True, tag=True):
    """It is. ``sequence`` is the number of the next batch that the job writes to tablets."""

    table_id: str
    job: str
    batch: int
    sequence: int
    at_us: int


class AddToken(msgspec.Struct, frozen=True, tag=True):
    """Know a principal by a token, of whose secret ``digest`` is the SHA-256; for ever, without ``expires_us``."""

    id: str
    principal: str
    digest: bytes
    created_us: int
    expires_us: int | None
    tokens_max: int


class RemoveToken(msgspec.Struct, frozen=True, tag=True):
    """Know nobody by it any more."""

    id: str


class GrantPrivileges(msgspec.Struct, frozen=True, tag=True):
    """Let a principal or role do this in a database, or in all (``*``), or with a table, whose id is then given."""

    grantee: str
    database: str
    table_id: str
    privileges: list[str]
    grants_max: int


class RevokePrivileges(msgspec.Struct, frozen=True, tag=True):
    """Take grants back, as far as they are there."""

    grantee: str
    database: str
    table_id: str
    privileges: list[str]


class GiveRole(msgspec.Struct, frozen=True, tag=True):
    """Let a principal do what a role may."""

    principal: str
    role: str
    grants_max: int


class TakeRole(msgspec.Struct, frozen=True, tag=True):
    """Let it no more."""

    principal: str
    role: str


class SetQuota(msgspec.Struct, frozen=True, tag=True):
    """Bound what a principal takes, or each that has no quota of its own (``*``), by the fields of a `Quota` that are
    given; by nothing where none is."""

    principal: str
    bounds: dict[str, int]
    quotas_max: int


Command = (
    CreateTable
    | LakeMade
    | AlterTable
    | RenameTables
    | TruncateTable
    | EndTruncation
    | DropTable
    | ForgetFolder
    | CreatePartition
    | RegisterWriter
    | EndWriter
    | BeginPublication
    | EndPublication
    | AddToken
    | RemoveToken
    | GrantPrivileges
    | RevokePrivileges
    | GiveRole
    | TakeRole
    | SetQuota
)
CHANGES_ACCESS = (
    CreateTable, DropTable, RenameTables, AddToken, RemoveToken, GrantPrivileges, RevokePrivileges, GiveRole, TakeRole,
    SetQuota,
)  # fmt: skip
"""Commands after which somebody may do something else than before."""
C = TypeVar("C", bound=Command)
_OF_TABLES = (
    "tables", "schemas", "partitions", "writers", "writer_owners", "truncations", "overwritten", "publications",
    "planned", "grants", "makers", "lakes_to_make",
)  # fmt: skip


def plan(db: sqlite3.Connection, command: C) -> C:
    """The command with the numbers that it gets; changes nothing.

    Raises:
        TableExistsError: a table of that name exists.
        LimitExceededError: the table has had so many other named writers already, or there are so many tokens, or
            grants.
        PermissionDeniedError: the writer's name is another's.
    """
    match command:
        case CreateTable(info=info):
            if _named(db, info.path):
                raise TableExistsError(
                    f"table {info.path} exists already: pass if_not_exists=True or drop it first", table=str(info.path)
                )
        case RenameTables(infos=infos):
            for path in (i.path for i in infos):
                if _named(db, path) - {i.table_id for i in infos}:
                    raise TableExistsError(
                        f"table {path} exists already: drop it first, or let the two have each other's names with"
                        " swap=True",
                        table=str(path),
                    )
        case CreatePartition():
            known = "select id from partitions where table_id = ? and name = ?"
            last = "select seq from sqlite_sequence where name = 'partitions'"
            number = _one(db, known, command.table_id, command.name) or (_one(db, last) or 0) + 1
            return msgspec.structs.replace(command, number=number)
        case RegisterWriter():
            others = "select count(*) from writers where table_id = ? and writer_id != ?"
            if (_one(db, others, command.table_id, command.writer_id) or 0) >= command.writers_max:
                raise LimitExceededError(
                    f"the table has had {command.writers_max:,} named writers, the limit: give a writer_id to each"
                    " job, not to each run of it",
                    named_writers_max=command.writers_max,
                )
            newest = "select epoch from writers where table_id = ? and writer_id = ?"
            epoch = _one(db, newest, command.table_id, command.writer_id)
            if epoch is not None and not command.taking:
                require_own_writer(writer_owner(db, command.table_id, command.writer_id), command.owner)
            return msgspec.structs.replace(command, epoch=(epoch or 0) + 1)
        case BeginPublication(lasting=True):
            others = "select count(*) from publications where table_id = ? and job != ? and lasting"
            if any((_one(db, others, t, command.job) or 0) >= command.jobs_max for t in command.parts):
                raise LimitExceededError(
                    f"{command.jobs_max:,} streaming queries have written to a table, the limit: let a query go on"
                    " from its checkpoint, instead of beginning a new one each time",
                    named_writers_max=command.jobs_max,
                )
        case AddToken():
            if (_one(db, "select count(*) from tokens") or 0) >= command.tokens_max:
                raise LimitExceededError(
                    f"there are {command.tokens_max:,} tokens, the limit: revoke those that nobody uses",
                    tokens_max=command.tokens_max,
                )
        case GrantPrivileges() | GiveRole():
            count = sum(_one(db, f"select count(*) from {table}") or 0 for table in ("grants", "roles"))
            if count >= command.grants_max:
                raise LimitExceededError(
                    f"there are {command.grants_max:,} grants, the limit: grant to roles, on databases",
                    grants_max=command.grants_max,
                )
        case SetQuota(bounds=bounds) if bounds:
            count = _one(db, "select count(*) from quotas where principal != ?", command.principal) or 0
            if count >= command.quotas_max:
                raise LimitExceededError(
                    f"there are {command.quotas_max:,} quotas, the limit: set one for * instead of one for each",
                    quotas_max=command.quotas_max,
                )
    return command


def changed_tables(command: Command) -> Sequence[str]:
    """Ids of tables that a command makes, defines anew, or drops."""
    match command:
        case CreateTable(info=info) | AlterTable(info=info):
            return [info.table_id]
        case RenameTables(infos=infos):
            return [info.table_id for info in infos]
        case DropTable(table_id=table_id):
            return [table_id]
    return []


def digest_of(planned: str) -> str:
    """What tells what a batch was made of from all else; empty of nothing."""
    if not planned or planned.startswith(DIGEST):
        return planned
    return f"{DIGEST}{hashlib.sha256(planned.encode()).hexdigest()}"


def _shorten_planned(db: sqlite3.Connection, table_id: str, job: str, batch: int) -> None:
    """Keep of older batches what tells them from others, and nothing of those long before."""
    job_of = "where table_id = ? and job = ? and batch"
    # What is not short yet was among the last ones when the batch before this came.
    last = f"select batch, planned from planned {job_of} <= ? order by batch desc limit ?"
    for number, planned in db.execute(last, (table_id, job, batch - PLANNED_KEPT, PLANNED_KEPT)).fetchall():
        if (short := digest_of(planned)) != planned:
            db.execute(f"update planned set planned = ? {job_of} = ?", (short, table_id, job, number))
    db.execute(f"delete from planned {job_of} <= ?", (table_id, job, batch - PLANNED_KNOWN))


def apply(db: sqlite3.Connection, position: int, command: Command) -> None:
    """Do a planned command, in a transaction of the caller, and note its position."""
    match command:
        case CreateTable(info=info):
            db.execute("insert or ignore into databases values (?)", (info.database,))
            row = (info.table_id, info.database, info.table, msgspec.msgpack.encode(info))
            db.execute("insert into tables values (?, ?, ?, ?)", row)
            db.executemany("insert into schemas values (?, ?, ?)", [(info.table_id, *s) for s in command.schemas])
            if info.lake is not None:
                db.execute("insert into lakes_to_make values (?)", (info.table_id,))
            if command.maker:
                of_maker = [(command.maker, "", info.table_id, p.value) for p in OF_MAKER]
                db.executemany("insert or ignore into grants values (?, ?, ?, ?)", of_maker)
                db.execute("insert or ignore into makers values (?, ?)", (info.table_id, command.maker))
        case LakeMade():
            db.execute("delete from lakes_to_make where table_id = ?", (command.table_id,))
        case AlterTable(info=info):
            db.execute("update tables set info = ? where table_id = ?", (msgspec.msgpack.encode(info), info.table_id))
            schemas = [(info.table_id, *s) for s in command.schemas]
            db.executemany("insert or ignore into schemas values (?, ?, ?)", schemas)
        case RenameTables(infos=infos):
            for info in infos:  # out of the way of each other
                db.execute("update tables set name = ? where table_id = ?", (f"__{info.table_id}", info.table_id))
            for info in infos:
                path, stored = info.path, msgspec.msgpack.encode(info)
                db.execute("insert or ignore into databases values (?)", (path.database,))
                sql = "update tables set database = ?, name = ?, info = ? where table_id = ?"
                db.execute(sql, (path.database, path.table, stored, info.table_id))
            if len(infos) == 2:
                one, other = (info.table_id for info in infos)
                held = db.execute("select * from grants where table_id in (?, ?)", (one, other)).fetchall()
                db.execute("delete from grants where table_id in (?, ?)", (one, other))
                changed = [(to, d, other if t == one else one, privilege) for to, d, t, privilege in held]
                db.executemany("insert into grants values (?, ?, ?, ?)", changed)
        case DropTable():
            for table in _OF_TABLES:
                db.execute(f"delete from {table} where table_id = ?", (command.table_id,))
            db.execute("insert or ignore into dropped values (?)", (command.folder,))
        case TruncateTable():
            rows = [(command.table_id, *end) for end in command.ends.items()]
            db.executemany("insert or replace into truncations values (?, ?, ?)", rows)
        case EndTruncation():
            db.execute("delete from truncations where table_id = ?", (command.table_id,))
        case ForgetFolder():
            db.execute("delete from dropped where folder = ?", (command.folder,))
        case CreatePartition():
            sql = "insert or ignore into partitions(id, table_id, name) values (?, ?, ?)"
            db.execute(sql, (command.number, command.table_id, command.name))
        case RegisterWriter():
            db.execute(
                "insert into writers(table_id, writer_id, epoch) values (?, ?, ?)"
                " on conflict(table_id, writer_id) do update set epoch = excluded.epoch",
                (command.table_id, command.writer_id, command.epoch),
            )
            if command.owner:
                own = (command.table_id, command.writer_id, command.owner)
                db.execute("insert or replace into writer_owners values (?, ?, ?)", own)
            else:
                sql = "delete from writer_owners where table_id = ? and writer_id = ?"
                db.execute(sql, (command.table_id, command.writer_id))
        case EndWriter():
            db.execute(
                "update writers set acked_through = max(acked_through, ?)"
                " where table_id = ? and writer_id = ? and epoch = ?",
                (command.acked_through, command.table_id, command.writer_id, command.epoch),
            )
        case BeginPublication():
            for table_id, parts in command.parts.items():
                sql = "delete from publications where table_id = ? and not lasting and begun is null and at_us < ?"
                db.execute(sql, (table_id, command.forget_before_us))
                db.execute(
                    "insert into publications(table_id, job, begun, parts, lasting) values (?, ?, ?, ?, ?)"
                    " on conflict(table_id, job) do update set begun = excluded.begun, parts = excluded.parts,"
                    " lasting = max(lasting, excluded.lasting)",
                    (table_id, command.job, command.batch, msgspec.msgpack.encode(parts), command.lasting),
                )
                if command.lasting:
                    of_batch = (table_id, command.job, command.batch)
                    db.execute("insert or replace into planned values (?, ?, ?, ?)", (*of_batch, command.planned))
                    _shorten_planned(db, *of_batch)
                rows = [(table_id, *end) for end in command.truncates.get(table_id, {}).items()]
                db.executemany("insert or replace into truncations values (?, ?, ?)", rows)
                of = command.job, command.batch
                over = [(table_id, *end, *of) for end in command.overwrites.get(table_id, {}).items()]
                db.executemany("insert or replace into overwritten values (?, ?, ?, ?, ?)", over)
        case EndPublication():
            db.execute(
                "update publications set batch = ?, begun = null, parts = null, sequence = ?, at_us = ?"
                " where table_id = ? and job = ?",
                (command.batch, command.sequence, command.at_us, command.table_id, command.job),
            )
        case AddToken():
            token = (command.id, command.principal, command.digest, command.created_us, command.expires_us)
            db.execute("insert into tokens values (?, ?, ?, ?, ?)", token)
        case RemoveToken():
            db.execute("delete from tokens where id = ?", (command.id,))
        case GrantPrivileges():
            on = (command.grantee, command.database, command.table_id)
            given = [(*on, privilege) for privilege in command.privileges]
            db.executemany("insert or ignore into grants values (?, ?, ?, ?)", given)
        case RevokePrivileges():
            sql = "delete from grants where grantee = ? and database = ? and table_id = ? and privilege = ?"
            on = (command.grantee, command.database, command.table_id)
            db.executemany(sql, [(*on, privilege) for privilege in command.privileges])
        case GiveRole():
            db.execute("insert or ignore into roles values (?, ?)", (command.principal, command.role))
        case TakeRole():
            db.execute("delete from roles where principal = ? and role = ?", (command.principal, command.role))
        case SetQuota():
            db.execute("delete from quotas where principal = ?", (command.principal,))
            if command.bounds:
                bounds = msgspec.msgpack.encode(command.bounds)
                db.execute("insert into quotas values (?, ?)", (command.principal, bounds))
    db.execute("insert or replace into meta values ('position', ?)", (str(position),))


def writer_owner(db: sqlite3.Connection, table_id: str, writer_id: bytes) -> str:
    """The principal whose a writer's name is; no text where it is nobody's in particular."""
    sql = "select owner from writer_owners where table_id = ? and writer_id = ?"
    found = db.execute(sql, (table_id, writer_id)).fetchone()
    return "" if found is None else str(found[0])


def require_own_writer(owner: str, sender: str) -> None:
    """Raises: PermissionDeniedError: a writer's name is another's than who sends a request."""
    if owner != sender:
        raise PermissionDeniedError(
            "the writer_id is another's: use one of your own, or have who may manage the table open it",
            privilege=Privilege.MANAGE.value,
        )


def position(db: sqlite3.Connection) -> int:
    """How many commands were applied; those before this was counted are not among them."""
    return int(_one(db, "select value from meta where name = 'position'") or 0)


def _named(db: sqlite3.Connection, path: TablePath) -> set[str]:
    """The id of the table of a name."""
    sql = "select table_id from tables where database = ? and name = ?"
    return {str(found) for (found,) in db.execute(sql, (path.database, path.table))}


def _one(db: sqlite3.Connection, sql: str, *args: object) -> int | None:
    row = db.execute(sql, args).fetchone()
    return None if row is None else int(row[0])
