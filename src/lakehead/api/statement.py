"""What DuckDB's own parser says of a statement: whether it reads, or alters a table, and which tables it names.

Nothing here runs a statement: what is refused has had no effect.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import duckdb

from lakehead.api.definition import is_text
from lakehead.api.point_query import PointQuery, point_query
from lakehead.api.table_names import TableName, find_names
from lakehead.env.recently_used import RecentlyUsed
from lakehead.errors import SqlError

_INSTEAD = {
    "INSERT": "write with table.append(rows) or table.upsert(rows)",
    "UPDATE": "change columns by key with table.upsert(rows, columns=[...])",
    "DELETE": "delete by key with table.delete(keys)",
    "TRUNCATE": "take all rows away with table.truncate()",
    "MERGE_INTO": "write with table.upsert(rows) and table.delete(keys)",
    "CREATE": "make tables with con.create_table(name, schema); keep the text of what would be a view, or pass in a"
    " relation: frames={'name': relation}",
    "CREATE_FUNC": "write the expression out",
    "DROP": "drop tables with con.drop_table(name)",
    "ALTER": "tables and their columns are changed by ALTER TABLE, by itself, and have comments by COMMENT ON; nothing"
    " else does",
    "COPY": "write the relation: con.sql('select ...').write_parquet(path), or .write_csv(path)",
    "EXPORT": "write the relation: con.sql('select ...').write_parquet(path)",
    "COPY_DATABASE": "write the relation: con.sql('select ...').write_parquet(path)",
    "ATTACH": "read the other database with duckdb and pass its rows in: con.sql(query, frames={'name': rows})",
    "DETACH": "there is nothing attached: each statement stands for itself",
    "SET": "settings would end with the statement; a table's database is written before its name: shop.orders",
    "VARIABLE_SET": "pass values in: con.sql('select ... where id = $id', {'id': 7})",
    "PREPARE": "pass values in: con.sql('select ... where id = $id', {'id': 7})",
    "EXECUTE": "pass values in: con.sql('select ... where id = $id', {'id': 7})",
    "LOAD": "load extensions in a duckdb of your own and pass their rows in: con.sql(query, frames={'name': rows})",
    "TRANSACTION": "each statement stands for itself, and all tables that it names are read as of one moment",
    "PRAGMA": "use DESCRIBE table, or SHOW TABLES",
}
ALTER_TABLE_TAKES = (
    "ALTER TABLE takes RENAME TO name, ADD COLUMN name type DEFAULT literal, RENAME COLUMN a TO b, DROP COLUMN, ALTER"
    " COLUMN TYPE for a wider one, and ALTER COLUMN DROP NOT NULL"
)
_ACTS = ("COPY", "EXPORT", "ATTACH", "DETACH", "LOAD", "SET", "VARIABLE_SET", "PRAGMA", "CALL")
_WORD = re.compile(r'(\w+)|"((?:[^"]|"")*)"')
_ADDS_WITH_DEFAULT = ["TRANSACTION", "ALTER", "UPDATE", "ALTER", "TRANSACTION"]
"""What DuckDB makes of ADD COLUMN with a default that is no plain constant."""
_METADATA_FUNCTIONS = (
    *("duckdb_" + about for about in ("columns", "databases", "schemas", "tables", "views")),
    "pragma_show",
)
_METADATA_SCHEMAS = ("information_schema", "pg_catalog")


@dataclass(frozen=True)
class NamedTable:
    """A table's name as a statement has it, quotes taken away; parts that it lacks are ""."""

    catalog: str
    schema: str
    name: str


@dataclass(frozen=True)
class Statement:
    """One statement that reads, or alters a table.

    Attributes:
        text: what DuckDB is to run.
        tables: names that stand where tables do; those of common table expressions, files and views among them.
        shows: ``"tables"``, ``"databases"`` or ``"schemas"`` for a bare SHOW of them.
        catalog: it asks for what tables there are, and needs them all to be known.
        parameters: names, or numbers, of the values that it takes.
        sources: names of functions that stand where tables do, in lower case.
        called: names of functions of which it is not known where they stand.
        acts: it does what `con.sql` takes of unrestricted texts alone; its answer has no rows.
        alters: it is ALTER TABLE, or COMMENT ON, of the table in ``tables``.
        comments: it is COMMENT ON.
        recomputes: it is ALTER TABLE with a USING.
        valued: names of columns, in lower case, that are to equal what is of no column, or to be one of such things.
        point: what it asks of its only table by values of columns.
    """

    text: str
    tables: frozenset[NamedTable]
    shows: str | None = None
    catalog: bool = False
    parameters: tuple[str, ...] = ()
    sources: frozenset[str] = frozenset()
    called: frozenset[str] = frozenset()
    acts: bool = False
    alters: bool = False
    recomputes: bool = False
    comments: bool = False
    valued: frozenset[str] = frozenset()
    point: PointQuery | None = None


_known: RecentlyUsed[tuple[str, bool], Statement] = RecentlyUsed(1 << 20, lambda statement: len(statement.text))


def read_statement(cursor: duckdb.DuckDBPyConnection, query: object, *, unrestricted: bool = False) -> Statement:
    """Understand a statement without running it; what texts that were asked last say is remembered.

    Args:
        unrestricted: take what acts on files, other databases and DuckDB itself, too.

    Raises:
        SqlError: it is none, it is several, or it does something else than read or alter a table; the message says what
            to use instead.
    """
    if not isinstance(query, str):
        raise SqlError(f"a statement is text, such as 'select count(*) from shop.orders', not a {type(query).__name__}")
    if not is_text(query):
        raise SqlError(f"a statement is text that UTF-8 can write, not {query[:100]!r}")
    if not query.strip():
        raise SqlError("the statement is empty: write for example 'select count(*) from shop.orders'")
    statement = _known.get((query, unrestricted))
    if statement is None:
        statement = _understood(cursor, query, unrestricted)
        _known.note((query, unrestricted), statement)
    return statement


def _understood(cursor: duckdb.DuckDBPyConnection, query: str, unrestricted: bool) -> Statement:
    text, parsed = _parsed(cursor, query)
    kinds = [s.type.name for s in parsed]
    if not kinds:
        raise SqlError("the statement is empty: write for example 'select count(*) from shop.orders'")
    if len(kinds) > 1 and kinds == _ADDS_WITH_DEFAULT and _alters_table(text) and not _semicolon(text):
        kinds = ["ALTER"]
    if len(kinds) > 1:
        if kinds[-1] != "SELECT" or _semicolon(text):
            raise SqlError(f"these are {len(kinds)} statements: con.sql() runs one at a time")
        # PIVOT over values that are not listed: DuckDB collects them first, in a type of its own.
        called = _called(text)
        return Statement(text, frozenset(_names_in(text)), catalog=_asks(called), called=called)
    parameters = tuple(sorted(parsed[0].named_parameters))
    if kinds[0] == "ALTER" and _alters_table(text):
        tables, recomputes = frozenset({_altered(text)}), "using" in _keywords(text)
        return Statement(text, tables, parameters=parameters, alters=True, recomputes=recomputes)
    if kinds[0] == "ALTER" and (about := _commented(text)) is not None:
        return Statement(text, frozenset({about}), parameters=parameters, alters=True, comments=True)
    if unrestricted and kinds[0] in _ACTS:
        return Statement(text, frozenset(_names_in(text)), parameters=parameters, acts=True)
    inner = _explained(cursor, text) if kinds[0] == "EXPLAIN" else text
    if kinds[0] not in ("SELECT", "EXPLAIN"):
        raise _refused("TRUNCATE" if _begins(text, "truncate") else kinds[0])  # to DuckDB a DELETE
    tree = _tree(cursor, inner)
    nodes = list(_nodes(tree))
    tables = frozenset(
        NamedTable(n["catalog_name"], n["schema_name"], n["table_name"]) for n in nodes if n.get("type") == "BASE_TABLE"
    )
    shown = [n for n in nodes if n.get("type") == "SHOW_REF" and n.get("query") is None]
    sources = frozenset(_source(n) for n in nodes if n.get("type") == "TABLE_FUNCTION")
    asks = any(t.schema.lower() in _METADATA_SCHEMAS or t.name.lower().startswith("duckdb_") for t in tables)
    return Statement(
        text,
        tables,
        _shows(shown),
        bool(shown) or asks or _asks(sources),
        parameters,
        sources,
        valued=frozenset(_valued(nodes)),
        point=point_query(text, tree, nodes) if kinds[0] == "SELECT" else None,
    )


def _valued(nodes: Sequence[dict[str, Any]]) -> Iterator[str]:
    for node in nodes:
        if node.get("type") == "COMPARE_EQUAL":
            sides = [(node["left"], [node["right"]]), (node["right"], [node["left"]])]
        elif node.get("type") == "COMPARE_IN":
            sides = [(node["children"][0], node["children"][1:])]
        else:
            continue
        for side, others in sides:
            if side.get("class") == "COLUMN_REF" and not any(_is_of_rows(n) for o in others for n in _nodes(o)):
                yield str(side["column_names"][-1]).lower()


def _is_of_rows(node: dict[str, Any]) -> bool:
    return node.get("class") in ("COLUMN_REF", "SUBQUERY")


def _source(node: dict[str, Any]) -> str:
    return str(node["function"].get("function_name", "")).lower()


def _asks(functions: frozenset[str]) -> bool:
    return any(name.startswith(_METADATA_FUNCTIONS) for name in functions)


def _called(text: str) -> frozenset[str]:
    """What stands before an opening bracket, in lower case and without quotes."""
    data, tokens = text.encode(), _tokens(text)
    before = [at for (at, _), (after, _) in pairwise(tokens) if data[after : after + 1] == b"("]
    words = (_WORD.match(data[at:].decode()) for at in before)
    return frozenset((w[1] or w[2].replace('""', '"')).lower() for w in words if w is not None)


def _alters_table(text: str) -> bool:
    return [n.text.lower() for n in islice(find_names(text), 2)] == ["alter", "table"]


def _commented(text: str) -> NamedTable | None:
    """The table that a COMMENT ON is of, or of whose column; None for one of anything else."""
    names = list(islice(find_names(text), 4))
    words = [n.text.lower() for n in names]
    if len(names) < 4 or words[:2] != ["comment", "on"] or words[2] not in ("table", "column"):
        return None
    return _named(names[3] if words[2] == "table" else dataclasses.replace(names[3], path=names[3].path[:-1]))


def _altered(text: str) -> NamedTable:
    """The table that an ALTER TABLE is of."""
    names = list(find_names(text))
    words = [n.text.lower() for n in names]
    at = 4 if words[2:4] == ["if", "exists"] else 2
    return _named(names[at + (words[at] == "only")])


def _keywords(text: str) -> set[str]:
    data = text.encode()
    found = (re.match(rb"\w+", data[at:]) for at, kind in _tokens(text) if kind == "keyword")
    return {word[0].decode().lower() for word in found if word is not None}


def _begins(text: str, keyword: str) -> bool:
    (at, kind), *_ = _tokens(text)
    return kind == "keyword" and text.encode()[at : at + len(keyword)].lower() == keyword.encode()


def _refused(kind: str) -> SqlError:
    name = kind.replace("_", " ")
    instead = _INSTEAD.get(kind, "use SELECT, DESCRIBE, SUMMARIZE, SHOW TABLES, EXPLAIN or ALTER TABLE")
    return SqlError(f"con.sql() reads, and {name} does not: {instead}. Nothing was changed", statement=kind)


def _parsed(cursor: duckdb.DuckDBPyConnection, query: str) -> tuple[str, list[duckdb.Statement]]:
    """The statement, and what it consists of."""
    try:
        return query, cursor.extract_statements(query)
    except duckdb.Error as e:
        # The database that bare names live in is a reserved word.
        quoted = _with_default_quoted(query)
        try:
            if quoted != query:
                return quoted, cursor.extract_statements(quoted)
        except duckdb.Error:
            pass
        known = f"\n{ALTER_TABLE_TAKES}" if _alters_table(query) else ""
        raise SqlError(f"{e}{known}") from e


def _tokens(query: str) -> list[tuple[int, str]]:
    """Byte position and kind of each of DuckDB's tokens."""
    return [(at, kind.name) for at, kind in duckdb.tokenize(query)]


def says(text: str, keyword: str) -> bool:
    """Whether a statement has a keyword, which is given in small letters."""
    data, size = text.encode(), len(keyword)
    return any(kind == "keyword" and data[at : at + size].lower() == keyword.encode() for at, kind in _tokens(text))


def _with_default_quoted(query: str) -> str:
    data, tokens = query.encode(), _tokens(query)
    for at, kind in reversed(tokens):
        word = data[at : at + 7]
        if kind == "keyword" and word.lower() == b"default" and data[at + 7 :].lstrip().startswith(b"."):
            data = data[:at] + b'"default"' + data[at + 7 :]
    return data.decode()


def _semicolon(query: str) -> bool:
    """Whether one stands before the last token."""
    data = query.encode()
    return any(kind == "operator" and data[at : at + 1] == b";" for at, kind in _tokens(query)[:-1])


def _explained(cursor: duckdb.DuckDBPyConnection, text: str) -> str:
    """What EXPLAIN is asked of; it may ANALYZE, which runs it.

    Raises:
        SqlError: it does not only read.
    """
    data = text.encode()
    for at, _ in _tokens(text)[1:]:
        inner = data[at:].decode()
        try:
            kinds = [s.type.name for s in cursor.extract_statements(inner)]
        except duckdb.Error:
            continue  # ANALYZE, or its options
        if kinds == ["SELECT"]:
            return inner
        raise _refused(kinds[0] if kinds else "EXPLAIN")
    raise _refused("EXPLAIN")


def _tree(cursor: duckdb.DuckDBPyConnection, text: str) -> dict[str, Any]:
    try:
        row = cursor.execute("select json_serialize_sql(?::varchar)", [text]).fetchone()
    except duckdb.Error as e:
        raise SqlError(str(e)) from e
    tree: dict[str, Any] = json.loads(row[0] if row else "{}")
    if tree.get("error"):
        message = str(tree.get("error_message"))
        raise _refused("PRAGMA") if "Only SELECT" in message else SqlError(message)
    return tree


def is_literal(cursor: duckdb.DuckDBPyConnection, expression: str) -> bool:
    """Whether an expression is one literal, which may be cast."""
    (chosen,) = _tree(cursor, f"select {expression}")["statements"][0]["node"]["select_list"]
    return {n["class"] for n in _nodes(chosen) if "class" in n} <= {"CONSTANT", "CAST"}


def _nodes(value: object) -> Iterator[dict[str, Any]]:
    stack = [value]
    while stack:
        at = stack.pop()
        if isinstance(at, dict):
            yield at
            stack.extend(at.values())
        elif isinstance(at, list):
            stack.extend(at)


def _shows(shown: list[dict[str, Any]]) -> str | None:
    for node in shown:
        word = str(node["table_name"]).strip('"')
        if node["show_type"] == "SHOW_UNQUALIFIED" and word in ("tables", "databases", "schemas"):
            return word
    return None


def _names_in(text: str) -> Iterator[NamedTable]:
    return map(_named, find_names(text))


def _named(name: TableName) -> NamedTable:
    *before, last = name.path
    whole = f"{last}${name.suffix}" if name.suffix else last
    return NamedTable("", before[-1] if before else "", whole)
