"""Files are proven to exist, with their sizes, before a log forgets what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lakehead.config import LakeConfig
from lakehead.env import Env
from lakehead.env.clock import SystemClock
from lakehead.errors import LakeFileMissingError
from lakehead.iceberg.catalog_state import CatalogLakeState
from lakehead.iceberg.proof import MissingFile, manifest_paths, missing_files, require_files
from lakehead.server.metadata import MetadataStore
from lakehead.types import TabletKey


def history(lake: Any) -> None:
    lake.write(1, 2, 3)
    lake.round()
    lake.write(2, v=1)
    lake.round()


def local(path: str) -> Path:
    return Path(path.removeprefix("file://"))


def test_all_files_of_a_snapshot_are_asked_for(keyed: Any) -> None:
    assert missing_files(keyed.load()) == [] and manifest_paths(keyed.load()) == []
    history(keyed)
    assert missing_files(keyed.load()) == []
    used = keyed.used_files()
    assert len(used) == 3
    for path in used:
        kept = Path(path).read_bytes()
        Path(path).write_bytes(kept[:-1])
        assert missing_files(keyed.load()) == [MissingFile(f"file://{path}", len(kept), len(kept) - 1)]
        Path(path).unlink()
        assert missing_files(keyed.load()) == [MissingFile(f"file://{path}", len(kept), None)]
        Path(path).write_bytes(kept)


def test_an_older_snapshot_needs_its_own_files_only(keyed: Any) -> None:
    history(keyed)
    first, second = keyed.snapshot_ids()
    before = {f.path for f in keyed.table.plan(keyed.table.load())}
    keyed.write(9)
    keyed.round()
    (new,) = {f.path for f in keyed.table.plan(keyed.table.load())} - before
    local(new).unlink()
    assert missing_files(keyed.load(), first) == missing_files(keyed.load(), second) == []
    assert [m.path for m in missing_files(keyed.load())] == [new]
    assert missing_files(keyed.load(), proven=manifest_paths(keyed.load())) == []


@pytest.mark.parametrize("which", ["manifest", "list"])
def test_missing_metadata_is_named(keyed: Any, which: str) -> None:
    history(keyed)
    table = keyed.load()
    path = table.current_snapshot().manifest_list if which == "list" else manifest_paths(table)[0]
    local(path).unlink()
    with pytest.raises(LakeFileMissingError) as e:
        missing_files(keyed.load())
    assert local(path).name in str(e.value.context["path"])


def test_files_of_a_change_are_required(keyed: Any) -> None:
    history(keyed)
    size = 5
    path = keyed.folder / "x.parquet"
    path.write_bytes(b"12345")
    require_files(keyed.load().io, [(f"file://{path}", size)])
    with pytest.raises(LakeFileMissingError):
        require_files(keyed.load().io, [(f"file://{path}", size + 1)])


def test_a_server_is_told_what_is_proven(keyed: Any) -> None:
    state = CatalogLakeState(LakeConfig(), str(keyed.folder), SystemClock())
    store = MetadataStore(str(keyed.folder / "metadata.db"), Env.system())
    state.serve(store)
    assert state.proven_offsets(keyed.desc) == {}
    history(keyed)
    known = {TabletKey("", 0): 5}
    assert state.proven_offsets(keyed.desc) == state.tiered_offsets(keyed.desc) == known
    before = keyed.used_files()
    keyed.write(7)
    keyed.round()
    (new,) = keyed.used_files() - before
    kept = Path(new).read_bytes()
    Path(new).unlink()
    for _ in range(2):
        with pytest.raises(LakeFileMissingError) as e:
            state.proven_offsets(keyed.desc)
        assert e.value.context["path"] == f"file://{new}"
    Path(new).write_bytes(kept)
    assert state.proven_offsets(keyed.desc) == {TabletKey("", 0): 6}
    store.close()
