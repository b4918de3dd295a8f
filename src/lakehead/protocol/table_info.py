"""A table's definition as a plain value, as it is stored and sent; what messages are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import msgspec

from lakehead.config import TableProperties
from lakehead.errors import InvalidPropertyError, InvalidRequestError
from lakehead.protocol.schemas import schema_from_text, schema_to_text
from lakehead.types import Schemas, TableDescriptor, TablePath, TableSchema

Int64: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""MessagePack also has numbers beyond, which neither SQLite nor Arrow can hold."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of requests and replies."""


class TableInfo(Message, frozen=True, kw_only=True):
    """A `TableDescriptor` as it is stored and sent. ``schema`` is as `schema_to_text` makes it.

    ``database`` and ``table`` are the name that it was created under, ``names`` those that it got since, oldest first:
    the last one is its own.
    """

    table_id: str
    database: str
    table: str
    schema: str
    schema_id: Int64
    primary_key: tuple[str, ...]
    partition_by: tuple[str, ...]
    bucket_key: tuple[str, ...]
    buckets: Int64
    lake: str | None
    properties: dict[str, Any]
    names: tuple[str, ...] = ()
    comments: tuple[tuple[Int64, str], ...] = ()

    @property
    def path(self) -> TablePath:
        """Its name."""
        return TablePath.parse(self.names[-1] if self.names else f"{self.database}.{self.table}")

    @classmethod
    def of(cls, desc: TableDescriptor) -> TableInfo:
        return cls(
            table_id=desc.table_id,
            database=desc.origin.database,
            table=desc.origin.table,
            schema=schema_to_text(desc.schemas.current),
            schema_id=desc.schema_id,
            primary_key=desc.primary_key,
            partition_by=desc.partition_by,
            bucket_key=desc.bucket_key,
            buckets=desc.buckets,
            lake=desc.lake,
            properties=_told(desc.properties),
            names=tuple(map(str, (*desc.former, desc.path)[1:])),
            comments=desc.comments,
        )

    def descriptor(self, earlier: Sequence[TableSchema] = ()) -> TableDescriptor:
        """The table's definition.

        Args:
            earlier: schemas that older rows were written under, where rows are read as they were written.

        Raises:
            InvalidRequestError: a name, a property or the schema's text is none.
            CorruptionError: the schema cannot be read.
        """
        try:
            properties = msgspec.convert(self.properties, TableProperties, strict=True)
        except ValueError as e:
            raise InvalidRequestError(f"a table's definition cannot be read: {e}") from e
        if unknown := sorted(set(self.properties) - {f.name for f in dataclasses.fields(TableProperties)}):
            raise InvalidPropertyError(f"unknown table property {unknown[0]!r}", name=unknown[0])
        names = tuple(map(TablePath.parse, (f"{self.database}.{self.table}", *self.names)))
        return TableDescriptor(
            table_id=self.table_id,
            path=names[-1],
            schemas=Schemas((*earlier, schema_from_text(self.schema_id, self.schema))),
            primary_key=self.primary_key,
            partition_by=self.partition_by,
            bucket_key=self.bucket_key,
            buckets=self.buckets,
            lake=self.lake,
            properties=properties,
            former=names[:-1],
            comments=self.comments,
        )


def _told(properties: TableProperties) -> dict[str, Any]:
    """What came with a later version is left out where it is not used, so that earlier ones read the rest."""
    told = dataclasses.asdict(properties)
    if not properties.lake_changelog:
        del told["lake_changelog"]
    return told
