"""Where a streaming query is in a table, as its checkpoint keeps it, and how far the next micro-batch goes; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lakehead.errors import InvalidRequestError, OffsetOutOfRangeError
from lakehead.spark.parts import Ranges
from lakehead.types import TabletKey


@dataclass(frozen=True)
class LiveRows:
    """Rows of a keyed table's tablets as of one moment, which a stream has still to deliver.

    Attributes:
        snapshot: the lake snapshot that holds the older ones; None for none.
        lease: what the server holds the moment by, for a while.
        ranges: per tablet, the log offsets that come on top; the moment is their end.
    """

    snapshot: int | None
    lease: str | None
    ranges: Ranges


@dataclass(frozen=True)
class StreamOffset:
    """A position in each tablet; those that are not named are at their beginning.

    Attributes:
        table: the table's name, for people.
        table_id: which table the offsets are of.
        schema_id: the definition in force when it was found.
        at: offset of the next record, of tablets of which no live rows are to come.
        live: tablets whose live rows come first.
        began: of the end of a query's first micro-batch, where that began: Spark keeps only where it ended, and asks
            anew for the beginning when it is repeated, which may be another one by then.
    """

    table: str
    table_id: str
    schema_id: int
    at: Mapping[TabletKey, int]
    live: LiveRows | None = None
    began: StreamOffset | None = None

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint has it; equal offsets are equal texts."""
        out: dict[str, Any] = {"table": self.table, "table_id": self.table_id, "schema_id": self.schema_id}
        out["offsets"] = {str(k): self.at[k] for k in sorted(self.at)}
        if self.live is not None:
            ranges = {str(k): list(self.live.ranges[k]) for k in sorted(self.live.ranges)}
            out["live"] = {"snapshot": self.live.snapshot, "lease": self.live.lease, "ranges": ranges}
        if self.began is not None:
            out["began"] = self.began.to_json()
        return out

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StreamOffset:
        """Inverse of `to_json`.

        Raises:
            InvalidRequestError: it is none.
        """
        try:
            at = {TabletKey.parse(k): int(o) for k, o in value["offsets"].items()}
            live = None
            if "live" in value:
                found = value["live"]
                ranges = {TabletKey.parse(k): (int(s), int(e)) for k, (s, e) in found["ranges"].items()}
                live = LiveRows(found["snapshot"], found["lease"], ranges)
            began = cls.from_json(value["began"]) if "began" in value else None
            return cls(value["table"], value["table_id"], int(value["schema_id"]), at, live, began)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise InvalidRequestError(
                f"the checkpoint's offset {value!r} is not one of a Lakehead table: start the query with another"
                " checkpointLocation"
            ) from e

    def beginning(self, told: StreamOffset) -> StreamOffset:
        """Where the micro-batch that ends here begins, of which Spark has told a beginning."""
        return told if self.began is None or told.began is not None else self.began

    def next_of(self, tablet: TabletKey) -> int:
        """Offset of the first record after what was delivered, live rows to come included."""
        if self.live is not None and tablet in self.live.ranges:
            return self.live.ranges[tablet][1]
        return self.at.get(tablet, 0)

    def require_within(self, ends: Mapping[TabletKey, int]) -> None:
        """That the logs reach as far as what was delivered.

        Raises:
            OffsetOutOfRangeError: one does not.
        """
        for tablet in {*self.at, *(self.live.ranges if self.live else ())}:
            if self.next_of(tablet) > ends.get(tablet, 0):
                raise OffsetOutOfRangeError(
                    f"the query is at offset {self.next_of(tablet)} of {self.table} tablet {tablet}, whose log ends at"
                    f" {ends.get(tablet, 0)}: the table was restored to an earlier state; start the query with another"
                    " checkpointLocation",
                    high_watermark=ends.get(tablet, 0),
                )

    def advanced(
        self, ends: Mapping[TabletKey, int], rows_max: int | None, rows: Mapping[TabletKey, int]
    ) -> StreamOffset:
        """As far as one micro-batch goes: live rows first, whole tablets of them, then records, of each tablet the same
        share of what there is.

        Args:
            ends: where the logs end; what lies behind is passed by.
            rows_max: at most so many rows, but at least one tablet's live rows; None for no limit.
            rows: about how many rows are live in each tablet.
        """
        if self.live is not None:
            return self._live_advanced(self.live, rows_max, rows)
        waiting = {k: e - self.at.get(k, 0) for k, e in sorted(ends.items()) if e > self.at.get(k, 0)}
        taken = shared(waiting, rows_max)
        if not any(taken.values()):
            return self
        return replace(self, at={**self.at, **{k: self.at.get(k, 0) + n for k, n in taken.items() if n}})

    def _live_advanced(self, live: LiveRows, rows_max: int | None, rows: Mapping[TabletKey, int]) -> StreamOffset:
        at, left, total = dict(self.at), dict(live.ranges), 0
        for tablet in sorted(live.ranges):
            total += rows.get(tablet, 0)
            if rows_max is not None and total > rows_max and len(left) < len(live.ranges):
                break
            at[tablet] = left.pop(tablet)[1]
        return replace(self, at=at, live=replace(live, ranges=left) if left else None)


def shared(waiting: Mapping[TabletKey, int], rows_max: int | None) -> dict[TabletKey, int]:
    """How many of each tablet's records to take, so that together they are ``rows_max``, or all that there are."""
    total = sum(waiting.values())
    if rows_max is None or total <= rows_max:
        return dict(waiting)
    taken = {k: n * rows_max // total for k, n in waiting.items()}
    left = rows_max - sum(taken.values())
    for k, n in waiting.items():
        more = min(left, n - taken[k])
        taken[k] += more
        left -= more
    return taken


def live_between(start: StreamOffset, end: StreamOffset) -> LiveRows | None:
    """The live rows that a micro-batch delivers; None for none."""
    if start.live is None:
        return None
    left = end.live.ranges if end.live is not None else {}
    ranges = {k: r for k, r in start.live.ranges.items() if k not in left}
    return replace(start.live, ranges=ranges) if ranges else None


def records_between(start: StreamOffset, end: StreamOffset) -> Ranges:
    """The log offsets that a micro-batch delivers."""
    ranges = {k: (start.next_of(k), e) for k, e in end.at.items()}
    return {k: (s, e) for k, (s, e) in ranges.items() if s < e}


def rows_between(start: StreamOffset, end: StreamOffset) -> int:
    """Log records from one offset to another; those that live rows stand for count too."""
    return sum(max(0, e - start.at.get(k, 0)) for k, e in end.at.items())
