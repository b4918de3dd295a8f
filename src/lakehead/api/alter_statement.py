"""ALTER TABLE in SQL: DuckDB makes the change to an empty copy of the table, and what came of it is made of the table.

So names, types, quotes and IF EXISTS are as DuckDB has them. One statement is one change.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, cast

import duckdb
import pyarrow as pa
from duckdb.sqltypes import DuckDBPyType

from lakehead.api.alteration import TableAlteration
from lakehead.api.statement import ALTER_TABLE_TAKES, Statement, is_literal, says
from lakehead.api.table import Table
from lakehead.errors import ColumnNotFoundError, InvalidSchemaError, SqlError
from lakehead.format.schema import nearest_name, normalize_schema

_AS_IT_WAS = "ENUM('as it was')"
"""The type of what holds no fields in the copy: none that a statement would give to a column, and DuckDB casts it to
any other."""
_NO_FIELD = re.compile(r"^Catalog Error: Cannot (rename|drop|add) (field|column)")
_NO_COLUMN = re.compile(r'does not have a column with name "(.*)"')


class _Column(NamedTuple):
    name: str
    type: str
    nullable: bool
    default: str | None = None


class EmptyCopy:
    """A table of DuckDB with a table's columns, on which a statement is tried."""

    def __init__(self, cursor: duckdb.DuckDBPyConnection, catalog: str, table: Table) -> None:
        schema, _, name = table.name.partition(".")
        self._cursor = cursor
        self._table = table
        self._at = (catalog, schema, name)
        cursor.execute(f"create schema if not exists {_name(catalog, schema)}")
        self._create([_Column(f.name, _unsaid_type(f.type), f.nullable) for f in table.schema])
        self._before = self._columns()
        self._types = self._duckdb_types()
        self._with_default = False
        self._unsaid = f"as it was {id(self)}"

    def run(self, statement: Statement, params: object) -> None:
        """Let DuckDB make the change.

        Raises:
            ColumnNotFoundError: the table has no such column.
            SqlError: DuckDB makes no such change, or Lakehead does not.
        """
        if statement.recomputes:
            raise _refused(self._table.name, "USING would write rows anew: add a column, and write it")
        self._with_default = says(statement.text, "default")
        try:
            self._cursor.execute(statement.text, params)
        except duckdb.NotImplementedException as e:
            raise _refused(self._table.name, str(e)) from e
        except (duckdb.BinderException, duckdb.CatalogException) as e:
            if missing := _NO_COLUMN.search(str(e)):
                near = nearest_name(missing[1], self._table.schema.names)
                raise ColumnNotFoundError(
                    f"{self._table.name} has no column {missing[1]!r}; {near}", column=missing[1]
                ) from e
            if "nested type" in str(e) or _NO_FIELD.match(str(e)):
                raise _refused(self._table.name, str(e).splitlines()[0].partition(": ")[2]) from e
            raise

    def run_comment(self, statement: Statement, params: object, alteration: TableAlteration) -> None:
        """Let DuckDB say what the table or a column is, and say it of the table; errors as `run`."""
        columns = [(*self._at, c.name) for c in self._before]
        for kind, names in (("table", [self._at]), ("column", columns)):
            for name in names:
                self._cursor.execute(f"comment on {kind} {_name(*name)} is '{self._unsaid}'")
        self.run(statement, params)
        said = [(None, *self._known("select comment from duckdb_tables()")[0])]
        said += self._known("select column_name, comment from duckdb_columns()")
        for name, text in said:
            if text != self._unsaid:
                alteration.set_comment(name, text)

    def new_name(self) -> str | None:
        """What the statement has called the table; None when it has the name that it had."""
        if self._text() is not None:
            return None
        catalog, schema, _ = self._at
        sql = "select table_name from duckdb_tables() where database_name = ? and schema_name = ?"
        ((name,),) = self._cursor.execute(sql, (catalog, schema)).fetchall()
        return f"{schema}.{name}"

    def tell(self, alteration: TableAlteration) -> None:
        """Make the same change of the table's columns.

        Raises:
            SqlError: it is none that Lakehead makes.
            InvalidSchemaError: a type is not supported.
        """
        text, after = self._text(), self._columns()
        before = self._before
        if len(after) > len(before):
            new = after[-1]
            alteration.add_column(new.name, self._type(new), default=self._default(new))
        elif len(after) < len(before):
            (gone,) = {c.name for c in before} - {c.name for c in after}
            alteration.drop_column(gone)
        for was, now in zip(before, after, strict=False) if len(after) == len(before) else ():
            if was.name != now.name:
                alteration.rename_column(was.name, now.name)
            if was.type != now.type and _AS_IT_WAS in now.type:
                self._tell_fields(alteration, was.name, self._types[was.name], self._duckdb_types()[now.name])
            elif was.type != now.type:
                alteration.widen_column(was.name, self._type(now))
            if now.default is not None:
                raise _refused(self._table.name, f"{was.name!r} gets a default when it is added, or never")
            if was.nullable > now.nullable:
                raise _refused(self._table.name, f"rows may be null in {was.name!r}, and stay as they are")
            if was.nullable < now.nullable:
                alteration.make_nullable(was.name)
        # What the catalog says beyond that: constraints, collations.
        self._create(after)
        if self._text() != text:
            raise _refused(self._table.name, "columns have no constraints or collations: leave it away")

    def _tell_fields(self, alteration: TableAlteration, path: str, was: DuckDBPyType, now: DuckDBPyType) -> None:
        """The same for the fields inside a column, of which a statement adds, renames or drops one."""
        old, new = (_fields(t) for t in (was, now))
        if len(new) > len(old):
            if self._with_default:
                raise _refused(self._table.name, "fields inside a column have no defaults: they are null in old rows")
            name = next(reversed(new))
            alteration.add_column(f"{path}.{name}", self._type(_Column(name, str(new[name]), nullable=True)))
        elif len(new) < len(old):
            (gone,) = old.keys() - new.keys()
            alteration.drop_column(f"{path}.{gone}")
        else:
            for before, after in zip(old, new, strict=True):
                inside = f"{path}.{'element' if was.id == 'list' else before}"
                if before != after:
                    alteration.rename_column(inside, after)
                if str(old[before]) != str(new[after]):
                    self._tell_fields(alteration, inside, old[before], new[after])

    def _duckdb_types(self) -> dict[str, DuckDBPyType]:
        found = self._cursor.sql(f"select * from {_name(*self._at)} limit 0")
        return dict(zip(found.columns, found.types, strict=True))

    def _create(self, columns: list[_Column]) -> None:
        texts = [
            f"{_name(c.name)} {c.type}{'' if c.nullable else ' not null'}"
            f"{'' if c.default is None else f' default ({c.default})'}"
            for c in columns
        ]
        self._cursor.execute(f"create or replace table {_name(*self._at)} ({', '.join(texts)})")

    def _columns(self) -> list[_Column]:
        asked = "select column_name, data_type, is_nullable, column_default from duckdb_columns()"
        return [_Column(*row) for row in self._known(asked, "order by column_index")]

    def _text(self) -> str | None:
        """What defines the copy, in DuckDB's words; None when it has no more the name that it had."""
        found = self._known("select sql from duckdb_tables()")
        return found[0][0] if found else None

    def _known(self, asked: str, then: str = "") -> list[tuple[Any, ...]]:
        where = "database_name = ? and schema_name = ? and table_name = ?"
        return self._cursor.execute(f"{asked} where {where} {then}", self._at).fetchall()

    def _type(self, column: _Column) -> pa.DataType:
        """The type of a column or field of the copy."""
        found = self._cursor.sql(f"select cast(null as {column.type}) as {_name(column.name)} limit 0").to_arrow_table()
        plain = normalize_schema(found.schema)
        (held,) = self._cursor.from_arrow(plain.empty_table()).types
        if str(held) != column.type:
            raise InvalidSchemaError(
                f"column {column.name!r} has the type {column.type}, which is not supported: use {held}",
                column=column.name,
            )
        return plain.field(0).type

    def _default(self, column: _Column) -> object:
        """The value of the default of a column of the copy, which is to be a literal."""
        if column.default is None:
            return None
        if not is_literal(self._cursor, column.default):
            raise _refused(self._table.name, f"the default of {column.name!r} is to be a literal, not {column.default}")
        try:
            found = self._cursor.sql(f"select cast(({column.default}) as {column.type}) as v").to_arrow_table()
        except duckdb.ConversionException as e:
            raise _refused(
                self._table.name, f"the default of {column.name!r} is no {column.type}: {str(e).splitlines()[0]}"
            ) from e
        return found.column("v")[0]


def _fields(t: DuckDBPyType) -> dict[str, DuckDBPyType]:
    """What is inside a type, by name."""
    return dict(cast("list[tuple[str, DuckDBPyType]]", t.children)) if t.id in ("struct", "list", "map") else {}


def _unsaid_type(t: pa.DataType) -> str:
    """The type of a column of the copy, which has the same fields."""
    if pa.types.is_struct(t):
        return f"struct({', '.join(f'{_name(f.name)} {_unsaid_type(f.type)}' for f in t.fields)})"
    if pa.types.is_map(t):
        return f"map({_AS_IT_WAS}, {_unsaid_type(t.item_type)})"
    return f"{_unsaid_type(t.value_type)}[]" if pa.types.is_list(t) else _AS_IT_WAS


def _refused(table: str, why: str) -> SqlError:
    return SqlError(
        f"{table} cannot be changed in this way: {why}. {ALTER_TABLE_TAKES}. Nothing was changed", statement="ALTER"
    )


def _name(*parts: str) -> str:
    return ".".join('"' + p.replace('"', '""') + '"' for p in parts)
