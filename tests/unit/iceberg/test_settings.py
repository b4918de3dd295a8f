"""Whatever other engines set a lake table's properties to: it is honoured, or an error that names the property."""

from __future__ import annotations

from typing import Any

import pytest
from tests.lakes import Lake

from lakehead.errors import LakeStateError, MissingDependencyError, SchemaChangedError
from lakehead.iceberg.contract import COMMENTS, CONTRACT, DEFINITION, definition_of
from lakehead.iceberg.evolution import evolve
from lakehead.lake.marks import MARK

CODEC = "write.avro.compression-codec"


def set_property(lake: Lake, key: str, value: str) -> None:
    with lake.load().transaction() as change:
        change.set_properties({key: value})


def tiered(lake: Lake) -> Lake:
    for n in range(2):
        lake.write(1, n)
        lake.round()
    lake.write(1, 3)
    return lake


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ("uncompressed", b"null"),
        ("UNCOMPRESSED", b"null"),
        ("gzip", b"deflate"),
        ("Zstd", b"zstandard"),
        ("null", b"null"),
    ],
)
def test_manifests_are_compressed_as_a_table_says(keyed: Lake, said: str, written: bytes) -> None:
    set_property(tiered(keyed), CODEC, said)
    before = set(keyed.folder.rglob("*.avro"))
    keyed.round()
    new = set(keyed.folder.rglob("*.avro")) - before
    assert new and all(b"avro.codec" in (data := p.read_bytes()) and written in data[:8000] for p in new)
    assert keyed.values() == keyed.model_values()
    keyed.clean_up()
    keyed.rewrite_foreign()
    assert keyed.values() == keyed.model_values()


def test_a_codec_that_is_not_installed_is_said_before_anything_is_written(
    keyed: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lacking:
        @staticmethod
        def compress(data: bytes) -> tuple[bytes, int]:
            raise ImportError("pip install it")

    set_property(tiered(keyed), CODEC, "snappy")
    monkeypatch.setattr("lakehead.iceberg.settings.KNOWN_CODECS", {"snappy": Lacking})
    before = set(keyed.folder.rglob("*"))
    with pytest.raises(MissingDependencyError, match=CODEC):
        keyed.round()
    assert set(keyed.folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (CODEC, "lz77"),
        (CODEC, ""),
        ("write.metadata.metrics.default", "bogus"),
        ("write.metadata.metrics.default", "truncate(0)"),
        ("write.metadata.metrics.default", ""),
        ("write.metadata.metrics.column.v", "truncate"),
        ("write.metadata.metrics.column.gone", "bogus"),
        ("write.metadata.previous-versions-max", "many"),
        ("write.summary.partition-limit", "1.5"),
        ("write.object-storage.enabled", "perhaps"),
        ("write.object-storage.partitioned-paths", ""),
    ],
)
@pytest.mark.parametrize("what", ["round", "clean up", "expire"])
def test_a_setting_that_cannot_be_read_is_named(
    keyed: Lake, key: str, value: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiered(keyed)
    (keyed.folder / "lake/db/t-t1/data/orphan.parquet").touch()
    load = keyed.catalog.load

    def as_set(*args: Any) -> Any:
        """As an engine commits it that does not go by it: PyIceberg cannot read some of these itself."""
        table = load(*args)
        table.metadata = table.metadata.model_copy(update={"properties": {**table.properties, key: value}})
        return table

    before = set(keyed.folder.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(keyed.catalog, "load", as_set)
        with pytest.raises(LakeStateError, match="set it to what Iceberg knows") as refused:
            if what == "expire":
                keyed.table.expire(keyed.table.load(), keyed.snapshot_ids()[:1], list)
            else:
                keyed.round() if what == "round" else keyed.clean_up()
    assert refused.value.context["name"] == key and set(keyed.folder.rglob("*")) == before
    keyed.round()
    assert keyed.values() == keyed.model_values()


def test_a_column_without_a_mode_has_the_default(keyed: Lake) -> None:
    set_property(tiered(keyed), "write.metadata.metrics.column.v", "")
    keyed.round()
    assert keyed.values() == keyed.model_values()


@pytest.mark.parametrize(
    "damage", ["", "x", "[]", "7", "null", '"a"', "{}", '{"columns": 1, "spec": {}}', "[" * 100_000, "cut", "swapped"]
)
@pytest.mark.parametrize("key", [MARK, CONTRACT, DEFINITION])
def test_what_lakehead_keeps_in_properties_is_read_or_named(keyed: Lake, key: str, damage: str) -> None:
    held = tiered(keyed).load().properties.get(key, "1")
    value = {"cut": held[: len(held) // 2], "swapped": held.replace('"', "'").replace("1", "one")}.get(damage, damage)
    set_property(keyed, key, value)
    try:
        keyed.round()
        keyed.table.expire(keyed.table.load(), keyed.snapshot_ids()[:1], list)
    except LakeStateError as e:
        assert e.context["name"] == key and key in str(e) and "db.t" in str(e) and len(str(e)) < 2000
    except SchemaChangedError as e:
        assert key == DEFINITION == "lakehead.schema" and key in str(e)
    else:
        raise AssertionError(value)
    set_property(keyed, key, held)
    keyed.round()
    assert keyed.values() == keyed.model_values()


@pytest.mark.parametrize("value", ["", "x", "7", "[1]", '[["x", "y"]]', "[[1, 2, 3]]", "null", "[" * 100_000])
def test_comments_that_cannot_be_read_are_named(keyed: Lake, value: str) -> None:
    set_property(tiered(keyed), COMMENTS, value)
    with pytest.raises(LakeStateError, match=COMMENTS):
        evolve(keyed.load(), keyed.desc)


def test_a_definition_that_the_table_never_had_is_named(keyed: Lake) -> None:
    set_property(tiered(keyed), DEFINITION, "-1")
    with pytest.raises(LakeStateError, match=DEFINITION):
        definition_of(keyed.load(), keyed.desc)
    set_property(keyed, DEFINITION, str(keyed.desc.schema_id))
    assert definition_of(keyed.load(), keyed.desc) == keyed.desc.schema_id
