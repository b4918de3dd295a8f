"""A server whose table is altered: what whoever knows the old definition is told, and what nobody sees in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.altering import added, widened
from tests.waiting import WAIT_SECONDS

from lakehead.api.table import Table, handle_of
from lakehead.client.batch_writer import BatchWriter
from lakehead.client.routes import OneServer
from lakehead.client.table import TableHandle
from lakehead.config import Limits
from lakehead.env import Env
from lakehead.errors import LakeheadError, SchemaChangedError, SchemaMismatchError
from lakehead.kv import KvTablet
from lakehead.predicate import parse_predicate
from lakehead.predicate.read_spec import ReadSpec
from lakehead.protocol import messages as m
from lakehead.protocol.alterations import Alteration, DropColumn, RenameColumn
from lakehead.server.endpoint import LocalEndpoint
from lakehead.server.group_commit import PendingWrite
from lakehead.server.notes import MakeCheckpoint
from lakehead.server.service import Service
from lakehead.server.tables import LiveTable
from lakehead.types import Schemas, TableDescriptor, TablePath

SCHEMA = pa.schema([pa.field("k", pa.int64(), False), ("a", pa.int32()), ("b", pa.string())])
CHANGES: list[Alteration] = [
    added("note", pa.string(), after="k"),
    RenameColumn(name="b", to="bee"),
    widened("a", pa.int64()),
]
BIG = 1 << 40


class Served:
    """A table of two buckets, as it was opened at first, and as it is now."""

    def __init__(self, folder: Path, *, keyed: bool) -> None:
        self.service = Service(str(folder), env=Env.system(), limits=Limits(), lake=None)
        self.endpoint = LocalEndpoint(self.service)
        key = ("k",) if keyed else ()
        desc = TableDescriptor("", TablePath("a", "t"), Schemas.only(SCHEMA), key, (), key, 2, None)
        reply, _ = self.endpoint.call(m.CreateTable(info=m.TableInfo.of(desc), if_not_exists=False))
        self.old = self.handle(reply)
        self.kind: Any = "upsert" if keyed else "append"

    def handle(self, reply: m.TableReply) -> TableHandle:
        return TableHandle(reply.info.descriptor(), OneServer(self.endpoint), Env.system())

    def of_another_client(self, handle: TableHandle) -> TableHandle:
        """The same definition; rows of one client may wait for one another before they are sent."""
        return TableHandle(handle.desc, OneServer(self.endpoint), Env.system())

    def opened(self) -> TableHandle:
        return self.handle(self.endpoint.call(m.GetTable(database="a", table="t"))[0])

    @property
    def live(self) -> LiveTable:
        return self.service._tables.get(self.old.desc.table_id)

    def put(self, handle: TableHandle, rows: list[dict[str, Any]], kind: Any = None) -> None:
        names = [n for n in handle.desc.schema.names if n in rows[0]]
        schema = pa.schema([handle.desc.schema.field(n) for n in names])
        handle.writers.write(kind or self.kind, pa.Table.from_pylist(rows, schema))

    def alter(self, changes: list[Alteration] | None = None) -> TableHandle:
        return self.opened().altered(CHANGES if changes is None else changes)

    def read(self, handle: TableHandle, *, live: bool = False) -> list[dict[str, Any]]:
        ranges = {t.key: (0, t.high_watermark) for t in handle.log.tablets()}
        spec = ReadSpec(tuple(handle.desc.schema.names))
        found = [r for _, b in handle.log.read_ranges(ranges, spec, live=live) for r in b.to_pylist()]
        return sorted(found, key=lambda r: r["k"])


@pytest.fixture(params=["log", "keyed"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path, keyed=request.param == "keyed")
    yield made
    made.service.close()


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path, keyed=True)
    yield made
    made.service.close()


def old(k: int) -> dict[str, Any]:
    return {"k": k, "a": k, "b": f"b{k}"}


def new(k: int, note: str | None = None) -> dict[str, Any]:
    return {"k": k, "note": note, "a": k, "bee": f"b{k}"}


# ---- who knows the old definition ---------------------------------------------------------------------------------


def test_rows_of_before_are_read_as_they_were(served: Served) -> None:
    served.put(served.old, [old(k) for k in range(9)])
    altered = served.alter([*CHANGES, DropColumn(name="bee")])
    assert served.read(served.old) == [old(k) for k in range(9)]
    assert served.read(altered) == [{"k": k, "note": None, "a": k} for k in range(9)]


@pytest.mark.parametrize("live", [False, True])
def test_rows_of_after_are_not_read_as_if_they_were_of_before(keyed: Served, live: bool) -> None:
    """Who reads so does not know that a column is there: a round would leave its values behind."""
    keyed.put(keyed.old, [old(k) for k in range(4)])
    altered = keyed.alter([*CHANGES, DropColumn(name="bee")])
    keyed.put(altered, [{"k": k, "note": "x", "a": BIG} for k in range(4)])
    with pytest.raises(SchemaChangedError):
        keyed.read(keyed.old, live=live)
    for tablet in keyed.live.tablets.values():
        tablet.apply_note(MakeCheckpoint())
    with pytest.raises(SchemaChangedError):
        keyed.read(keyed.old, live=live)


def test_rows_of_after_are_not_skipped_either(served: Served) -> None:
    served.put(served.old, [old(k) for k in range(200)])
    altered = served.alter([DropColumn(name="b")])
    served.put(altered, [{"k": k, "a": k} for k in range(200, 400)])
    request = m.Read(
        table_id=served.old.desc.table_id,
        ranges=[m.TabletRange(partition="", bucket=t.key.bucket, start=0, end=t.high_watermark)
                for t in served.old.log.tablets()],
        columns=["k"],
        predicate=parse_predicate("b = 'b1'", SCHEMA).to_bytes(),
        schema_id=served.old.desc.schema_id,
    )  # fmt: skip
    with pytest.raises(SchemaChangedError):
        list(served.endpoint.stream(request))


def test_lookups_leases_and_subscriptions_are_told(keyed: Served) -> None:
    keyed.put(keyed.old, [old(1)])
    keyed.alter()
    keys = pa.RecordBatch.from_pydict({"k": [1]}, pa.schema([SCHEMA.field("k")]))
    with pytest.raises(SchemaChangedError):
        keyed.old.lookups.by_key(keys)
    with pytest.raises(SchemaChangedError):
        keyed.old.leases.open([keyed.old.leased(None)], planned=False)
    with pytest.raises(SchemaChangedError):
        keyed.old.log.subscribe(starts={}, default="full", stops=None, spec=ReadSpec(("k",)))
    with pytest.raises(SchemaChangedError):
        keyed.old.altered([DropColumn(name="a")])
    assert keyed.opened().lookups.by_key(keys).to_pylist() == [new(1)]


def test_a_schema_that_never_was(served: Served) -> None:
    strange = served.alter()
    served.put(strange, [new(0)])
    before = [t.high_watermark for t in served.live.tablets.values()]
    desc = strange.desc
    later = TableDescriptor(
        desc.table_id, desc.path, Schemas((*desc.schemas.known, _numbered(desc, 7))), desc.primary_key, (),
        desc.bucket_key, 2, None,
    )  # fmt: skip
    handle = TableHandle(later, OneServer(served.endpoint), Env.system())
    with pytest.raises(SchemaMismatchError, match="no schema 7"):
        served.put(handle, [new(1)])
    with pytest.raises(SchemaMismatchError, match="no schema 7"):
        served.read(handle)
    assert [t.high_watermark for t in served.live.tablets.values()] == before


def _numbered(desc: TableDescriptor, number: int) -> Any:
    return type(desc.schemas.current)(number, desc.schemas.current.fields)


# ---- writers of several definitions -------------------------------------------------------------------------------


def test_writes_of_several_definitions_in_one_group(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that comes while a group is committed is the next group, whatever its writers know."""
    first = served.opened()
    second = served.alter(CHANGES)
    third = served.alter([RenameColumn(name="bee", to="c"), DropColumn(name="note"), added("note", pa.bool_())])
    partial = [{"k": 1, "a": 5}] if served.kind == "upsert" else [old(1)]
    wanted_note = True
    order: list[tuple[TableHandle, list[dict[str, Any]]]] = [
        (first, [old(k) for k in range(6)]),
        (second, [{**new(k, "n"), "a": BIG} for k in range(4, 10)]),
        (third, [{"k": k, "a": k, "c": "c", "note": wanted_note} for k in range(8, 12)]),
        (first, partial),
        (third, [{"k": 9, "a": 1, "c": None, "note": None}]),
    ]
    held: list[tuple[Any, PendingWrite]] = []
    tablets = served.live.tablets.values()
    for tablet in tablets:
        monkeypatch.setattr(tablet, "submit", lambda write, t=tablet: held.append((t, write)))
    threads = []
    for handle, rows in order:
        thread = threading.Thread(target=served.put, args=(served.of_another_client(handle), rows))
        writes = len(held)
        thread.start()
        threads.append(thread)
        while len(held) == writes:
            assert thread.is_alive(), "the write failed before it was queued"
    # The last ones may have a second part on its way.
    for thread in threads:
        thread.join(0.2)
    monkeypatch.undo()
    drivers = [tablet for tablet, write in held if tablet.submit(write)]
    for tablet in drivers:
        tablet.drive()
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
    found = served.read(served.opened(), live=False)
    if served.kind == "upsert":
        found = sorted(
            served.opened().lookups.by_key(
                pa.RecordBatch.from_pydict({"k": list(range(12))}, pa.schema([SCHEMA.field("k")]))
            ).to_pylist(),
            key=lambda r: r["k"],
        )  # fmt: skip
        assert found == [
            {"k": 0, "a": 0, "c": "b0", "note": None},
            {"k": 1, "a": 5, "c": "b1", "note": None},
            *({"k": k, "a": k, "c": f"b{k}", "note": None} for k in (2, 3)),
            *({"k": k, "a": BIG, "c": f"b{k}", "note": None} for k in (4, 5, 6, 7)),
            {"k": 8, "a": 8, "c": "c", "note": True},
            {"k": 9, "a": 1, "c": None, "note": None},
            *({"k": k, "a": k, "c": "c", "note": True} for k in (10, 11)),
        ]
    else:
        assert len(found) == 6 + 6 + 4 + 1 + 1 and {r["k"] for r in found if r["note"]} == {8, 9, 10, 11}


def test_what_is_sent_again_after_an_alter_is_answered_as_before(served: Served) -> None:
    writer = BatchWriter(served.old.desc, OneServer(served.endpoint), Env.system().clock, writer_id=bytes(16))
    batch = pa.RecordBatch.from_pylist([old(k) for k in range(5)], SCHEMA)
    write = writer.prepare(served.kind, batch)
    first = writer.send(write)
    served.alter([DropColumn(name="a")])
    reply, _ = served.endpoint.call(write.request, write.bodies)
    assert reply.offsets == [offsets for _, offsets in first]


def test_a_partial_write_leaves_alone_what_it_does_not_know(keyed: Served) -> None:
    keyed.put(keyed.old, [old(1)])
    altered = keyed.alter([added("note", pa.string(), after="k"), RenameColumn(name="b", to="a2"),
                           RenameColumn(name="a", to="b"), widened("b", pa.int64())])  # fmt: skip
    keyed.put(altered, [{"k": 1, "note": "x", "b": BIG}])
    keyed.put(keyed.old, [{"k": 1, "b": "named b once"}])
    keys = pa.RecordBatch.from_pydict({"k": [1]}, pa.schema([SCHEMA.field("k")]))
    assert altered.lookups.by_key(keys).to_pylist() == [{"k": 1, "note": "x", "b": BIG, "a2": "named b once"}]
    keyed.put(keyed.old, [{"k": 1}], "delete")
    assert altered.lookups.by_key(keys).num_rows == 0


# ---- in between ---------------------------------------------------------------------------------------------------


def test_all_tablets_change_at_one_moment(keyed: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that is taken while a table is altered has rows of the old definition alone."""
    keyed.put(keyed.old, [old(k) for k in range(8)])
    alter, paused = KvTablet.alter, []

    def seen(kv: KvTablet, schemas: Schemas) -> None:
        paused.append([t._plan_lock.locked() for t in keyed.live.tablets.values()])
        alter(kv, schemas)

    monkeypatch.setattr(KvTablet, "alter", seen)
    keyed.alter()
    assert paused == [[True, True]] * 2, "no group is planned until all have it"


def test_who_opens_a_table_that_is_being_altered_can_use_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.put(served.old, [old(1)])
    alter = LiveTable.alter
    went_wrong: list[BaseException] = []

    def use() -> None:
        try:
            handle = served.opened()
            served.put(handle, [new(2) if "note" in handle.desc.schema.names else old(2)])
        except LakeheadError as e:
            went_wrong.append(e)

    user = threading.Thread(target=use)

    def slowly(table: LiveTable, desc: TableDescriptor) -> None:
        user.start()
        user.join(0.3)
        alter(table, desc)

    monkeypatch.setattr(LiveTable, "alter", slowly)
    served.alter()
    user.join(WAIT_SECONDS)
    assert not went_wrong
    assert served.read(served.opened()) == [new(1), new(2)]


def test_a_call_goes_on_however_often_the_table_was_altered(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(served.old)
    now, left = TableHandle.now, [3]

    def altered_again(handle: TableHandle) -> TableHandle:
        found = now(handle)
        if left[0]:
            left[0] -= 1
            found.altered([added(f"c{left[0]}", pa.int8())])
        return found

    served.put(served.old, [old(1)])
    served.alter([added("c", pa.int8())])
    monkeypatch.setattr(TableHandle, "now", altered_again)
    assert table.scan().to_arrow().num_rows == 1
    assert handle_of(table).desc.schema.names == [*SCHEMA.names, "c", "c2", "c1", "c0"]
