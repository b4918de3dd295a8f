"""Table properties by which Iceberg's writers go. Any engine sets them: what cannot be read is an error that names the
property, before anything is written, and what Iceberg allows is honoured though PyIceberg does not know it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pyiceberg.avro.codecs import CODEC_MAPPING_ICEBERG_TO_AVRO, KNOWN_CODECS, AvroCompressionCodec
from pyiceberg.io.pyarrow import match_metrics_mode
from pyiceberg.table import TableProperties
from pyiceberg.types import strtobool

from lakehead.errors import LakeStateError, MissingDependencyError
from lakehead.iceberg.own_place import require_own_place
from lakehead.iceberg.told_properties import require_no_code

if TYPE_CHECKING:
    from pyiceberg.table import Table

FORMAT_VERSION = 2
_NONE = "uncompressed"
"""Iceberg's name of no compression; PyIceberg knows Avro's only."""


def avro_codec(properties: Mapping[str, str]) -> AvroCompressionCodec:
    """How a table's manifests are compressed, by Avro's name.

    Raises:
        ValueError: no such compression is known.
        MissingDependencyError: what it needs is not installed.
    """
    said = properties.get(TableProperties.WRITE_AVRO_COMPRESSION, TableProperties.WRITE_AVRO_COMPRESSION_DEFAULT)
    wanted = said.strip().lower()
    wanted = "null" if wanted == _NONE else CODEC_MAPPING_ICEBERG_TO_AVRO.get(wanted, wanted)
    found = next((name for name in KNOWN_CODECS if name == wanted), None)
    if found is None:
        raise ValueError(f"there is gzip, zstd, snappy and {_NONE}")
    codec = KNOWN_CODECS[found]
    try:
        if codec is not None:
            codec.compress(b"")
    except ImportError as e:
        raise MissingDependencyError(
            f"the lake's manifests are to be compressed by what is not installed here ({e}): install it, or set"
            f" {TableProperties.WRITE_AVRO_COMPRESSION!r} to 'gzip'"
        ) from e
    return found


_READ_BY: Mapping[str, Callable[[str], object]] = {
    TableProperties.WRITE_AVRO_COMPRESSION: lambda said: avro_codec({TableProperties.WRITE_AVRO_COMPRESSION: said}),
    TableProperties.DEFAULT_WRITE_METRICS_MODE: match_metrics_mode,
    TableProperties.METADATA_PREVIOUS_VERSIONS_MAX: int,
    TableProperties.WRITE_PARTITION_SUMMARY_LIMIT: int,
    TableProperties.OBJECT_STORE_ENABLED: strtobool,
    TableProperties.WRITE_OBJECT_STORE_PARTITIONED_PATHS: strtobool,
}


def format_breach(version: object) -> str | None:
    """What is wrong with a lake table's format version, and what undoes it; None for nothing."""
    if version == FORMAT_VERSION:
        return None
    return f"it has format version {version} now, not {FORMAT_VERSION}: register its metadata of before"


def require_format(name: str, version: object) -> None:
    """That files of a lake table are those that are read and written here.

    Raises:
        LakeStateError: another engine has upgraded it.
    """
    if (found := format_breach(version)) is not None:
        raise LakeStateError(f"someone changed the lake table of {name}: {found}", table=name)


def require_settings(table: Table) -> None:
    """That a table's files can be written as its properties say.

    Raises:
        LakeStateError: one of them cannot be read, names a class, or has the files of a lake beside its data written
            elsewhere; or it has another format version.
        MissingDependencyError: one asks for what is not installed.
    """
    require_format(".".join(table.name()), table.metadata.format_version)
    require_no_code(table.name(), table.properties)
    require_own_place(table)
    for key, said in table.properties.items():
        of_column = key.startswith(f"{TableProperties.METRICS_MODE_COLUMN_CONF_PREFIX}.") and said
        read = match_metrics_mode if of_column else _READ_BY.get(key)
        if read is None:
            continue
        try:
            read(said)
        except ValueError as e:
            name = ".".join(table.name())
            raise LakeStateError(
                f"property {key!r} of lake table {name} cannot be read ({said!r}: {e}): set it to what Iceberg knows,"
                " or remove it",
                table=name,
                name=key,
            ) from e
