"""A backup, also of a folder in use, is one state of it; what is restored goes on by itself."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.integration.test_copies import SOME_KINDS, Model, filled, outside, refused, state

import lakehead as lh
from lakehead.api import backup as backups
from lakehead.api import backup_files
from lakehead.api.backup import back_up, restore
from lakehead.api.table import handle_of
from lakehead.cli.main import main
from lakehead.client.routes import OneServer
from lakehead.client.table import TableHandle
from lakehead.env import Env, SystemClock
from lakehead.errors import (
    ChecksumError,
    CorruptionError,
    FolderCopiedError,
    InvalidRequestError,
    LakeheadError,
    OffsetOutOfRangeError,
    StorageError,
    TableNotFoundError,
    UnsupportedFormatError,
)
from lakehead.predicate.read_spec import ReadSpec
from lakehead.server.endpoint import LocalEndpoint
from lakehead.types import TabletId, TabletKey

assert outside is not None  # a fixture

NUMBERS = pa.schema([("k", pa.int64()), ("v", pa.int64())])
KEYS = 40
KINDS: dict[str, dict[str, Any]] = {
    "log": {},
    "keyed": {"primary_key": ["k"]},
    "named": {},
    "spread": {"buckets": 3},
    "hashed": {"primary_key": ["k"], "buckets": 4},
    "parted": {"partition_by": ["k"]},
}
ONE_TABLET = ("log", "keyed", "named")


@SOME_KINDS
def test_a_restored_folder_goes_on_and_the_original_too(tmp_path: Path, kind: str) -> None:
    model = Model(kind)
    with lh.connect(tmp_path / "a") as con:
        model.fill(con)
        made = back_up(con, str(tmp_path / "a"), str(tmp_path / "backup"))
        assert (made.tables, made.lakes_outside) == (("shop.t",), ())
        saved = model.fork()
        model.put(con, range(500, 520), "later")
        model.tier(con)
    before, kept = state(tmp_path / "a"), state(tmp_path / "backup")
    for name in ("one", "two"):
        restored = saved.fork()
        assert restore(str(tmp_path / "backup"), str(tmp_path / name)).files == made.files
        restored.go_on(tmp_path / name, name)
        with lh.connect(tmp_path / name) as con:
            con.drop_table("shop.t", purge=True)
    assert state(tmp_path / "a") == before and state(tmp_path / "backup") == kept
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "a").mkdir()
    restore(str(tmp_path / "backup"), str(tmp_path / "a"))
    saved.go_on(tmp_path / "a", "again")


class Load:
    """Writers, rounds, maintenance and clean-up, until told to stop; each writer counts what was acknowledged."""

    def __init__(self, con: lh.Connection) -> None:
        self.con = con
        self.acknowledged = dict.fromkeys(KINDS, 0)
        self._stop = threading.Event()
        self._progress = threading.Condition()
        self._errors: list[BaseException] = []
        for name, kind in KINDS.items():
            con.create_table(name, NUMBERS, lake="iceberg", hot_retention="0s", segment_bytes=4096, **kind)

    def write(self, name: str) -> None:
        table = self.con.table(name)
        writer = table.writer("job") if name == "named" else None
        while not self._stop.is_set():
            n = self.acknowledged[name]
            # Batches that span tablets are not promised whole.
            step = 7 if name in ONE_TABLET else 1
            rows = [{"k": i if name in ("log", "named", "spread") else i % KEYS, "v": i} for i in range(n, n + step)]
            if writer is not None:
                writer.append(rows)
                writer.flush()
            elif "primary_key" in KINDS[name]:
                table.upsert(rows)
            else:
                table.append(rows)
            with self._progress:
                self.acknowledged[name] = n + step
                self._progress.notify_all()

    def wait_for(self, least: int) -> None:
        """Return once each writer has been acknowledged so many rows."""
        with self._progress:
            assert self._progress.wait_for(lambda: min(self.acknowledged.values()) >= least or self._errors, 120)
        assert not self._errors, self._errors

    def _run(self, work: Callable[[str], None], name: str) -> None:
        try:
            work(name)
        except BaseException as e:
            self._errors.append(e)

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._run, args=(self.write, n)) for n in self.acknowledged]
        threads.append(threading.Thread(target=self._tier_all))
        for t in threads:
            t.start()
        try:
            yield
        finally:
            self._stop.set()
            for t in threads:
                t.join()
        assert not self._errors, self._errors

    def _tier_all(self) -> None:
        while not self._stop.is_set():
            for name in self.acknowledged:
                self._run_once(name)

    def _run_once(self, name: str) -> None:
        try:
            server = self.con._server
            assert isinstance(server, LocalEndpoint)
            self.con.tier(name)
            server.service.maintain()
            self.con.create_table("passing", NUMBERS, lake="iceberg").append([{"k": 1, "v": 1}])
            self.con.drop_table("passing", purge=True)
        except BaseException as e:
            self._errors.append(e)


def after(n: int, name: str) -> list[tuple[int, int]]:
    """What a table holds once ``n`` rows were written."""
    if name == "parted":
        return sorted((i % KEYS, i) for i in range(n))
    if "primary_key" not in KINDS[name]:
        return [(i, i) for i in range(n)]
    return sorted({i % KEYS: i for i in range(n)}.items())


def test_a_backup_under_load_is_a_state_that_was(tmp_path: Path) -> None:
    floors = []
    with lh.connect(tmp_path / "a") as con:
        load = Load(con)
        with load.running():
            for n in range(2):
                load.wait_for(60 * (n + 1))
                floors.append(dict(load.acknowledged))
                back_up(con, str(tmp_path / "a"), str(tmp_path / f"backup{n}"))
    for n, floor in enumerate(floors):
        restore(str(tmp_path / f"backup{n}"), str(tmp_path / f"r{n}"))
        with lh.connect(tmp_path / f"r{n}") as con:
            assert set(con.tables()) - {"default.passing"} == {f"default.{x}" for x in floor}
            for _ in range(2):
                for name, least in floor.items():
                    table = con.table(name)
                    rows = sorted((r["k"], r["v"]) for r in table.scan().to_arrow().to_pylist())
                    count = max((v for _, v in rows), default=-1) + 1
                    assert count >= least and rows == after(count, name)
                    con.tier(name)
                    assert table.scan(tier="lake").count() == len(rows)
            with con.table("named").writer("job") as writer:
                last, rows_before = writer.last_sequence, con.table("named").scan().count()
                assert last is None or (last + 1) * 7 <= rows_before
                writer.append([{"k": rows_before, "v": rows_before}])
            assert con.table("named").scan().count() == rows_before + 1
    with lh.connect(tmp_path / "a") as con:
        for name, count in load.acknowledged.items():
            rows = sorted((r["k"], r["v"]) for r in con.table(name).scan().to_arrow().to_pylist())
            assert rows == after(count, name)


@SOME_KINDS
def test_a_lake_outside_is_not_in_the_backup(tmp_path: Path, outside: lh.LakeConfig, kind: str) -> None:
    model = Model(kind)
    with lh.connect(tmp_path / "a", lake=outside) as con:
        model.fill(con)
        made = back_up(con, str(tmp_path / "a"), str(tmp_path / "backup"))
    assert made.lakes_outside == ("shop.t",) and not any(f.startswith("lake") for f in made.files)
    restore(str(tmp_path / "backup"), str(tmp_path / "b"))
    with lh.connect(tmp_path / "b", lake=outside) as con:
        refused(con)
        assert con.table("shop.t").lake.adopt()
        model.check_around_a_round(con)


class Stopped(BaseException):
    """Plays the end of the process."""


@pytest.mark.parametrize("step", ["backup", "restore"])
def test_what_was_cut_off_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    model = filled(tmp_path / "a", "trimmed")
    calls = ((backup_files, "_copy_open"), *((backups, name) for name in ("copy_database", "digest", "sync_file")))
    real = {name: getattr(module, name) for module, name in calls}
    if step == "restore":
        with lh.connect(tmp_path / "a") as con:
            back_up(con, str(tmp_path / "a"), str(tmp_path / "backup"))
    n = 0
    while True:
        n = 2 * n + 3
        left = iter(range(n))

        def counted(name: str, left: Iterator[int] = left) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                if next(left, None) is None:
                    raise Stopped
                return real[name](*args)

            return call

        for module, name in calls:
            monkeypatch.setattr(module, name, counted(name))
        try:
            if step == "backup":
                with lh.connect(tmp_path / "a") as con:
                    back_up(con, str(tmp_path / "a"), str(tmp_path / "backup"))
            else:
                restore(str(tmp_path / "backup"), str(tmp_path / "r"))
            break
        except Stopped:
            assert not (tmp_path / "r").exists()
            if step == "backup" and not (tmp_path / "backup" / "backup.json").exists():
                with pytest.raises(InvalidRequestError, match="no finished backup"):
                    restore(str(tmp_path / "backup"), str(tmp_path / "r"))
            elif step == "backup":
                break
    assert n > 10
    monkeypatch.undo()
    if step == "backup":
        restore(str(tmp_path / "backup"), str(tmp_path / "r"))
    model.go_on(tmp_path / "r", "r")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [flip, Path.unlink, lambda p: p.write_bytes(p.read_bytes()[:-1])])
def test_a_damaged_backup_is_told(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    with lh.connect(tmp_path / "a") as con:
        Model("keyed").fill(con)
        back_up(con, str(tmp_path / "a"), str(tmp_path / "backup"))
    for pattern in ("data/**/*.log", "data/**/*.parquet", "data/metadata.db", "data/**/*.avro"):
        shutil.copytree(tmp_path / "backup", tmp_path / "damaged")
        file = sorted((tmp_path / "damaged").glob(pattern))[0]
        damage(file)
        with pytest.raises(CorruptionError, match=file.name):
            restore(str(tmp_path / "damaged"), str(tmp_path / "r"))
        assert not (tmp_path / "r").exists()
        shutil.rmtree(tmp_path / "damaged")
        shutil.rmtree(tmp_path / "r.restoring")


def manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(backup: Path) -> None:
        values = json.loads((backup / "backup.json").read_text())
        change(values)
        (backup / "backup.json").write_text(json.dumps(values))

    return apply


def written(text: bytes) -> Callable[[Path], None]:
    def apply(backup: Path) -> None:
        (backup / "backup.json").write_bytes(text)

    return apply


WHOLE = b'{"format": %s, "tables": %s, "lakes_outside": %s, "files": %s}'
NONSENSE = [
    b"", b"{", b"[]", b"1", b"null", b"\xff\xfe{", b"\xff", b"[" * 200_000, b'{"a":' * 200_000, b"9" * 5000,
    *(WHOLE % (wrong, b"[]", b"[]", b"{}") for wrong in (b"1e999", b"-1e999", b"NaN", b"null", b"[]", b"{}", b'"x"')),
    *(WHOLE % (b"1", wrong, b"[]", b"{}") for wrong in (b"1", b"null", b"[" * 200_000)),
    *(WHOLE % (b"1", b"[]", b"[]", b'{"f": %s}' % wrong) for wrong in (b"1", b"[1]", b'[1e999, ""]', b'[null, ""]')),
    *(WHOLE % (b"1", b"[]", b"[]", b"{%s: [0, %s]}" % (n, b'""')) for n in (b'"\\u0000"', b'"\\ud800"', b'"."', b'""')),
]  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda b: (b / "backup.json").unlink(), InvalidRequestError),
        *((written(text), CorruptionError) for text in NONSENSE),
        (lambda b: shutil.rmtree(b / "data"), CorruptionError),
        (lambda b: ((b / "backup.json").unlink(), (b / "backup.json").mkdir()), StorageError),
        (manifest(lambda v: v.pop("files")), CorruptionError),
        (manifest(lambda v: v.update(format=2)), UnsupportedFormatError),
        (manifest(lambda v: v["files"].update({"../outside": [0, ""]})), CorruptionError),
        (manifest(lambda v: v["files"].update({"metadata.db": [0, ""]})), ChecksumError),
    ],
)
def test_a_backup_that_makes_no_sense(
    tmp_path: Path, damage: Callable[[Path], None], error: type[LakeheadError]
) -> None:
    with lh.connect(tmp_path / "a") as con:
        back_up(con, str(tmp_path / "a"), str(tmp_path / "backup"))
    damage(tmp_path / "backup")
    with pytest.raises(error):
        restore(str(tmp_path / "backup"), str(tmp_path / "r"))
    assert not (tmp_path / "r").exists() and not (tmp_path / "outside").exists()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    with lh.connect(tmp_path / "a") as con:
        Model("log").fill(con)
        (tmp_path / "used").mkdir()
        (tmp_path / "used" / "mine").write_text("mine")
        for place in (tmp_path / "used", tmp_path / "a", tmp_path / "a" / "inside"):
            with pytest.raises(InvalidRequestError, match=r"already|itself"):
                back_up(con, str(tmp_path / "a"), str(place))
        back_up(con, str(tmp_path / "a"), str(tmp_path / "backup"))
        with pytest.raises(InvalidRequestError, match="already"):
            back_up(con, str(tmp_path / "a"), str(tmp_path / "backup"))
        for place in (tmp_path / "used", tmp_path / "a", tmp_path / "used" / "mine"):
            with pytest.raises(InvalidRequestError, match="already"):
                restore(str(tmp_path / "backup"), str(place))
        for place in (tmp_path / "backup", tmp_path / "backup" / "r", tmp_path / "backup" / "data" / "r"):
            with pytest.raises(InvalidRequestError, match="lies in the backup itself"):
                restore(str(tmp_path / "backup"), str(place))
        for odd in ("a\0b", "a\ud800", "a\udcff"):
            with pytest.raises(InvalidRequestError, match="is no name of a folder"):
                back_up(con, str(tmp_path / "a"), str(tmp_path / odd))
            with pytest.raises(InvalidRequestError, match="is no name of a folder"):
                restore(str(tmp_path / "backup"), str(tmp_path / odd))
            with pytest.raises(InvalidRequestError, match="is no name of a folder"):
                lh.connect(tmp_path / odd)
        (tmp_path / "r.restoring").mkdir()
        (tmp_path / "r.restoring" / "mine").write_text("mine")
        with pytest.raises(InvalidRequestError, match="in the way"):
            restore(str(tmp_path / "backup"), str(tmp_path / "r"))
    assert (tmp_path / "used" / "mine").read_text() == "mine"


def test_what_is_in_the_way_is_told_and_stays(tmp_path: Path) -> None:
    with lh.connect(tmp_path / "a") as con:
        Model("log").fill(con)
        back_up(con, str(tmp_path / "a"), str(tmp_path / "backup"))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    staging = tmp_path / "r.restoring"
    for target in ("file", "empty", "nothing"):
        staging.symlink_to(tmp_path / target)
        with pytest.raises(InvalidRequestError, match="in the way"):
            restore(str(tmp_path / "backup"), str(tmp_path / "r"))
        staging.unlink()
    staging.write_text("mine")
    with pytest.raises(InvalidRequestError, match="in the way"):
        restore(str(tmp_path / "backup"), str(tmp_path / "r"))
    assert staging.read_text() == "mine"
    staging.unlink()
    for place in (tmp_path / "file" / "r", tmp_path / "file" / "r" / "r"):
        with pytest.raises(StorageError):
            restore(str(tmp_path / "backup"), str(place))
    (tmp_path / "empty" / "data").write_text("")
    with pytest.raises(InvalidRequestError, match="already"):
        restore(str(tmp_path / "backup"), str(tmp_path / "empty"))
    restore(str(tmp_path / "backup"), str(tmp_path / "r"))


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model("keyed")
    with lh.connect(tmp_path / "a") as con:
        model.fill(con)
        assert main(["--uri", str(tmp_path / "a"), "backup", str(tmp_path / "b")]) == 0
        model.check(con)
    assert main(["restore", str(tmp_path / "b"), str(tmp_path / "r"), "-o", "json"]) == 0
    assert main(["--uri", str(tmp_path / "r"), "adopt", "-o", "json"]) == 0
    text, restored = capsys.readouterr().out.split("\n", 1)
    assert text.startswith(f"{tmp_path / 'b'}: 1 table, ")
    assert '"lakes_outside":[]' in restored and '"adopted":false' in restored
    assert main(["--uri", "lakehead://127.0.0.1:1", "backup", str(tmp_path / "c")]) == 2
    assert main(["restore", str(tmp_path / "a"), str(tmp_path / "d")]) == 2
    model.go_on(tmp_path / "r", "r")


def test_a_table_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped after its name was read, or while it was copied."""
    with lh.connect(tmp_path / "a") as con:
        for name in ("one", "two", "three"):
            con.create_table(name, NUMBERS).append([{"k": 1, "v": 1}])
        copy = backups._copy_tablet

        def drop_and_copy(source: str, target: str, table: TableHandle, *cut: Any) -> Any:
            if table.desc.path.table == "one":
                con.drop_table("three")
                with pytest.raises(TableNotFoundError):
                    con.table("three")
            start = copy(source, target, table, *cut)
            if table.desc.path.table == "two":
                con.drop_table("two")
            return start

        monkeypatch.setattr(backups, "_copy_tablet", drop_and_copy)
        made = back_up(con, str(tmp_path / "a"), str(tmp_path / "backup"))
    assert made.tables == ("default.one",)
    assert not any("two" in f or "three" in f for f in made.files)
    restore(str(tmp_path / "backup"), str(tmp_path / "r"))
    with lh.connect(tmp_path / "r") as con:
        assert con.tables() == ["default.one"]
        assert con.table("one").scan().count() == 1


def test_a_table_without_any_partition_is_in_it(tmp_path: Path) -> None:
    with lh.connect(tmp_path / "a") as con:
        con.create_table("t", NUMBERS, partition_by="v")
        assert back_up(con, str(tmp_path / "a"), str(tmp_path / "backup")).tables == ("default.t",)
    restore(str(tmp_path / "backup"), str(tmp_path / "r"))
    with lh.connect(tmp_path / "r") as con:
        con.table("t").append([{"k": 1, "v": 1}])
        assert con.table("t").scan().count() == 1


def test_offsets_of_one_folder_mean_nothing_in_another(tmp_path: Path) -> None:
    """A client of the original comes to an address where what was restored is served, grown past its positions."""
    with lh.connect(tmp_path / "a") as one:
        one.create_table("t", NUMBERS).append([{"k": 1, "v": 1}])
        back_up(one, str(tmp_path / "a"), str(tmp_path / "backup"))
        one.table("t").append([{"k": 2, "v": 2}])
        restore(str(tmp_path / "backup"), str(tmp_path / "b"))
        with lh.connect(tmp_path / "b") as two:
            two.table("t").append([{"k": n, "v": -n} for n in range(5)])
            own = handle_of(one.table("t"))
            astray = TableHandle(
                own.desc, OneServer(two._server), Env.system(), folder_id=one._server.service.folder_id
            )
            ranges = {TabletKey("", 0): (0, 2)}
            assert sum(b.num_rows for _, b in own.log.read_ranges(ranges, ReadSpec(("k",)))) == 2
            with pytest.raises(FolderCopiedError, match="another copy"):
                list(astray.log.read_ranges(ranges, ReadSpec(("k",))))
            for default in ("latest", "earliest"):
                with pytest.raises(FolderCopiedError, match="another copy"):
                    astray.log.subscribe(
                        starts={TabletKey("", 0): 2}, default=default, stops=None, spec=ReadSpec(("k",))
                    )
            rows = pa.table({"k": [9], "v": [9]}, NUMBERS)
            for write in (astray.writers.write, lambda *_: astray.writers.named("w")):
                with pytest.raises(FolderCopiedError, match="another copy"):
                    write("append", rows)
            assert two.table("t").scan().count() == 6 and one.table("t").scan().count() == 2
            with pytest.raises(OffsetOutOfRangeError):
                next(iter(two.table("t").subscribe(start={TabletId(): 1000})))


class Killed(BaseException):
    pass


class Kills:
    """Ends what this thread does to files below a folder at the n-th step, as a kill would: nothing is tidied up."""

    def __init__(self) -> None:
        self._left = 0
        self._folder = ""
        self._thread = 0
        sys.addaudithook(self._step)

    def _step(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._left or event.split(".")[0] not in ("open", "os", "shutil") or event == "os.listdir":
            return
        if threading.get_ident() == self._thread and any(str(a).startswith(self._folder) for a in arguments):
            self._left -= 1
            if not self._left:
                raise Killed

    @contextmanager
    def at(self, step: int, folder: Path) -> Iterator[None]:
        self._left, self._folder, self._thread = step, str(folder), threading.get_ident()
        try:
            yield
        finally:
            self._left = 0


def test_backup_and_restore_that_were_killed_at_any_step_are_made_again(tmp_path: Path) -> None:
    kills = Kills()  # here: what Python calls at each event of a process is never taken away again
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("t", NUMBERS, lake="iceberg")
        table.append([{"k": 1, "v": 1}])
        con.tier("t")
        table.append([{"k": 2, "v": 2}])
        killed, steps = True, 0
        while killed:
            steps += 1 if steps < 20 else 5
            backup, killed = tmp_path / f"backup-{steps}", False
            try:
                with kills.at(steps, backup):
                    back_up(con, str(tmp_path / "data"), str(backup))
            except Killed:
                killed = True
            if not (backup / "backup.json").exists():
                back_up(con, str(tmp_path / "data"), str(backup))
            assert sorted(restore(str(backup), str(tmp_path / f"of-{steps}")).files)
            assert {n.split("/")[0] for n in restored_files(tmp_path / f"of-{steps}")} >= {"tables", "lake"}
    assert steps > 30
    killed, steps = True, 0
    while killed:
        steps += 1 if steps < 20 else 5
        folder, killed = tmp_path / f"restored-{steps}", False
        try:
            with kills.at(steps, folder):
                restore(str(backup), str(folder))
        except Killed:
            killed = True
        if not folder.exists():
            restore(str(backup), str(folder))
        assert restored_files(folder) == restored_files(tmp_path / "of-1")
        assert not folder.with_name(f"{folder.name}.restoring").exists() or killed
    assert steps > 30


def restored_files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_a_table_that_is_being_dropped_is_left_out_and_one_whose_lake_is_lost_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lh.connect(tmp_path / "data") as con:
        for name in ("kept", "dropped"):
            con.create_table(name, NUMBERS, lake="iceberg").append([{"k": 1, "v": 1}])
            con.tier(name)
        service = con._server.service  # type: ignore[attr-defined]
        service._definitions._lake_state().drop(handle_of(con.table("dropped")).desc, purge=False)
        monkeypatch.setattr(SystemClock, "sleep", lambda *_: None)
        with pytest.raises(lh.LakeStateError):
            back_up(con, str(tmp_path / "data"), str(tmp_path / "one"))
        monkeypatch.setattr(SystemClock, "sleep", lambda *_: con.drop_table("dropped"))
        assert back_up(con, str(tmp_path / "data"), str(tmp_path / "two")).tables == ("default.kept",)
    restore(str(tmp_path / "two"), str(tmp_path / "again"))
    with lh.connect(tmp_path / "again") as con:
        assert con.tables() == ["default.kept"] and con.table("kept").scan().count() == 1
