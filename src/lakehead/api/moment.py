"""What tables are at one moment: where their logs end, and what the catalog says of the jobs that publish to them.

Of what one thread wrote to several tablets of a table, call after call, a copy has the first part, without gaps.

A tablet knows the batches of a job by numbers that go on from one to the next. A log that holds a batch of which the
catalog of the same copy does not know would take the next one that the job publishes there for that. So both are of one
moment, for all tables that have a job in common: what is published to several of them is there in all or in none.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from lakehead.api.backup_files import database
from lakehead.client.table import TableHandle
from lakehead.format.frame import PUBLISHERS, WriterStamp
from lakehead.server.catalog import Part
from lakehead.server.pieces import job_writer, staged_folder
from lakehead.types import Offset, TabletKey

_COLUMNS = {
    "publications": "job, batch, begun, parts, sequence, lasting, at_us",
    "truncations": "tablet, before",
    "overwritten": "tablet, before, job, batch",
}
"""Of the catalog's tables that tell how far something has come that is not done in one step."""
_ATTEMPTS = 1000
_Rows = Mapping[str, list[tuple[Any, ...]]]


def groups(metadata: str, table_ids: Iterable[str]) -> dict[frozenset[str], bool]:
    """These tables, together those that are to be of one moment; and whether anything is published to them."""
    with database(metadata) as db:
        of_jobs: list[tuple[str, str]] = db.execute("select table_id, job from publications").fetchall()
        replaced = {str(i) for (i,) in db.execute("select distinct table_id from overwritten")}
    by_job: dict[str, set[str]] = {}
    for table_id, job in of_jobs:
        by_job.setdefault(job, set()).add(table_id)
    published = replaced.union(*by_job.values())
    group = {table_id: frozenset([table_id]) for table_id in table_ids}
    for together in by_job.values():
        merged = frozenset().union(*(group[i] for i in together if i in group))
        group.update(dict.fromkeys(merged, merged))
    return {found: not published.isdisjoint(found) for found in group.values()}


@dataclass(frozen=True)
class Moment:
    """See the module; tables are known by their ids.

    Attributes:
        logs: of each tablet, the offsets at which its log began and ended.
    """

    logs: Mapping[str, Mapping[TabletKey, tuple[Offset, Offset]]]
    _rows: Mapping[str, _Rows]

    @classmethod
    def now(cls, metadata: str, handles: Iterable[TableHandle]) -> Moment | None:
        """What is so while nothing is decided about any of these tables; None where something always was."""
        of = {handle.desc.table_id: handle.log for handle in handles}
        with database(metadata) as db:
            before = _read(db, of)
            for _ in range(_ATTEMPTS):
                tablets = {table_id: log.tablets() for table_id, log in of.items()}
                after = _read(db, of)
                if after == before:
                    logs = {i: {t.key: (t.log_start, t.high_watermark) for t in some} for i, some in tablets.items()}
                    return cls(logs, after)
                before = after
        return None

    def lasts(self, metadata: str) -> bool:
        """Whether nothing was decided, or carried out, since."""
        with database(metadata) as db:
            return _read(db, self._rows) == self._rows

    def overwritten(self, table_id: str) -> dict[TabletKey, Offset]:
        """Below which offsets tablets have no rows that a lake may have."""
        return {TabletKey.parse(tablet): before for tablet, before, *_ in self._rows[table_id]["overwritten"]}

    def staged(self, table_id: str, table_folder: str) -> Iterator[str]:
        """The files of batches that were decided and may not be carried out."""
        for job, _, begun, parts, *_ in self._rows[table_id]["publications"]:
            for part in [] if parts is None else msgspec.msgpack.decode(parts, type=list[Part]):
                if not isinstance(part, bytes):
                    attempt, pieces = part
                    folder = staged_folder(table_folder, job, begun)
                    yield from (f"{folder}/{attempt}-{number}" for number in range(pieces))

    def later(self, table_id: str) -> Callable[[WriterStamp], bool]:
        """Whether a frame of this table is of a batch that a job had not carried out at this moment: of one that was
        decided, too, which is carried out once more where this is opened. Jobs that do not last and are not known are
        forgotten, and nobody goes on with them."""
        publications = self._rows[table_id]["publications"]
        known = {job_writer(job): int(sequence) for job, _, _, _, sequence, *_ in publications}

        def is_later(stamp: WriterStamp) -> bool:
            if not stamp.writer_id.startswith(PUBLISHERS):
                return False
            return stamp.sequence >= known.get(stamp.writer_id, 0 if stamp.epoch else stamp.sequence + 1)

        return is_later

    def write(self, db: sqlite3.Connection, table_ids: Container[str]) -> None:
        """Have a copy of the catalog say what was so of these tables."""
        for table_id, tables in self._rows.items():
            for name, rows in tables.items() if table_id in table_ids else ():
                db.execute(f"delete from {name} where table_id = ?", (table_id,))
                columns = _COLUMNS[name]
                places = ", ".join("?" * (columns.count(",") + 2))
                sql = f"insert into {name}(table_id, {columns}) values ({places})"
                db.executemany(sql, [(table_id, *row) for row in rows])


def _read(db: sqlite3.Connection, table_ids: Iterable[str]) -> dict[str, _Rows]:
    db.execute("begin")
    try:
        return {
            table_id: {
                name: db.execute(
                    f"select {columns} from {name} where table_id = ? order by rowid", (table_id,)
                ).fetchall()
                for name, columns in _COLUMNS.items()
            }
            for table_id in table_ids
        }
    finally:
        db.execute("rollback")
