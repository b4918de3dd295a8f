"""Subscribers that go on through every kill: each offset once, in order, and a state that follows from the changes."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.crash.history import Key, Values, WrongDataError, differences, keyed_rows, require

import lakehead as lh
from lakehead.api.table import handle_of

_PAUSE_SECONDS = 0.02


@dataclass
class _State:
    """One tablet of a keyed table, replayed: key -> (values, offset), as of ``offset``."""

    offset: int = 0
    rows: dict[Key, tuple[Values, int]] = field(default_factory=dict)

    def apply(self, change: str, key: Key, values: Values, offset: int) -> None:
        there = self.rows.get(key)
        what = f"{change} of {key} at offset {offset}"
        require(offset == self.offset, f"{what}: the next offset is {self.offset}")
        self.offset += 1
        if change == "+I":
            require(there is None, f"{what}: it is there: {there}")
        elif change == "+U":
            require(there is not None, f"{what}: it is not there")
        else:
            require(there is not None and there[0] == values, f"{what}: {values} was {there}")
        if change == "-D":
            del self.rows[key]
        elif change != "-U":
            self.rows[key] = (values, offset)


def watermarks(table: lh.Table) -> dict[lh.TabletId, tuple[int, int]]:
    """Start and high watermark of each tablet."""
    states = handle_of(table).log.tablets()
    return {handle_of(table).desc.tablet_id(t.key): (t.log_start, t.high_watermark) for t in states}


class Follower(threading.Thread):
    """Subscribes to one table from its beginning, and again from its last offsets whenever the server went away."""

    def __init__(self, table: lh.Table, *, keep_changes: bool) -> None:
        """Follow a table; ``keep_changes`` keeps them until `check_lake` has gone over them."""
        super().__init__(name=f"follow {table.name}", daemon=True)
        self.table = table
        self.keyed = bool(table.primary_key)
        self._forgets = self.keyed and not table.properties["lake_changelog"]
        self._keep_changes = keep_changes
        self.positions: dict[lh.TabletId, int] = {}
        self.problem: BaseException | None = None
        self.resumed = 0
        self.restarted = 0
        """How often a keyed follower had to begin again from the live rows, because its offsets were trimmed."""
        self.sums: Counter[lh.TabletId] = Counter()
        self.versions: Counter[Key] = Counter()
        self.writes: Counter[Key] = Counter()
        self._now: dict[lh.TabletId, _State] = {}
        self._then: dict[lh.TabletId, _State] = {}
        self._events: dict[lh.TabletId, list[tuple[str, Key, Values, int]]] = {}
        self._over = threading.Event()
        self._feed: lh.Subscription | None = None

    def run(self) -> None:
        full = False
        while not self._over.is_set():
            try:
                full = full or (self._forgets and self._trimmed())
                if full:
                    self._forget()
                    self.restarted += 1
                start: Any = "full" if full else dict(self.positions) or "earliest"
                with self.table.subscribe(start) as feed:
                    self._feed = feed
                    full = False
                    for batch in feed:
                        self._take(batch)
            except lh.OffsetOutOfRangeError as e:
                if not self._forgets:
                    self.problem = e
                    return
                full = True
            except (lh.UnavailableError, lh.ClosedError):
                self.resumed += 1
                self._over.wait(_PAUSE_SECONDS)
            except BaseException as e:
                self.problem = e
                return

    def stop(self) -> None:
        """End; the thread is joined."""
        self._over.set()
        if self._feed is not None:
            self._feed.close()
        self.join(30)

    def reached(self, ends: dict[lh.TabletId, tuple[int, int]]) -> bool:
        """Whether all tablets were followed up to their high watermarks; raises what stopped the thread."""
        if self.problem is not None:
            raise WrongDataError(f"follower of {self.table.name}: {self.problem!r}") from self.problem
        return all(self.positions.get(tablet, 0) >= end for tablet, (_, end) in ends.items())

    def _trimmed(self) -> bool:
        """Whether the log lacks changes that come next."""
        return any(start > self.positions.get(tablet, 0) for tablet, (start, _) in watermarks(self.table).items())

    def _forget(self) -> None:
        for kept in (self.positions, self._now, self._then, self._events, self.writes):
            kept.clear()

    def _take(self, batch: lh.Batch) -> None:
        rows = batch.rows
        if self.keyed:
            self._take_changes(batch)
        elif rows.num_rows:
            offsets = rows["__offset"].to_numpy()
            at = self.positions.get(batch.tablet, 0)
            require(offsets[0] == at, f"{batch.tablet}: offset {offsets[0]} came where {at} is next")
            require(
                offsets[-1] - at + 1 == len(offsets) == batch.end_offset - at,  # type: ignore[operator]
                f"{batch.tablet}: {len(offsets)} rows are [{at}, {batch.end_offset})",
            )
            self.sums[batch.tablet] += int(rows["n"].to_numpy().sum())
        if batch.end_offset is not None:
            self.positions[batch.tablet] = batch.end_offset

    def _take_changes(self, batch: lh.Batch) -> None:
        tablet, rows = batch.tablet, batch.rows
        initial = tablet not in self.positions and (not rows.num_rows or rows["__timestamp"].null_count)
        columns = (rows[c].to_pylist() for c in ("__change_type", "p", "k", "v", "a", "b", "__offset"))
        state = self._now.setdefault(tablet, _State())
        for change, p, k, v, a, b, offset in zip(*columns, strict=True):
            key, values = (p, k), (v, a, b)
            if initial:
                require(change == "+I" and key not in state.rows, f"{tablet}: initial {change} of {key} twice")
                state.rows[key] = (values, offset)
                self.versions[key] = v
                continue
            state.apply(change, key, values, offset)
            if self._keep_changes:
                self._events.setdefault(tablet, []).append((change, key, values, offset))
            if change in ("+I", "+U"):
                require(v > self.versions[key], f"{tablet}: {key} got version {v} after {self.versions[key]}")
                self.versions[key] = v
                self.writes[key] += 1
        if batch.end_offset is None:
            return
        if initial:
            state.offset = batch.end_offset
            self._then[tablet] = _State(state.offset, dict(state.rows))
        require(
            state.offset == batch.end_offset or not rows.num_rows,
            f"{tablet}: the batch ends at {state.offset}, not at {batch.end_offset}",
        )

    # ---- what the changes came to; only while no write is under way ---------------------------------------------

    def live(self) -> dict[Key, Values]:
        """The state that all changes make."""
        return {key: values for state in self._now.values() for key, (values, _) in state.rows.items()}

    def check_lake(self, tablet: lh.TabletId, tiered: int, rows: Any) -> bool:
        """The lake holds exactly the state at ``tiered``; False when changes below were not seen one by one."""
        state = self._then.setdefault(tablet, _State())
        if tiered < state.offset:
            return False
        events = self._events.get(tablet, [])
        done = 0
        for event in events:
            if event[3] >= tiered:
                break
            state.apply(*event)
            done += 1
        del events[:done]
        require(state.offset == tiered, f"{tablet}: {state.offset} changes were seen of {tiered} in the lake")
        keys = zip(rows["p"].to_pylist(), rows["k"].to_pylist(), strict=True)
        offsets = dict(zip(keys, rows["__offset"].to_pylist(), strict=True))
        found = {key: (values, offsets[key]) for key, values in keyed_rows(rows).items()}
        require(len(found) == rows.num_rows, f"{tablet}: the lake has {rows.num_rows} rows of {len(found)} keys")
        wrong = differences(found, state.rows)
        require(not wrong, f"{self.table.name} {tablet}: the lake at {tiered} is no prefix (found, expected): {wrong}")
        return True
