"""Metadata that is known, shared between versions and written in pieces is what PyIceberg makes, reads and writes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.serializers import FromInputFile
from pyiceberg.table.update import SetPropertiesUpdate, update_table_metadata
from sqlalchemy import update
from sqlalchemy.orm import Session

from lakehead.errors import CorruptionError, LakeFileMissingError, UnavailableError
from lakehead.iceberg import known_metadata, metadata_json
from lakehead.iceberg.known_metadata import IcebergTables, load_table, read_metadata, updated, write_metadata
from lakehead.iceberg.orphans import metadata_in_use
from lakehead.iceberg.version import lake_version


def rounds(lake: Any, count: int) -> None:
    for n in range(count):
        lake.write(n, n + 1)
        lake.round()


def as_read(table: Any) -> Any:
    """What PyIceberg makes of the newest metadata file."""
    return FromInputFile.table_metadata(table.io.new_input(table.metadata_location))


def test_it_is_what_pyiceberg_reads(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_json, "_PIECE", 4)
    for count in (1, 2, 1, 3, 6):
        rounds(keyed, count)
        table = load_table(keyed.catalog.iceberg, keyed.load().name())
        text = json.loads(Path(table.metadata_location.removeprefix("file://")).read_text())
        assert text == json.loads(table.metadata.model_dump_json()) == json.loads(as_read(table).model_dump_json())
        for snapshot in table.metadata.snapshots:
            assert table.metadata.snapshot_by_id(snapshot.snapshot_id) is snapshot
        assert table.metadata.snapshot_by_id(1) is None


def test_it_is_what_pyiceberg_writes_when_old_snapshots_left(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_json, "_PIECE", 4)
    rounds(keyed, 11)
    for keep in (9, 5, 1):
        ids = keyed.snapshot_ids()
        keyed.table.expire(keyed.table.load(), ids[:-keep], lambda: [])
        rounds(keyed, 1)
        table = load_table(keyed.catalog.iceberg, keyed.load().name())
        assert len(table.metadata.snapshots) == keep + 1
        assert json.loads(as_read(table).model_dump_json()) == json.loads(table.metadata.model_dump_json())
        theirs = {s.snapshot_id: s.parent_snapshot_id for s in table.metadata.snapshots}
        assert {i: s.parent_id for i, s in lake_version(table).snapshots.items()} == theirs


def test_few_versions_of_a_table_are_known(keyed: Any) -> None:
    """Each has all schemas and snapshots of its table: together they would grow with the square of these."""
    rounds(keyed, 6)
    known = known_metadata._known.get(str(Path(keyed.load().metadata_location).parent).replace("file:/", "file:///"))
    assert known is not None and len(known) == 3 and known[0].location == keyed.load().metadata_location
    assert len({version.location for version in known}) == 3


def test_updates_are_pyicebergs(keyed: Any) -> None:
    rounds(keyed, 2)
    table = keyed.load()
    at = table.metadata_location
    change = SetPropertiesUpdate(updates={"a": "b"})
    mine = updated(table.metadata, (change,), at)
    theirs = update_table_metadata(table.metadata, (change,), metadata_location=at)
    # It has no update that says when it was: both look at the clock.
    assert table.metadata.last_updated_ms < mine.last_updated_ms <= theirs.last_updated_ms
    same = mine.model_copy(update={"last_updated_ms": theirs.last_updated_ms})
    assert same.model_dump_json() == theirs.model_dump_json()


def test_compressed_metadata_is_one_gzip_stream(keyed: Any) -> None:
    rounds(keyed, 2)
    table = keyed.load()
    at = f"{keyed.folder.as_uri()}/copy.gz.metadata.json"
    write_metadata(table.io, at, table.metadata)
    assert json.loads(gzip.decompress((keyed.folder / "copy.gz.metadata.json").read_bytes())) == json.loads(
        table.metadata.model_dump_json()
    )
    assert read_metadata(table.io, at) is table.metadata
    with pytest.raises(FileExistsError):
        write_metadata(table.io, at, table.metadata)


def test_a_file_that_changed_or_is_gone_is_not_known(keyed: Any) -> None:
    rounds(keyed, 1)
    table = keyed.load()
    path = Path(table.metadata_location.removeprefix("file://"))
    known = read_metadata(table.io, table.metadata_location)
    assert read_metadata(table.io, table.metadata_location) is known
    path.write_text(path.read_text() + " ")
    again = read_metadata(table.io, table.metadata_location)
    assert again is not known and again == known
    path.unlink()
    with pytest.raises(LakeFileMissingError) as refused:
        keyed.table.load()
    assert f"file {path} " in str(refused.value)


def test_a_view_is_no_table(keyed: Any) -> None:
    rounds(keyed, 1)
    name = keyed.load().name()
    with Session(keyed.catalog.iceberg.engine) as session:
        session.execute(update(IcebergTables).values(iceberg_type="VIEW"))
        session.commit()
    with pytest.raises(known_metadata.NoSuchTableError):
        load_table(keyed.catalog.iceberg, name)


def test_a_damaged_file_at_which_somebody_reads_is_named(keyed: Any) -> None:
    keyed.write(1)
    keyed.round()
    table = keyed.load()
    path = f"{table.location()}/metadata/held.metadata.json"
    with table.io.new_output(path).create() as stream:
        stream.write(b'{"format-version": 2}')
    with pytest.raises(CorruptionError, match=r"held\.metadata\.json is damaged"):
        metadata_in_use(table.io, path)
    table.io.delete(path)
    with pytest.raises(UnavailableError, match="at which somebody reads"):
        metadata_in_use(table.io, path)
