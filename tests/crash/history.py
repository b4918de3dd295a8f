"""What was acknowledged, kept outside the processes that are killed, and what tables must hold because of it.

Log rows are numbered by their writer, so that a history is a count and the few numbers that are known not to have
landed. Keyed rows carry a version that grows with every write of their key.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakehead.client.row_routing import route
from lakehead.types import TableDescriptor, TabletId

LOG_SCHEMA = pa.schema([("w", pa.int32()), ("n", pa.int64()), ("p", pa.string()), ("s", pa.string())])
KEYED_SCHEMA = pa.schema(
    [("p", pa.string()), ("k", pa.int64()), ("v", pa.int64()), ("a", pa.int64()), ("b", pa.string())]
)
PARTITIONS = 3

Key = tuple[str, int]
Values = tuple[int, int | None, str | None]
"""Version, ``a`` and ``b`` of a live row."""


class WrongDataError(AssertionError):
    """A table does not hold what was acknowledged."""


def require(condition: object, what: str) -> None:
    """Raise `WrongDataError` unless the condition holds."""
    if not condition:
        raise WrongDataError(what)


def partition_of(number: int) -> str:
    """Partition of a log row's number or of a key."""
    return f"p{number % PARTITIONS}"


def log_rows(writer: int, numbers: range) -> pa.Table:
    """The rows of a writer that have these numbers."""
    columns = [
        pa.array([writer] * len(numbers), pa.int32()),
        pa.array(numbers, pa.int64()),
        pa.array([partition_of(n) for n in numbers]),
        pa.array([f"row {n} of {writer}" for n in numbers]),
    ]
    return pa.Table.from_arrays(columns, schema=LOG_SCHEMA)


@dataclass(frozen=True)
class _Answer:
    writer: int
    numbers: range
    offsets: Mapping[TabletId, tuple[int, int]]


class LogHistory:
    """Appends to one log table. Each writer's calls come from one thread."""

    def __init__(self, *, partitioned: bool, answers_kept: int = 5000) -> None:
        self._partitioned = partitioned
        self._next: Counter[int] = Counter()
        self._absent: dict[int, set[int]] = {}
        self._open: dict[int, range] = {}
        self._answers: deque[_Answer] = deque(maxlen=answers_kept)
        self._lock = threading.Lock()
        self.answered_rows = 0

    def begin(self, writer: int, count: int) -> range:
        """Numbers of the rows of the next batch; it counts as unanswered until `answered`."""
        numbers = range(self._next[writer], self._next[writer] + count)
        self._next[writer] += count
        self._open[writer] = numbers
        return numbers

    def answered(self, writer: int, offsets: Mapping[TabletId, tuple[int, int]]) -> None:
        """The batch was acknowledged."""
        numbers = self._open.pop(writer)
        with self._lock:
            self._answers.append(_Answer(writer, numbers, offsets))
            self.answered_rows += len(numbers)

    def sent_through(self, writer: int, end: int) -> None:
        """All rows below ``end`` of a writer were acknowledged, at offsets that it was not told."""
        with self._lock:
            self.answered_rows += end - self._next[writer]
            self._next[writer] = end

    def refused(self, writer: int) -> None:
        """The batch was refused for certain: its rows must not be there."""
        self._absent.setdefault(writer, set()).update(self._open.pop(writer))

    def check(self, name: str, rows: pa.Table, ends: Mapping[TabletId, tuple[int, int]], *, trimmed: bool) -> None:
        """Compare a scan with system columns; what became of unanswered batches is settled by it.

        Args:
            ends: start and high watermark of each tablet; the scan must be dense up to there, from 0 unless
                ``trimmed``.
        """
        require(_texts_fit(rows), f"{name}: a row is not as it was written")
        tablets = _by_tablet(rows, self._partitioned)
        for tablet, (start, end) in ends.items():
            part = tablets.pop(tablet, rows.slice(0, 0))
            _require_dense(f"{name} {tablet}", part, start if trimmed else 0, end)
        require(not tablets, f"{name}: rows of tablets {list(tablets)} that the server does not have")
        numbers, writers = rows["n"].to_numpy(), rows["w"].to_numpy()
        for writer, end in self._next.items():
            there = np.sort(numbers[writers == writer])
            require((np.diff(there) > 0).all(), f"{name}: rows of writer {writer} are there twice: {_twice(there)}")
            self._settle(name, writer, set(there.tolist()), trimmed=trimmed)
            absent = self._absent.get(writer, set())
            if trimmed:
                require(not len(there) or there[-1] < end, f"{name}: writer {writer} never wrote {there[-1:]}")
                continue
            expected = np.setdiff1d(np.arange(end), np.fromiter(absent, np.int64, len(absent)))
            lost, strange = np.setdiff1d(expected, there), np.setdiff1d(there, expected)
            require(not len(lost), f"{name}: acknowledged rows of writer {writer} are lost: {lost[:20]} of {end}")
            require(not len(strange), f"{name}: rows of writer {writer} that never were: {strange[:20]}")
        require(set(writers.tolist()) <= set(self._next), f"{name}: rows of unknown writers")
        self._check_offsets(name, rows, {t: s for t, (s, _) in ends.items()} if trimmed else {})

    def _settle(self, name: str, writer: int, there: set[int], *, trimmed: bool) -> None:
        batch = self._open.pop(writer, None)
        if batch is None or trimmed:
            return
        parts: dict[str, set[int]] = {}
        for n in batch:
            parts.setdefault(partition_of(n) if self._partitioned else "", set()).add(n)
        for part in parts.values():
            found = part & there
            require(not found or found == part, f"{name}: half of an unanswered batch of writer {writer}: {found}")
            if not found:
                self._absent.setdefault(writer, set()).update(part)

    def _check_offsets(self, name: str, rows: pa.Table, starts: Mapping[TabletId, int]) -> None:
        """Rows stand at the offsets that their writers were told."""
        at = dict(
            zip(
                zip(rows["w"].to_pylist(), rows["n"].to_pylist(), strict=True),
                zip(rows["__bucket"].to_pylist(), rows["__offset"].to_pylist(), strict=True),
                strict=True,
            )
        )
        for answer in self._answers:
            for tablet, (start, end) in answer.offsets.items():
                if start < starts.get(tablet, 0):
                    continue
                mine = [n for n in answer.numbers if not tablet.partition or partition_of(n) == tablet.partition[0]]
                found = [at.get((answer.writer, n)) for n in mine]
                expected = [(tablet.bucket, offset) for offset in range(start, end)]
                require(found == expected, f"{name}: rows {mine} of {answer.writer} were answered {expected}: {found}")


def _texts_fit(rows: pa.Table) -> bool:
    n, w = rows["n"], rows["w"]
    expected = pc.binary_join_element_wise("row ", pc.cast(n, pa.string()), " of ", pc.cast(w, pa.string()), "")
    remainder = pc.subtract(n, pc.multiply(pc.divide(n, PARTITIONS), PARTITIONS))
    parts = pc.binary_join_element_wise("p", pc.cast(remainder, pa.string()), "")
    return bool(rows["s"].equals(expected) and rows["p"].equals(parts))


def _by_tablet(rows: pa.Table, partitioned: bool) -> dict[TabletId, pa.Table]:
    found = {}
    keys = ["p", "__bucket"] if partitioned else ["__bucket"]
    for key in rows.select(keys).group_by(keys).aggregate([]).to_pylist():
        chosen = pc.equal(rows["__bucket"], key["__bucket"])
        if partitioned:
            chosen = pc.and_(chosen, pc.equal(rows["p"], key["p"]))
        found[TabletId((key["p"],) if partitioned else (), key["__bucket"])] = rows.filter(chosen)
    return found


def _require_dense(what: str, rows: pa.Table, start: int, end: int) -> None:
    rows = rows.sort_by("__offset")
    offsets = rows["__offset"].to_numpy()
    dense = len(offsets) == end - start and np.array_equal(offsets, np.arange(start, end))
    require(dense, f"{what}: offsets {offsets[:5]}...{offsets[-5:]} ({len(offsets)}) are not [{start}, {end})")
    times = rows["__timestamp"].cast(pa.int64()).to_numpy()
    require((np.diff(times) >= 0).all(), f"{what}: commit times go back")
    writers, numbers = rows["w"].to_numpy(), rows["n"].to_numpy()
    for writer in np.unique(writers):
        require((np.diff(numbers[writers == writer]) > 0).all(), f"{what}: writer {writer} is out of order")


def _twice(numbers: Any) -> list[int]:
    return [int(n) for n in numbers[1:][np.diff(numbers) == 0][:20]]


# ---- keyed --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One write to a keyed table."""

    kind: Literal["upsert", "delete"]
    rows: tuple[dict[str, Any], ...]

    @property
    def columns(self) -> list[str]:
        return [c for c in KEYED_SCHEMA.names if c in self.rows[0]]

    def table(self) -> pa.Table:
        """The rows as Arrow, with the columns that the write has."""
        schema = pa.schema([KEYED_SCHEMA.field(c) for c in self.columns])
        return pa.Table.from_pylist(list(self.rows), schema=schema)

    def applied(self, live: Mapping[Key, Values]) -> dict[Key, Values | None]:
        """What it makes of its keys; None: gone."""
        out: dict[Key, Values | None] = {}
        for row in self.rows:
            key = (row["p"], row["k"])
            if self.kind == "delete":
                out[key] = None
                continue
            _, a, b = live.get(key, (0, None, None))
            out[key] = (row["v"], row.get("a", a), row.get("b", b))
        return out


class KeyedHistory:
    """Writes to one keyed table; each key is written by one thread, which has one write under way at most."""

    def __init__(self) -> None:
        self.live: dict[Key, Values] = {}
        self.writes: Counter[Key] = Counter()
        self._open: dict[int, Change] = {}
        self._lock = threading.Lock()
        self.answered_rows = 0

    def begin(self, writer: int, change: Change) -> None:
        """A write is on its way; it counts as unanswered until `answered`."""
        self._open[writer] = change

    def answered(self, writer: int) -> None:
        """The write was acknowledged."""
        change = self._open.pop(writer)
        with self._lock:
            self._adopt(change, change.applied(self.live))
            self.answered_rows += len(change.rows)

    def _adopt(self, change: Change, outcome: Mapping[Key, Values | None]) -> None:
        for key, values in outcome.items():
            if values is None:
                self.live.pop(key, None)
            else:
                self.live[key] = values
                self.writes[key] += 1

    def snapshot(self) -> dict[Key, Values]:
        """What is acknowledged now."""
        with self._lock:
            return dict(self.live)

    def settle(self, name: str, desc: TableDescriptor, actual: Mapping[Key, Values]) -> None:
        """Find out what became of unanswered writes: there wholly in a tablet, or not at all."""
        for change in self._open.values():
            outcome = change.applied(self.live)
            for keys in _tablet_keys(desc, list(outcome)):
                before = {k: self.live.get(k) for k in keys}
                after = {k: outcome[k] for k in keys}
                found = {k: actual.get(k) for k in keys}
                require(
                    found in (before, after),
                    f"{name}: of an unanswered {change.kind} of {after} over {before} there is {found}",
                )
                if found == after:
                    self._adopt(change, after)
        self._open.clear()

    def check(self, name: str, desc: TableDescriptor, rows: pa.Table) -> None:
        """Compare all rows of the table; settles what is unanswered."""
        actual = keyed_rows(rows)
        require(len(actual) == rows.num_rows, f"{name}: {rows.num_rows} rows have {len(actual)} keys")
        self.settle(name, desc, actual)
        wrong = differences(actual, self.live)
        require(not wrong, f"{name}: rows differ from what was acknowledged (key: found, expected): {wrong}")


def keyed_rows(rows: pa.Table) -> dict[Key, Values]:
    """Key -> values of rows with the columns of `KEYED_SCHEMA`."""
    p, k, v, a, b = (rows[c].to_pylist() for c in KEYED_SCHEMA.names)
    return dict(zip(zip(p, k, strict=True), zip(v, a, b, strict=True), strict=True))


def differences(found: Mapping[Key, Any], expected: Mapping[Key, Any], most: int = 5) -> dict[Key, tuple[Any, Any]]:
    """Some of the keys whose values differ."""
    wrong = [k for k in found.keys() | expected.keys() if found.get(k) != expected.get(k)]
    return {k: (found.get(k), expected.get(k)) for k in sorted(wrong)[:most]}


def _tablet_keys(desc: TableDescriptor, keys: Sequence[Key]) -> Iterable[list[Key]]:
    batch = pa.RecordBatch.from_pydict(
        {"p": [p for p, _ in keys], "k": [k for _, k in keys]},
        schema=pa.schema([desc.schema.field("p"), desc.schema.field("k")]),
    )
    for _, rows in route(desc, batch):
        yield list(keys) if rows is None else [keys[int(i)] for i in rows]
