"""Users of a simulated deployment that alter, empty and rename tables, and that write what others have altered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from tests.altering import Shape, value_of
from tests.simulation.deployment import Deployment
from tests.simulation.history import TabletHistory, defaults_in, ids_of, require
from tests.simulation.workload import KEYS, Actor

from lakehead.errors import (
    FencedError,
    SchemaChangedError,
    SequenceGapError,
    TableExistsError,
    TableNotFoundError,
    UnavailableError,
)
from lakehead.protocol import messages as m
from lakehead.protocol.alterations import Alteration
from lakehead.types import TableDescriptor, TablePath, TableSchema

TYPES = (pa.int8(), pa.int32(), pa.float32(), pa.string(), pa.decimal128(5, 2))


class Alterer(Actor):
    """The only one who alters a table. Whatever becomes of its requests, the table has the definition that it knew, or
    the one of an attempt on that."""

    def __init__(self, deployment: Deployment, desc: TableDescriptor, name: str) -> None:
        super().__init__(deployment, desc, name)
        self._attempts: list[Shape] = []
        self._ids = set(ids_of(desc.schemas.current))

    def run(self, times: int) -> None:
        """Alter so often, until it is known."""
        while times:
            self.think(0.3)
            try:
                self._look()
                changes, shape = self._some_changes()
                self._attempts.append(shape)
                before = self.client
                self.client = before.altered(changes)
                self.note("altered", [type(c).__name__ for c in changes])
                self._took(before.desc, self.client.desc)
                times -= 1
            except SchemaChangedError:
                # An attempt has come through before: one of those that were given up, or this one, which the network
                # repeats, its copy first. Whose it was is seen at the next look.
                self.note("altered before")
            except self.expected as e:
                self.note("alter unknown", type(e).__name__)

    def _look(self) -> None:
        """How the table is defined now."""
        before, self.client = self.client, self.client.now()
        if self.client.desc.schemas != before.desc.schemas:
            self.note("altered late")
            self._took(before.desc, self.client.desc)

    def _took(self, before: TableDescriptor, now: TableDescriptor) -> None:
        old, new = before.schemas.current, now.schemas.current
        require(new.id == old.id + 1, f"{self.name}: schema {old.id} became {new.id}")
        kept = dict(zip((c.number for c in Shape.of(before.schema).columns), ids_of(old), strict=True))
        fits = [s for s in self._attempts if s.schema == now.schema and self._keeps_ids(s, kept, new)]
        require(bool(fits), f"{self.name}: {old} became {new}, attempts were {self._attempts}")
        self._ids |= set(ids_of(new))
        self._attempts = []

    def _keeps_ids(self, shape: Shape, kept: Mapping[int, int], new: TableSchema) -> bool:
        """Whether these columns have the ids that they had, and new ones such as none ever had, and their defaults."""
        defaults = defaults_in(new)
        return all(
            kept[c.number] == i if c.number in kept else i not in self._ids and defaults.get(i) == c.default
            for c, i in zip(shape.columns, ids_of(new), strict=True)
        )

    def _some_changes(self) -> tuple[list[Alteration], Shape]:
        """Some that do not come to nothing."""
        desc = self.client.desc
        changes: list[Alteration] = []
        first = shape = Shape.of(desc.schema)
        fixed = [*desc.primary_key, *desc.partition_by]
        while shape.columns == first.columns or self.draws.random() < 0.4:
            changes.append(shape.next_change(self.draws.choice, fixed=fixed, types=TYPES))
            shape = shape.after(changes[-1])
        return changes, shape


class CurrentWriter(Actor):
    """Writes batches once each, with the columns that the table has, or had a moment ago."""

    def run(self, batches: int) -> None:
        for n in range(batches):
            self.think(0.1)
            try:
                if self.draws.random() < 0.7:
                    self.client = self.client.now()
                offsets = self.client.writers.write("upsert" if self.desc.keyed else "append", self._rows(n * 10))
                self.note("current write", [self.client.desc.schema_id, *((str(k), *o) for k, o in offsets)])
            except self.expected as e:
                self.note("write unknown", type(e).__name__)
            except SequenceGapError:
                require(self.lossy(), f"{self.name}: a batch was refused that follows the one before")
                self.note("write refused")

    def _rows(self, tag: int) -> pa.Table:
        desc, draws = self.client.desc, self.draws
        free = [c for c in Shape.of(desc.schema).columns if c.name not in desc.primary_key]
        if self.desc.keyed:
            free = [c for c in free if not c.nullable or draws.random() < 0.7]
        rows: list[dict[str, Any]] = []
        for i in range(draws.randint(1, 4)):
            key = dict(zip(("p", "k"), draws.choice(KEYS), strict=True)) if self.desc.keyed else {}
            drawn = {c.name: tag + i + c.number if not c.nullable or draws.random() < 0.8 else None for c in free}
            rows.append({**key, **{c.name: value_of(c.type, drawn[c.name]) for c in free}})
        return pa.Table.from_pylist(rows, pa.schema([f for f in desc.schema if f.name in rows[0]]))


class Truncator(Actor):
    """Takes all rows of a table away, now and then; not of log tables with a lake, where the lake decides."""

    def run(self, times: int) -> None:
        """Until so many have come through."""
        while times:
            self.think(0.5)
            cuts = self._cuts()
            try:
                self.client = self.client.now()
                ends = self.client.truncate()
                states = {s.key: s for s in self.client.log.tablets(sync=False)}
            except SchemaChangedError:
                continue
            except self.expected as e:
                self.note("truncation unknown", type(e).__name__)
                continue
            self.note("truncated", [(str(k), end) for k, end in ends.items()])
            times -= 1
            if cuts == self._cuts():
                for key, end in ends.items():
                    self._check(self.deployment.history.tablet(self.desc.table_id, key), end, states[key].log_start)

    def _cuts(self) -> int:
        """How often a tablet lost what was not synced, also one that was new when the truncation began."""
        return sum(t.cuts for t in self.deployment.history.of(self.desc.table_id))

    def _check(self, tablet: TabletHistory, end: int, log_start: int) -> None:
        if self.desc.keyed:
            left = [o for o in tablet.state_at(tablet.end).values() if o < end]
            require(not left, f"{tablet.name} was emptied at {end} and has {left}")
        else:
            require(log_start >= end, f"{tablet.name} was emptied at {end} and begins at {log_start}")


class Renamer:
    """Calls tables something else, or by each other's names, while everybody uses them. None of its requests arrives
    again later, so that it knows their names, or the two that one may have."""

    def __init__(self, deployment: Deployment, tables: Sequence[TableDescriptor]) -> None:
        self.deployment = deployment
        self._names: Mapping[str, TablePath] = {t.table_id: t.path for t in tables}
        self._may_be: list[Mapping[str, TablePath]] = []
        """What a restart may find instead, of renames whose commits failed, until one comes through."""

    def run(self, times: int) -> None:
        d, draws = self.deployment, self.deployment.draws
        for n in range(times):
            d.scheduler.sleep(draws.random() * 0.5)
            table_id, other = draws.sample(sorted(self._names), 2)
            swap = draws.random() < 0.3
            new = self._names[other] if swap else TablePath("sim", f"table{n}")
            old = self._names[table_id]
            request = m.RenameTable(
                database=old.database, table=old.table, to_database=new.database, to_table=new.table, swap=swap
            )
            exchanged = {old: new, **({new: old} if swap else {})}
            before = [self._names, *self._may_be]
            after = [{i: exchanged.get(p, p) for i, p in names.items()} for names in before]
            try:
                d.network.deliver(request, [])
                self._may_be = []
                self._look(*after)
            except (TableNotFoundError, TableExistsError):
                require(len(before) > 1, f"{old} could not be called {new}")
                self._look(*before)
            except FencedError as e:
                require(d.tells_second_owner, f"the lock is there: {e}")
                self._look(*before)
            except UnavailableError as e:
                d.note("renamer", "rename unknown", type(e).__name__)
                self._may_be = [*before, *after]
                self._look(*self._may_be)
            d.note("renamer", "renamed", [str(self._names[i]) for i in sorted(self._names)])

    def _look(self, *possible: Mapping[str, TablePath]) -> None:
        """What the tables are called now, all of them at once."""
        found = {table_id: self._name(table_id) for table_id in self._names}
        require(found in possible, f"tables are called {found}, must be one of {possible}")
        self._names = found

    def _name(self, table_id: str) -> TablePath:
        d = self.deployment
        while True:
            try:
                reply, _ = d.network.deliver(m.TableNow(table_id=table_id), [])
                found = reply.info.path
                again, _ = d.network.deliver(m.GetTable(database=found.database, table=found.table), [])
            except UnavailableError:
                d.scheduler.sleep(0.05)
                continue
            require(again.info.table_id == table_id, f"{found} is another table than the one that is called so")
            return found
