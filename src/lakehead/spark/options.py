"""Options of the data source ``lakehead``, read from the texts of ``.option(name, value)``."""

from __future__ import annotations

import base64
import datetime as dt
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, get_args

import pyarrow as pa

from lakehead.api.subscription import NamedStart, changelog_schema
from lakehead.api.table import Table, handle_of
from lakehead.api.table_names import Suffix, suffix_of
from lakehead.config import unknown_name
from lakehead.env.address import parse_uri
from lakehead.errors import ColumnNotFoundError, InvalidPropertyError, InvalidRequestError, InvalidUriError
from lakehead.format.schema import nearest_name
from lakehead.predicate import Predicate, parse_predicate
from lakehead.spark.column_names import named_as
from lakehead.spark.connections import attached_uri
from lakehead.spark.parts import Ranges
from lakehead.types import CHANGE_TYPE_COLUMN, SYSTEM_FIELDS, TableDescriptor, TabletKey, Tier, require_tier

StreamStart: TypeAlias = NamedStart | dt.datetime | Mapping[TabletKey, int]
_PLACES = ("path", "paths")
"""What Spark makes of a name that is given to ``load``, ``save`` or ``start``."""
_INTERNAL = ("ranges", "lease", "schema_id", "predicate", "overwritten")
_OF_BATCHES = ("tier", "snapshot", "timestamp")
_LIMITS = ("max_rows_per_trigger", "max_bytes_per_trigger")
_OF_STREAMS = ("start", *_LIMITS)
_OF_VIEWS = ("partitionoverwritemode",)
"""What a view has for who writes to its table; it says nothing to who reads."""
OPTIONS = ("uri", "table", "columns", "where", "changelog", *_OF_BATCHES, *_OF_STREAMS, *_INTERNAL, *_OF_VIEWS)


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options of one read.

    Attributes:
        uri: address of the server.
        table: the table's name.
        suffix: what the name said after a ``$``; ``changelog`` as an option says the same.
        columns: the columns wanted, in order; None for all of the user's.
        where: the rows wanted, as `lakehead.Table.scan` takes it; None for all.
        tier: see `lakehead.Table.scan`.
        snapshot: read the lake alone, at this lake snapshot, or at the one that was current at a time.
        start: where a stream starts; see `lakehead.Table.subscribe`.
        max_rows, max_bytes: at most so much in one micro-batch, None for no limit.
        ranges: read exactly these log offsets, and of the lake ``snapshot`` or nothing; how a union read ships its
            pin, with its ``lease``.
        overwritten: what that lake snapshot has from below these offsets is gone.
        schema_id: the definition under which that was pinned; -1 for what is pinned with the plan.
        predicate: of these log offsets the rows that meet this filter, in the form in which it goes to a server.
        given: the names of all that were given.
    """

    uri: str
    table: str
    suffix: Suffix | None = None
    columns: tuple[str, ...] | None = None
    where: str | None = None
    tier: Tier = "union"
    snapshot: int | dt.datetime | None = None
    start: StreamStart = "latest"
    max_rows: int | None = None
    max_bytes: int | None = None
    ranges: Ranges | None = None
    overwritten: Mapping[TabletKey, int] = field(default_factory=dict)
    lease: str | None = None
    schema_id: int = -1
    predicate: bytes | None = None
    given: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        """Read the texts; names in any case.

        Raises:
            InvalidPropertyError: one is missing, unknown, cannot be read, or contradicts another.
            SqlError: the table's name has a suffix that does not exist.
        """
        given = given_options(options, OPTIONS, "source", internal=(*_INTERNAL, *_OF_VIEWS))
        table, _, suffix = given["table"].partition("$")
        kind = _suffix(table, suffix, given)
        if kind in (Suffix.SNAPSHOTS, Suffix.FILES) and "where" in given:
            raise InvalidPropertyError(f"option where is for the rows of tables, not for ${kind}", name="where")
        ranges = given.get("ranges")
        return cls(
            uri=given["uri"],
            table=table,
            suffix=kind,
            columns=names_of(given, "columns"),
            where=given.get("where"),
            tier=_tier(given, suffix),
            snapshot=_snapshot(given),
            start=_start(given.get("start", "latest")),
            max_rows=_count(given, "max_rows_per_trigger"),
            max_bytes=_count(given, "max_bytes_per_trigger"),
            ranges=None if ranges is None else {TabletKey.parse(k): (s, e) for k, (s, e) in json.loads(ranges).items()},
            overwritten={TabletKey.parse(k): int(o) for k, o in json.loads(given.get("overwritten", "{}")).items()},
            lease=given.get("lease"),
            schema_id=int(given.get("schema_id", -1)),
            predicate=base64.b64decode(given["predicate"]) if "predicate" in given else None,
            given=frozenset(given),
        )

    @property
    def changelog(self) -> bool:
        """Whether records are wanted as they were written, with their change types and places."""
        return self.suffix is Suffix.CHANGELOG

    def require_batch(self) -> None:
        """That these are options of ``spark.read``.

        Raises:
            InvalidPropertyError: one is for streams, or for another kind of name.
        """
        self._refuse(_OF_STREAMS, "spark.readStream", "spark.read")
        if self.suffix not in (None, Suffix.LAKE):
            for name in self.given.intersection(_OF_BATCHES):
                raise InvalidPropertyError(f"option {name} is for tables and their $lake, not for ${self.suffix}")

    def require_stream(self, *, limited: bool) -> None:
        """That these are options of ``spark.readStream``.

        Args:
            limited: whether this PySpark knows of limits.

        Raises:
            InvalidPropertyError: one is for batches or needs another PySpark, or the name is of something that does not
                grow.
        """
        self._refuse(_OF_BATCHES, "spark.read", "spark.readStream")
        for name in () if limited else _LIMITS:
            if name in self.given:
                raise InvalidPropertyError(
                    f"option {name} needs PySpark 4.2 or later: an older one takes all that there is into one"
                    " micro-batch, so leave the option out",
                    name=name,
                )
        if self.suffix not in (None, Suffix.CHANGELOG):
            raise InvalidPropertyError(
                f"{self.table}${self.suffix} cannot be read as a stream: name the table, whose stream begins in the"
                " lake with .option('start', 'earliest')"
            )

    def _refuse(self, names: Sequence[str], their: str, this: str) -> None:
        for name in names:
            if name in self.given:
                raise InvalidPropertyError(f"option {name} is for {their}, not for {this}", name=name)


def given_options(
    options: Mapping[str, str], known: Sequence[str], of: str, *, internal: Sequence[str] = ()
) -> dict[str, str]:
    """The options of a read or a write by their names in small letters.

    Args:
        of: "source" or "sink", for messages.
        internal: those of ``known`` that no user is told of.

    Raises:
        InvalidPropertyError: one is unknown, or says neither where the server is nor which table is meant.
    """
    given = {name.lower(): value for name, value in options.items()}
    for name in given:
        if name in _PLACES:
            raise InvalidPropertyError(
                f"format('lakehead') takes no {name}: name the table with .option('table', 'db.table'), and leave"
                " load(), save() and start() without a name",
                name=name,
            )
        if name not in known:
            raise unknown_name(f"option of the lakehead {of}", name, [o for o in known if o not in internal])
    if "uri" not in given and (attached := attached_uri()) is not None:
        given["uri"] = attached
    for name in ("uri", "table"):
        if not given.get(name):
            raise InvalidPropertyError(
                f"format('lakehead') needs .option({name!r}, ...): uri is con.uri, table 'db.table'"
            )
    try:
        parse_uri(given["uri"])
    except InvalidUriError as e:
        raise InvalidPropertyError(f"option uri: {e.message}; con.uri is one") from e
    return given


def names_of(given: Mapping[str, str], option: str) -> tuple[str, ...] | None:
    """The names that an option lists, ``a, b`` or as JSON; None when it is not given.

    Raises:
        InvalidPropertyError: they cannot be read.
    """
    text = given.get(option)
    if text is None or not text.lstrip().startswith("["):
        return None if text is None else tuple(c.strip() for c in text.split(",") if c.strip())
    try:
        names = json.loads(text)
        if all(isinstance(name, str) for name in names):
            return tuple(names)
    except ValueError:
        pass
    raise InvalidPropertyError(f"option {option}={text!r} is not a list of names: write a, b, or a JSON list of texts")


def listing(table: Table, suffix: Suffix) -> pa.Table:
    """``t$lake$snapshots`` or ``t$lake$files``."""
    return table.lake.snapshots() if suffix is Suffix.SNAPSHOTS else table.lake.files()


def wanted_columns(table: Table, options: ReadOptions) -> pa.Schema:
    """The columns of a read, in order; a changelog's own come after those of the table that were asked for.

    Raises:
        ColumnNotFoundError: one does not exist; the message names the nearest.
        InvalidPropertyError: one is named twice.
    """
    desc = handle_of(table).desc
    if options.suffix in (Suffix.SNAPSHOTS, Suffix.FILES):
        default = there = listing(table, options.suffix).schema
    elif options.changelog:
        default = there = changelog_schema(desc)
    else:
        default, there = desc.schema, pa.schema([*desc.schema, *SYSTEM_FIELDS])
    if options.columns is None:
        return default
    names = named_as(there.names, options.columns)
    for c in names:
        if c not in there.names:
            near = nearest_name(c, default.names)
            raise ColumnNotFoundError(f"table {desc.path} has no column {c!r}; {near}", column=c)
        if names.count(c) > 1:
            raise InvalidPropertyError(f"option columns names {c!r} twice: name each once")
    if options.changelog:
        names += [c for c in (CHANGE_TYPE_COLUMN, *(f.name for f in SYSTEM_FIELDS)) if c not in names]
    return pa.schema([there.field(c) for c in names])


def wanted_rows(desc: TableDescriptor, options: ReadOptions) -> Predicate | None:
    """The condition that the rows of a read meet; None for all rows.

    Raises:
        InvalidPredicateError: it cannot be read, or is no condition on the table's columns.
    """
    if options.predicate is not None:
        return Predicate.from_bytes(options.predicate, desc.schema)
    return None if options.where is None else parse_predicate(options.where, desc.schema)


def require_columns(table: Table, options: ReadOptions, names: Sequence[str]) -> None:
    """Return if a read has all these columns, which a schema that its user gave it may name.

    Raises:
        ColumnNotFoundError: one does not exist; the message names the nearest.
    """
    there = list(dict.fromkeys((*wanted_columns(table, options).names, *(f.name for f in SYSTEM_FIELDS))))
    for name in names:
        if name not in there:
            near = nearest_name(name, there)
            raise ColumnNotFoundError(f"a read of {table.name} has no column {name!r}; {near}", column=name)


def _suffix(table: str, text: str, given: Mapping[str, str]) -> Suffix | None:
    suffix = suffix_of(table, text)
    changelog = given.get("changelog", "true" if suffix is Suffix.CHANGELOG else "false").lower()
    if changelog not in ("true", "false"):
        raise InvalidPropertyError(f"option changelog={changelog!r} must be true or false")
    if changelog == "true" and suffix is None:
        return Suffix.CHANGELOG
    if (changelog == "true") != (suffix is Suffix.CHANGELOG):
        raise InvalidPropertyError(f"option changelog={changelog} contradicts the name {table}${suffix}")
    return suffix


def _tier(given: Mapping[str, str], suffix: str) -> Tier:
    try:
        tier = require_tier(given.get("tier", "lake" if suffix.lower() == Suffix.LAKE else "union"))
    except InvalidRequestError as e:
        raise InvalidPropertyError(f"option {e.message}") from e
    if suffix.lower() == Suffix.LAKE and tier != "lake":
        raise InvalidPropertyError(f"option tier={tier!r} contradicts the name {given['table']}")
    return tier


def _snapshot(given: Mapping[str, str]) -> int | dt.datetime | None:
    snapshot, timestamp = given.get("snapshot"), given.get("timestamp")
    if snapshot is not None and timestamp is not None:
        raise InvalidPropertyError("options snapshot and timestamp both say which lake snapshot: give one")
    if timestamp is not None:
        return _time("timestamp", timestamp)
    if snapshot is not None and not snapshot.isdecimal():
        raise InvalidPropertyError(f"option snapshot={snapshot!r} is not the id of a lake snapshot")
    return None if snapshot is None else int(snapshot)


def _count(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name)
    if text is not None and (not text.isdecimal() or int(text) == 0):
        raise InvalidPropertyError(f"option {name}={text!r} is not a positive number")
    return None if text is None else int(text)


def _start(text: str) -> StreamStart:
    for known in get_args(NamedStart):
        if text.strip().lower() == known:
            return known
    if text.lstrip().startswith("{"):
        return _offsets(text)
    return _time("start", text, "latest, earliest, full, offsets as JSON, or ")


def _time(option: str, text: str, others: str = "") -> dt.datetime:
    try:
        if text.strip().isdecimal():
            return dt.datetime.fromtimestamp(int(text) / 1000, dt.UTC)
        time = dt.datetime.fromisoformat(text.strip())
    except (ValueError, OverflowError, OSError):
        time = None
    if time is None or time.tzinfo is None:
        raise InvalidPropertyError(
            f"option {option}={text!r} is not one of: {others}a time with a zone, such as 2026-05-01T12:00:00Z, or"
            " milliseconds since 1970"
        )
    return time


def _offsets(text: str) -> dict[TabletKey, int]:
    try:
        given = json.loads(text)
        if "live" not in given:  # else rows are to come that offsets do not tell
            given = given.get("offsets", given)
        found = {TabletKey.parse(k): v for k, v in given.items()}
        if all(type(v) is int and v >= 0 for v in found.values()):
            return found
    except (ValueError, AttributeError, TypeError):
        pass
    raise InvalidPropertyError(
        f"option start={text!r} is not offsets per tablet: write them as JSON, such as"
        ' {"0": 100, "1": 80}, or {"day=2026-05-01/0": 100} where the table has partitions'
    )
