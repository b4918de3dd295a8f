"""The phases of each path through Lakehead, and the functions of the source whose time they are.

A phase has what passes in its functions, in whichever thread or process, less what passes in functions of other phases
that these call or wait for; see `benchmarks.probes`. The functions are named by text, so that those who move one find
it here: a name that is gone is an error, and so is a phase of a path in which nothing ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["caller", "wire", "server", "disk", "lake", "DuckDB", "rest"]
KINDS: Mapping[Kind, str] = {
    "caller": "in the caller: rows and requests",
    "wire": "the wire, and threads that wake each other",
    "server": "in the server: checks, plans, rows",
    "disk": "write and fdatasync",
    "lake": "Parquet, Iceberg and its catalog",
    "DuckDB": "DuckDB",
    "rest": "the rest",
}


@dataclass(frozen=True)
class Phase:
    """A part of a path's time, and the functions that have it."""

    name: str
    kind: Kind
    functions: tuple[str, ...]


_READY = Phase(
    "rows made ready and checked",
    "caller",
    ("api.input:rows_for_append", "api.input:rows_for_upsert", "client.row_routing:slices"),
)
_NUMBERED = Phase("numbered and routed", "caller", ("client.batch_writer:BatchWriter.prepare",))
_ENCODED = Phase("encoded", "caller", ("client.batch_writer:encoded_write",))
_WIRE = Phase(
    "the wire, and threads that wake each other",
    "wire",
    ("client.flight:FlightEndpoint.call", "client.flight:FlightEndpoint.next_of"),
)
_ADMITTED = Phase("admitted, and given to its tablet", "server", ("server.service:Service.call",))
_CHECKED = Phase("checked by the server", "server", ("server.writes:Writes.checked",))
_GROUPED = Phase("locks, fence and plan of the group", "server", ("server.group_commit:GroupCommit.drive",))
_PLANNED = Phase(
    "keys found, changes planned", "server", ("kv.tablet:KvTablet.require_change", "kv.tablet:KvTablet.plan_upsert")
)
_CHANGELOG = Phase("changelog encoded", "server", ("server.changelog:changelog",))
_FRAMED = Phase("framed", "server", ("log.tablet:LogTablet.encode", "log.tablet:LogTablet.append_frames"))
_WRITTEN = Phase("written (writev)", "disk", ("env.storage:LocalLogFile.append",))
_SYNCED = Phase("waited for the disk (fdatasync)", "disk", ("env.storage:LocalLogFile.sync",))
_APPLIED = Phase(
    "applied, and readers woken",
    "server",
    (
        "log.tablet:LogTablet.apply",
        "log.tablet:LogTablet.advance_high_watermark",
        "env.interrupts:Changes.notify_all",
    ),
)
_KEYS_READY = Phase("keys made ready", "caller", ("format.rows:to_key_table", "api.input:in_partitions"))
_KEY_ASKED = Phase(
    "request made, row read", "caller", ("client.lookups:Lookups.plain_key", "client.lookups:Lookups.row")
)
_KEYS_ASKED = Phase("request made, rows read", "caller", ("client.lookups:Lookups._lookup_part",))
_ASKED = Phase("admitted", "server", ("server.service:Service.call",))
_KEYS_READ = Phase("keys decoded, rows encoded", "server", ("server.reads:Reads.lookup",))
_FOUND = Phase("keys found", "server", ("kv.tablet:KvTablet.encode", "kv.tablet:KvTablet.probe"))
_GATHERED = Phase("rows gathered", "server", ("kv.tablet:KvTablet.gather", "kv.tablet:KvTablet.require_answer"))
_ROW = Phase("row found", "server", ("kv.tablet:KvTablet.row",))
_PINNED = Phase("pinned", "caller", ("lake.union_read:_pinned",))
_ANSWERED = Phase(
    "requests answered, streams opened",
    "server",
    ("server.service:Service.call", "server.service:Service.stream", "env.interrupts:_Task.run"),
)
_SHIELDED = Phase("another thread woken for a request", "wire", ("env.interrupts:shielded",))
_LOG_READ = Phase(
    "log read, columns chosen",
    "server",
    ("log.segment:Segment.frames", "log.joined:JoinedRows.read", "server.projection:Projection.records"),
)
_JOINED = Phase("batches joined for sending", "server", ("server.projection:coalesce",))
_TAKEN = Phase("batches taken", "caller", ("client.remote_log:RemoteLog._read_from", "client.received:streamed"))
_TURN = Phase(
    "new rows read for the subscriber",
    "server",
    ("server.streams:_Subscription._turn", "server.projection:Projection.records", "server.projection:coalesce"),
)
_LOADED = Phase("lake table loaded and checked", "lake", ("iceberg.iceberg_table:IcebergLakeTable.load",))
_ROUND_PLANNED = Phase("watermarks synced, round planned", "server", ("tiering.round:_plan",))
_RANGE_READ = Phase(
    "log read", "server", ("client.remote_log:RemoteLog.read_ranges", "server.projection:Projection.records")
)
_PARQUET = Phase("Parquet written", "lake", ("iceberg.data_files:write_data_files",))
_STAGED = Phase("manifests written", "lake", ("iceberg.iceberg_table:IcebergLakeTable.stage",))
_METADATA = Phase("metadata file written", "lake", ("iceberg.staging:_write_metadata",))
_PUBLISHED = Phase("catalog asked", "lake", ("iceberg.iceberg_table:IcebergLakeTable.publish",))
_HOT = Phase("hot rows read", "server", ("lake.union_read:UnionRead._log_rows",))
_NET = Phase(
    "net change found",
    "caller",
    ("lake.union_read:UnionRead._changes_of", "log.netchange:net_change", "lake.union_read:kept_rows"),
)
_FILES = Phase("lake files planned", "lake", ("lake.pinned_lake:PinnedLake.plan",))
_LAKE_READ = Phase("lake files read without superseded rows", "lake", ("lake.union_read:UnionRead._lake_rows",))
_PARSED = Phase("statement parsed and checked", "DuckDB", ("api.statement:read_statement", "api.sandbox:require_data"))
_CATALOG = Phase(
    "catalog of the statement made",
    "DuckDB",
    ("api.sql_engine:SqlEngine.cursor", "api.sql_engine:SqlEngine.catalog", "api.sql:_make_views"),
)
_TABLES = Phase("tables opened and pinned", "caller", ("api.connection:Connection._tables_called", "api.sql:_contents"))
_BOUND = Phase("planned by DuckDB", "DuckDB", ("api.sql:_relation",))
_RUN = Phase("run by DuckDB", "DuckDB", ("api.relation:Reading.run",))
_ROWS = Phase("rows read for DuckDB", "server", ("lake.union_read:UnionRead.batches",))

_CALLER = (_READY, _NUMBERED, _ENCODED)
_LOG = (_ADMITTED, _CHECKED, _GROUPED, _FRAMED, _WRITTEN)
_KEYED = (_ADMITTED, _CHECKED, _GROUPED, _PLANNED, _CHANGELOG, _FRAMED, _WRITTEN, _SYNCED, _APPLIED)

PATHS: Mapping[str, Sequence[Phase]] = {
    "append of 1 row, embedded, os": (*_CALLER, *_LOG, _APPLIED),
    "append of 1 row, embedded, sync": (*_CALLER, *_LOG, _SYNCED, _APPLIED),
    "append of 1 row, socket, sync": (*_CALLER, _WIRE, *_LOG, _SYNCED, _APPLIED),
    "append of 1 row, server, sync": (*_CALLER, _WIRE, *_LOG, _SYNCED, _APPLIED),
    "append of {batch} rows, embedded, os": (*_CALLER, *_LOG, _APPLIED),
    "append of {batch} rows, embedded, sync": (*_CALLER, *_LOG, _SYNCED, _APPLIED),
    "append of {batch} rows, server, sync": (*_CALLER, _WIRE, *_LOG, _SYNCED, _APPLIED),
    "upsert of {batch} new keys, embedded, sync": (*_CALLER, *_KEYED),
    "upsert of {batch} existing keys, embedded, sync": (*_CALLER, *_KEYED),
    "get of 1 key, embedded": (_KEY_ASKED, _ASKED, _ROW),
    "get of 1 key, server": (_KEY_ASKED, _WIRE, _ASKED, _ROW),
    "lookup of {keys} keys, embedded": (_KEYS_READY, _KEYS_ASKED, _ASKED, _KEYS_READ, _FOUND, _GATHERED),
    "lookup of {keys} keys, server": (_KEYS_READY, _KEYS_ASKED, _WIRE, _ASKED, _KEYS_READ, _FOUND, _GATHERED),
    "scan of {rows} rows, all columns, embedded": (_PINNED, _SHIELDED, _ANSWERED, _LOG_READ, _JOINED, _TAKEN),
    "scan of {rows} rows, one column, embedded": (_PINNED, _SHIELDED, _ANSWERED, _LOG_READ, _JOINED, _TAKEN),
    "scan of {rows} rows, all columns, server": (_PINNED, _WIRE, _ANSWERED, _LOG_READ, _JOINED, _TAKEN),
    "scan of {rows} rows, one column, server": (_PINNED, _WIRE, _ANSWERED, _LOG_READ, _JOINED, _TAKEN),
    "delivery of 1 row to a subscriber, server, sync": (*_CALLER, _WIRE, *_LOG, _SYNCED, _APPLIED, _TURN),
    "tiering round of 40 rows, embedded": (
        _LOADED, _ROUND_PLANNED, _SHIELDED, _ANSWERED, _RANGE_READ, _PARQUET, _STAGED, _METADATA, _PUBLISHED,
    ),
    "union read of {rows} keys, one column, 10 % superseded, embedded": (
        _LOADED, _PINNED, _SHIELDED, _ANSWERED, _HOT, _NET, _FILES, _LAKE_READ,
    ),
    "SQL statement that selects 1 row, embedded": (
        _PARSED, _CATALOG, _TABLES, _SHIELDED, _ANSWERED, _BOUND, _RUN, _ROWS,
    ),
}  # fmt: skip
"""Each path's phases, in their order; numbers in names are filled in."""


def functions_of(phases: Sequence[Phase]) -> dict[str, list[str]]:
    """The functions of each phase, by its name, as `benchmarks.probes.Probes` takes them."""
    return {phase.name: [f"lakehead.{name}" for name in phase.functions] for phase in phases}


def kinds() -> dict[str, Kind]:
    """Of what kind each phase is, by its name."""
    return {phase.name: phase.kind for phases in PATHS.values() for phase in phases}
