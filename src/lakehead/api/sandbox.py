"""What the text of a statement may reach: Lakehead's tables and the frames of the call, or all that DuckDB can.

Text may come from people and programs that are believed less than the code that passes it on. So it is checked before
it runs, and run by a DuckDB that opens no file, address or extension, whatever it is asked.
"""

from __future__ import annotations

from typing import Any

import duckdb

from lakehead.api.statement import Statement
from lakehead.env.forks import keep_in_children
from lakehead.env.place import require_working_folder
from lakehead.env.scratch_folders import ScratchFolder
from lakehead.env.storage import require_files
from lakehead.errors import SqlError

_CLOSED = {
    "enable_external_access": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_persistent_secrets": False,
}
# Where DuckDB cannot push a condition down, `Relation` asks again without.
_SETTINGS_LEFT = "['disabled_optimizers']"
_TABLE_FUNCTIONS = frozenset(
    (
        "generate_series",
        "icu_calendar_names",
        "json_each",
        "json_tree",
        "pg_timezone_names",
        "pragma_collations",
        "pragma_platform",
        "pragma_show",
        "pragma_table_info",
        "pragma_version",
        "range",
        "repeat",
        "repeat_row",
        "unnest",
        *("duckdb_" + about for about in ("columns", "constraints", "databases", "functions", "indexes", "keywords")),
        *("duckdb_" + about for about in ("memory", "optimizers", "schemas", "settings", "tables", "types", "views")),
    )
)
"""What may stand where a table does: it makes its rows of its arguments, or tells what DuckDB knows of this statement.

Others read and write files, take addresses in memory, or run further text.
"""
_ALL_TABLE_FUNCTIONS = "select lower(function_name) from duckdb_functions() where function_type like 'table%'"
_INTERNAL_CATALOG = "lakehead_statement_"
OTHERWISE = (
    "read it in your own code and pass its rows in: con.sql(query, frames={'name': rows}); or, for a text that you"
    " trust as you trust code, con.sql(query, unrestricted=True)"
)


_FILES = 8
"""What DuckDB may open while it starts, and more."""


def catalog_name(number: int) -> str:
    """The catalog of the statement with this number."""
    return f"{_INTERNAL_CATALOG}{number}"


def make_duckdb(spill: ScratchFolder, *, unrestricted: bool) -> duckdb.DuckDBPyConnection:
    """A DuckDB of its own, about 13 ms, which puts what memory cannot hold into a folder.

    Statements see no Python variables; a timestamp without a zone is UTC when compared with one that has a zone.
    """
    config: dict[str, Any] = {"python_enable_replacements": False, "temp_directory": spill.path}
    require_files(_FILES, "DuckDB")
    require_working_folder("DuckDB")  # it would end the process
    made = duckdb.connect(":memory:", config=config if unrestricted else {**config, **_CLOSED})
    keep_in_children(made)  # its destructor waits for its threads
    made.execute("set global TimeZone = 'UTC'")
    if not unrestricted:
        made.execute(f"set allowed_configs = {_SETTINGS_LEFT}; set lock_configuration = true")
    return made


def require_data(cursor: duckdb.DuckDBPyConnection, statement: Statement) -> None:
    """Return when a statement, whoever wrote it, can read tables and frames alone.

    Raises:
        SqlError: it calls what reads something else, or names what is not a table of this connection's.
    """
    sources = statement.sources
    if statement.called:  # which of these are sources, DuckDB knows
        known = {name for (name,) in cursor.execute(_ALL_TABLE_FUNCTIONS).fetchall()}
        sources |= statement.called & known
    for name in sorted(sources - _TABLE_FUNCTIONS):
        raise SqlError(f"con.sql() reads tables and frames, and {name}() is neither: {OTHERWISE}", function=name)
    for table in statement.tables:
        if table.catalog.lower() not in ("", "system"):
            raise SqlError(
                f"{table.catalog}.{table.schema}.{table.name}: a table's name has two parts, database.table. For one of"
                f" another database, {OTHERWISE}"
            )
    if _INTERNAL_CATALOG in statement.text.lower():
        raise SqlError(f"{_INTERNAL_CATALOG}... are names of Lakehead's own: no statement uses them")
