"""Copies of tables: definition and rows as of one moment, under their name once they are complete."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from lakehead.api.display import Displayed
from lakehead.api.table import Table, handle_of
from lakehead.config import Limits
from lakehead.errors import (
    LakeheadError,
    OutcomeUnknownError,
    PermissionDeniedError,
    TableExistsError,
    TableNotFoundError,
    UnavailableError,
)
from lakehead.format.schema import validate_definition
from lakehead.lake.union_read import UnionRead
from lakehead.types import TableDescriptor, TablePath, TabletId

_NAME_MAX = 100


class Tables(Protocol):
    """What a copy asks of its connection."""

    def table(self, name: str) -> Table: ...

    def tables(self) -> list[str]: ...

    def _rename(self, old: str, new: str, *, only: str) -> Table: ...

    def drop_table(self, name: str, *, purge: bool = False) -> None: ...

    def _drop(self, name: str, *, purge: bool, only: str) -> None: ...

    def _created(self, desc: TableDescriptor) -> Table: ...


@dataclass(frozen=True, repr=False)
class TableCopy(Displayed):
    """A copy that was made.

    Attributes:
        table: the new table.
        rows: so many were copied.
        offsets: where the original stood, per tablet: what came later is not in the copy.
    """

    table: Table
    rows: int
    offsets: Mapping[TabletId, int]

    def _facts(self) -> Mapping[str, object]:
        return {"table": repr(self.table.name), "rows": self.rows, "offsets": self.offsets}


def copy_table(con: Tables, source: str, target: str, buckets: int | None) -> TableCopy:
    """See `Connection.copy_table`."""
    path = TablePath.parse(target)
    if str(path) in con.tables():
        raise TableExistsError(f"table {path} exists already: drop it first, or choose another name", table=str(path))
    scan = con.table(source).scan()
    desc = scan._handle.desc
    if buckets is not None:
        _require_possible(desc, buckets)
    made = unfinished_like(con, desc, path, "copy", buckets)
    unfinished, only = made.name, handle_of(made).desc.table_id
    filled = False
    try:
        rows = 0
        with made.writer() as writer:
            for batch in scan.to_batches():
                (writer.upsert if desc.keyed else writer.append)(batch)
                rows += batch.num_rows
        filled = True
        table = con._rename(unfinished, str(path), only=only)
    except BaseException as e:
        with contextlib.suppress(LakeheadError):
            con._drop(unfinished, purge=True, only=only)
        # Which of both tables is gone, the error does not tell.
        if isinstance(e, TableNotFoundError) and str(desc.path) in con.tables():
            raise _made_by_another(desc, path) from e
        if isinstance(e, OutcomeUnknownError) and not filled:  # of the rows of a table that nobody knows
            raise UnavailableError(
                f"table {desc.path} was not copied to {path}: call copy_table again ({e.message})", table=str(desc.path)
            ) from e
        raise
    assert isinstance(scan._read, UnionRead)  # all rows
    return TableCopy(table, rows, {desc.tablet_id(key): end for key, (_, end) in scan._read.pinned.log.items()})


def _require_possible(desc: TableDescriptor, buckets: int) -> None:
    """Raises: InvalidSchemaError: a table like this cannot have so many buckets."""
    validate_definition(
        desc.schema,
        primary_key=desc.primary_key,
        partition_by=desc.partition_by,
        buckets=buckets,
        bucket_key=desc.bucket_key,
        limits=Limits(),
    )


def unfinished_like(
    con: Tables, desc: TableDescriptor, path: TablePath, becoming: str, buckets: int | None = None
) -> Table:
    """An empty table with another one's definition, which gets its name once it is complete.

    Args:
        path: near which it stands until then.
        becoming: what it is to be, for its name; what is left of one that died is removed.
    """
    unfinished = TablePath(path.database, f"{path.table[:_NAME_MAX]}__{becoming}_of_{desc.table_id[:8]}")
    with contextlib.suppress(TableNotFoundError, PermissionDeniedError):
        con.drop_table(str(unfinished), purge=True)
    try:
        made = con._created(
            dataclasses.replace(desc, path=unfinished, buckets=desc.buckets if buckets is None else buckets)
        )
    except TableExistsError as e:
        raise _made_by_another(desc, path) from e
    try:
        _comment(made, desc)
    except BaseException:
        with contextlib.suppress(LakeheadError):
            con._drop(str(unfinished), purge=True, only=handle_of(made).desc.table_id)
        raise
    return made


def _made_by_another(desc: TableDescriptor, path: TablePath) -> TableExistsError:
    return TableExistsError(
        f"another call makes a table like {desc.path} that is to be called {path}, or dropped it: wait for that, or"
        " choose another name",
        table=str(path),
    )


def was_overwritten(desc: TableDescriptor) -> bool:
    """Whether a table has been replaced by one that `unfinished_like` made for ``overwrite``, and waits to be dropped
    under the name that this had."""
    return desc.path.table.endswith(f"__overwrite_of_{desc.table_id[:8]}")


def _comment(made: Table, desc: TableDescriptor) -> None:
    said = {column: desc.comment(column) for column in (None, *desc.schema.names)}
    with made.alter() as a:
        for column, text in said.items():
            if text is not None:
                a.set_comment(column, text)
