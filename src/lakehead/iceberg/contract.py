"""What a lake table must still be for Lakehead to read and tier it: columns, partition spec and format version.

Other engines may change all three. The first round pins them in a table property, by field id, and whoever loads the
table compares. Whatever leaves our columns, their types and the tablets of files as they were is taken as it is: added
optional columns, another order, wider types. All else is a stop that says what to undo.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema, index_name_by_id
from pyiceberg.types import (
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StructType,
)

from lakehead.errors import LakeStateError
from lakehead.iceberg.settings import format_breach
from lakehead.lake.marks import UNREADABLE, unreadable_property
from lakehead.types import SYSTEM_FIELDS, TableDescriptor

if TYPE_CHECKING:
    from pyiceberg.table import Table

CONTRACT = "lakehead.contract"
"""Table property: the columns and the partition spec that tiering relies on, as JSON."""
DEFINITION = "lakehead.schema"
"""Table property: id of the definition of its table that the lake table has; without it, the table's first."""
COMMENTS = "lakehead.comments"
"""Table property: what the table's comments were when the lake table got them, as JSON, by field id of the table."""
NAME_MAPPING = "schema.name-mapping.default"
"""Table property of Iceberg's: what fields are called in files without field ids, as JSON."""
_WIDER = {(IntegerType, LongType), (FloatType, DoubleType)}


@dataclass(frozen=True)
class LakeContract:
    """What a lake table was when tiering began.

    Attributes:
        columns: the table's own columns and the system columns.
        spec: the partition spec of our files.
    """

    columns: Schema
    spec: PartitionSpec

    @classmethod
    def of(cls, table: Table, desc: TableDescriptor) -> LakeContract:
        """What is pinned in the table's properties; before the first round, what it was created with.

        Raises:
            LakeStateError: that cannot be read.
        """
        text = table.properties.get(CONTRACT)
        if text is not None:
            try:
                return _read_contract(text)
            except UNREADABLE as e:
                raise unreadable_property(str(desc.path), CONTRACT, e) from e
        metadata = table.metadata
        first = min(metadata.schemas, key=lambda s: s.schema_id)
        own = {*desc.schema.names, *(f.name for f in SYSTEM_FIELDS)}
        spec = min(metadata.partition_specs, key=lambda s: s.spec_id)
        return cls(Schema(*(f for f in first.fields if f.name in own)), spec)

    def to_properties(self) -> dict[str, str]:
        """The table property."""
        values = {"columns": self.columns.model_dump(mode="json"), "spec": self.spec.model_dump(mode="json")}
        return {CONTRACT: json.dumps(values, separators=(",", ":"))}

    def breaches(self, table: Table) -> Iterator[str]:
        """What was changed that may not be, each with what undoes it."""
        if (found := format_breach(table.metadata.format_version)) is not None:
            yield found
        yield from _column_breaches(self.columns, table.schema())
        if not same_tablets(self.spec, table.spec()):
            yield (
                f"its partition spec is {spec_text(table.spec(), self.columns)} now: set it back to"
                f" {spec_text(self.spec, self.columns)}"
            )


@functools.lru_cache(maxsize=256)
def _read_contract(text: str) -> LakeContract:
    values = json.loads(text)
    return LakeContract(Schema.model_validate(values["columns"]), PartitionSpec.model_validate(values["spec"]))


def check_contract(table: Table, desc: TableDescriptor) -> LakeContract:
    """That a lake table is still what tiering relies on.

    Raises:
        LakeStateError: someone changed it; the message says what to undo. Or it has columns of an older schema only.
        SchemaChangedError: it has a newer one than ``desc``.
    """
    definition = _definition(table, desc)
    if definition is not None:
        desc.require_newest(definition)
    contract = LakeContract.of(table, desc)
    pinned = {f.name for f in contract.columns.fields}
    if newer := [c for c in desc.schema.names if c not in pinned]:
        raise LakeStateError(
            f"the lake table of {desc.path} lacks column {newer[0]!r}, which schema {desc.schema_id} of the table has:"
            " one of them is older than the other, restore both from one backup",
            table=str(desc.path),
            column=newer[0],
        )
    if found := list(contract.breaches(table)):
        raise LakeStateError(
            f"someone changed the lake table of {desc.path}: {'; '.join(found)}. Until then it is not read or tiered",
            table=str(desc.path),
        )
    return contract


def definition_of(table: Table, desc: TableDescriptor) -> int:
    """The id of the definition that a lake table has.

    Args:
        desc: with all schemas that the table ever had.

    Raises:
        LakeStateError: what says it cannot be read, or names one that the table never had.
    """
    found = _definition(table, desc)
    if found is None:
        return desc.schemas.oldest_id
    if found < desc.schema_id and all(schema.id != found for schema in desc.schemas.known):
        raise unreadable_property(str(desc.path), DEFINITION, ValueError(f"there is no definition {found}"))
    return found


def comments_of(table: Table, desc: TableDescriptor) -> dict[int, str]:
    """What the table's comments were when the lake table got them, by field id of the table.

    Raises:
        LakeStateError: what says them cannot be read.
    """
    try:
        return {int(i): str(about) for i, about in json.loads(table.properties.get(COMMENTS, "[]"))}
    except UNREADABLE as e:
        raise unreadable_property(str(desc.path), COMMENTS, e) from e


def _definition(table: Table, desc: TableDescriptor) -> int | None:
    text = table.properties.get(DEFINITION)
    try:
        return None if text is None else int(text)
    except UNREADABLE as e:
        raise unreadable_property(str(desc.path), DEFINITION, e) from e


def names_are_lasting(table: Table) -> bool:
    """Whether every name in the table, inside structs too, has meant the same field since its creation, surely; also
    in files of others, which may have no ids where there is a name mapping."""
    if NAME_MAPPING in table.properties:
        return False
    schemas = table.metadata.schemas
    if sorted(s.schema_id for s in schemas) != list(range(len(schemas))):
        return False
    names = index_name_by_id(table.schema())
    ids = {name: i for i, name in names.items()}
    said = (item for s in schemas for item in index_name_by_id(s).items())
    return all(names.get(i, name) == name and ids.get(name, i) == i for i, name in said)


def same_tablets(a: PartitionSpec, b: PartitionSpec) -> bool:
    """Whether two specs put rows into the same partitions, whatever they call them."""
    return [(f.source_id, f.transform) for f in a.fields] == [(f.source_id, f.transform) for f in b.fields]


def spec_text(spec: PartitionSpec, columns: Schema) -> str:
    """A spec as people read it."""
    fields = (f"{f.transform}({columns.find_column_name(f.source_id) or f.source_id})" for f in spec.fields)
    return f"[{', '.join(fields)}]"


def _column_breaches(own: Schema, now: Schema) -> Iterator[str]:
    by_id = {f.field_id: f for f in now.fields}
    by_name = {f.name: f for f in now.fields}
    for f in own.fields:
        found = by_id.get(f.field_id)
        if found is not None:
            yield from _field_breaches(f, found)
        elif f.name in by_name:
            yield (
                f"column {f.name!r} was dropped and added anew with field id {by_name[f.name].field_id}: make a schema"
                f" with its field id {f.field_id} the current one again"
            )
        else:
            yield (
                f"column {f.name!r} with field id {f.field_id} was dropped: make a schema that has it the current one"
                " again"
            )
    for f in now.fields:
        if f.required and f.field_id not in {o.field_id for o in own.fields}:
            yield f"column {f.name!r}, which the table lacks, is required: make it optional, or drop it"


def _field_breaches(own: NestedField, now: NestedField) -> Iterator[str]:
    if now.name != own.name:
        yield f"column {own.name!r} was renamed to {now.name!r}: rename it back"
    if now.required and not own.required:
        yield f"column {own.name!r} was made required: make it optional again"
    if not holds(own.field_type, now.field_type):
        yield f"column {own.name!r} was {own.field_type} and is {now.field_type} now: change it back"


def holds(own: IcebergType, now: IcebergType) -> bool:
    """Whether the type now has every value of the own one, in the same places."""
    if isinstance(own, StructType):
        return isinstance(now, StructType) and _hold(own.fields, now.fields)
    if isinstance(own, ListType):
        return isinstance(now, ListType) and _hold([own.element_field], [now.element_field])
    if isinstance(own, MapType):
        fields = [own.key_field, own.value_field]
        return isinstance(now, MapType) and _hold(fields, [now.key_field, now.value_field])
    if isinstance(own, DecimalType) and isinstance(now, DecimalType):
        return own.scale == now.scale and own.precision <= now.precision
    return own == now or (type(own), type(now)) in _WIDER


def _hold(own: Sequence[NestedField], now: Sequence[NestedField]) -> bool:
    return [(f.field_id, f.name) for f in own] == [(f.field_id, f.name) for f in now] and all(
        holds(a.field_type, b.field_type) and (a.required or not b.required) for a, b in zip(own, now, strict=True)
    )
