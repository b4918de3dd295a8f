"""How far a streaming query is behind the tables that it reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
        lag_rows: log records that the table had after the end of it; None before Spark 4.2, which does not tell.
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
    for source in last["sources"]:
        end, latest = (_offset(source[name]) for name in ("endOffset", "latestOffset"))
        if end is not None:
            lag = None if latest is None else rows_between(end, latest)
            found.append(SourceProgress(end.table, last["batchId"], source["numInputRows"], lag))
    return found


def _offset(text: str | None) -> StreamOffset | None:
    """None for none, and for one of another kind of source."""
    try:
        return None if text is None else StreamOffset.from_json(json.loads(text))
    except (ValueError, InvalidRequestError):
        return None
