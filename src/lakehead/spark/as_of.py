"""``version as of`` a lake snapshot and ``timestamp as of`` a time, after the name of a table in Spark SQL."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from lakehead.api.table_names import TableName
from lakehead.errors import SqlError
from lakehead.lake.union_read import Moment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SPARK_LITERAL = re.compile(
    r"""(?P<name>`(?:[^`]|``)*`) | (?<!\w)r'[^']*' | (?<!\w)r"[^"]*" | '(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*"
    | --[^\n]* | /\*.*?\*/""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
_AS_OF = re.compile(r"\s+(?:for\s+)?(?:system_)?(version|timestamp|time)\s+as\s+of\b", re.IGNORECASE)
_VERSION = re.compile(r"\s*(\d+|'\d+'|\"\d+\")(?![\w.])")
_TIME = re.compile(r"\s*(?:timestamp\s*)?('[^']*'|\"[^\"]*\")(?!\s*[-+*/%|:.\[(])", re.IGNORECASE)
_ISO = re.compile(r"\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?(?:Z|[+-]\d\d:\d\d)?)?", re.ASCII)
_PARAMETER = re.compile(r"\s*:([^\W\d]\w*+)(?!\s*[-+*/%|:.\[(])")
_TOKEN = re.compile(rf"{_SPARK_LITERAL.pattern} | (?P<word>[\w.]+) | (?P<mark>\S)", _SPARK_LITERAL.flags)
NO_ALIAS = frozenset(
    """where group order having limit offset join inner left right full cross natural on using union except intersect
    minus window qualify semi anti lateral tablesample pivot unpivot select cluster distribute sort version timestamp
    for fetch set values partition from""".split()  # noqa: SIM905
)
_ENDS = NO_ALIAS - {"timestamp"}
"""Words that no expression of a time has outside of parentheses."""
_NOT_OF_IT_MAX = 12
"""So many of the last tokens may be an alias, with its columns."""


class Computes(Protocol):
    """How a session reads times."""

    @property
    def zone(self) -> str:
        """In which times stand that say none."""
        ...

    def of(self, expression: str) -> dt.datetime | None:
        """The time that an expression has now; None: it is no expression.

        Raises:
            SqlError: it has none.
        """
        ...


@dataclass(frozen=True)
class Times:
    """As `Computes`, of Spark; ``args`` are the values of parameters."""

    spark: SparkSession
    args: dict[str, Any] | list[Any] | None

    @property
    def zone(self) -> str:
        return str(self.spark.conf.get("spark.sql.session.timeZone"))

    def of(self, expression: str) -> dt.datetime | None:
        """See `Computes`."""
        # In parentheses nothing of it is an alias.
        try:
            self.spark._jsparkSession.sessionState().sqlParser().parseExpression(f"({expression})")
        except (PySparkException, Py4JError):
            return None
        args = self.args if isinstance(self.args, dict) else None
        try:
            row = self.spark.sql(f"select unix_micros(cast(({expression}) as timestamp)) as at", args).first()
        except PySparkException as e:
            raise SqlError(f"timestamp as of {expression}: {str(e).splitlines()[0]}") from e
        if row is None or row.at is None:
            raise SqlError(f"timestamp as of {expression}: that is null, and no time")
        return dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=row.at)


def as_of(
    query: str, name: TableName, times: Computes, args: Mapping[str, Any] | Sequence[Any] | None = None
) -> tuple[TableName, Moment | None]:
    """What is read of a table that a statement names: the lake snapshot, if it says one, and the name with that clause.

    Args:
        args: the values of parameters, by name.

    Raises:
        SqlError: what follows ``as of`` is no literal, no parameter, and no expression of a time.
    """
    clause = _AS_OF.match(masked(query), name.end)
    if clause is None:
        return name, None
    by_version = clause[1].lower() == "version"
    value = (_VERSION if by_version else _TIME).match(query, clause.end())
    marker = _PARAMETER.match(query, clause.end()) if value is None else None
    try:
        if marker is not None and isinstance(args, Mapping) and marker[1] in args:
            value, given = marker, args[marker[1]]
        elif value is not None:
            given = value[1].strip("'\"")
        else:
            if not by_version:
                for end in _ends(query, clause.end()):
                    if (time := times.of(query[clause.end() : end].strip())) is not None:
                        return replace(name, end=end), time
            raise ValueError
        if by_version:
            return replace(name, end=value.end()), int(str(given))
        time = _plain_time(given, times.zone) or times.of(query[clause.end() : value.end()].strip())
        if time is None:
            raise ValueError
        return replace(name, end=value.end()), time
    except (ValueError, OverflowError) as e:
        what = (
            "the id of a lake snapshot, or a parameter by name that args has one for"
            if by_version
            else "a time, such as '2026-05-01 12:00:00', now() - interval 1 hour, or a parameter by name"
        )
        raise SqlError(f"{name.text}{clause[0]} needs {what}") from e


def _ends(query: str, start: int) -> Iterator[int]:
    """Where an expression that begins there may end, the last place first: Spark's parser knows which it is."""
    depth, ends = 0, [0]
    for token in _TOKEN.finditer(query, start):
        word, mark = token["word"], token["mark"]
        if depth == 0 and ((word or "").lower() in _ENDS or mark in (")", ",", ";")):
            break
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(mark or "", 0)
        if depth == 0 and not token[0].startswith(("--", "/*")):
            ends.append(token.end())
    yield from ends[:0:-1][:_NOT_OF_IT_MAX]


def _plain_time(given: object, zone: str) -> dt.datetime | None:
    """What needs no Spark to be understood: a time with a zone, or a text in ISO 8601. Values without a zone mean in
    PySpark what they mean to the process, and texts have more forms there."""
    if isinstance(given, dt.datetime) and given.tzinfo is not None:
        return given
    if not isinstance(given, str) or _ISO.fullmatch(given.strip()) is None:
        return None
    time = dt.datetime.fromisoformat(given.strip())
    try:
        return time if time.tzinfo is not None else time.replace(tzinfo=ZoneInfo(zone))
    except (ValueError, ZoneInfoNotFoundError):  # Spark knows zones by other names, too
        return None


def masked(query: str) -> str:
    """The statement with its strings and comments blanked, all else where it was."""
    return _SPARK_LITERAL.sub(lambda m: m["name"] or " " * len(m[0]), query)
