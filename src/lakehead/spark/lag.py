"""How far a streaming query is behind the tables that it reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lakehead.errors import InvalidRequestError
from lakehead.spark.stream_offsets import StreamOffset, rows_between

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass(frozen=True)
class SourceProgress:
    """One table that a query reads, as of the query's last progress.

    Attributes:
        table: its name.
        batch_id: the micro-batch that the progress is of.
        input_rows: how many rows that one had of the table.
        lag_rows: log records that the table had after the end of it; None where Spark does not tell.
    """

    table: str
    batch_id: int
    input_rows: int
    lag_rows: int | None


def query_progress(query: StreamingQuery) -> list[SourceProgress]:
    """See `lakehead.spark.progress`."""
    last = query.lastProgress
    if last is None:
        return []
    found = []
    for source in json.loads(last.json)["sources"]:  # PySpark 4.1 has offsets in it as no JSON, but as texts of dicts
        end, latest = (_offset(source.get(name)) for name in ("endOffset", "latestOffset"))
        if end is not None:
            lag = None if latest is None else rows_between(end, latest)
            found.append(SourceProgress(end.table, last["batchId"], source["numInputRows"], lag))
    return found


def _offset(value: Any) -> StreamOffset | None:
    """None for none, and for one of another kind of source. Spark Connect hands them on as texts of JSON."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
        return None if value is None else StreamOffset.from_json(value)
    except (ValueError, InvalidRequestError):
        return None
