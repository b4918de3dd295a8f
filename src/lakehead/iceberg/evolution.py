"""A lake table follows its table's definition: one commit that makes another schema the current one.

Rows are not rewritten. Fields keep the ids that the lake gave them, also where the lake's are others than the table's:
which field is which is known by the names of the definition that the lake had last, whose id is one of its properties.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa
from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.table import Table
from pyiceberg.table.name_mapping import MappedField, NameMapping
from pyiceberg.table.update import AddSchemaUpdate, AssertCurrentSchemaId, SetCurrentSchemaUpdate
from pyiceberg.types import IcebergType, ListType, MapType, NestedField, StructType

from lakehead.errors import InvalidSchemaError, LakeStateError
from lakehead.format.defaults import default_of
from lakehead.format.schema import lake_schema
from lakehead.iceberg.columns import name_mapping
from lakehead.iceberg.contract import (
    COMMENTS,
    DEFINITION,
    NAME_MAPPING,
    LakeContract,
    check_contract,
    comments_of,
    definition_of,
    holds,
)
from lakehead.iceberg.settings import require_settings
from lakehead.types import SYSTEM_FIELDS, TableDescriptor, TableSchema, children, field_id, without_ids

_TABLE_COMMENT = "comment"
"""Where Spark and others keep what is said of a table."""


def evolve(table: Table, desc: TableDescriptor) -> bool:
    """Give a lake table the definition of its table, comments included; False when it has it.

    Args:
        table: as its catalog has it; it is the new one afterwards.
        desc: with all schemas that the table ever had.

    Raises:
        SchemaChangedError: it has a newer one already.
        LakeStateError: see `evolved`.
        CommitFailedException: somebody else committed meanwhile: load it again.
    """
    definition = definition_of(table, desc)
    desc.require_newest(definition)
    written = desc.schemas.of(definition)
    said = comments_of(table, desc)
    if written.id == desc.schema_id and said == dict(desc.comments):
        return False
    schema = _documented(evolved(table, desc, written), desc, said)
    own = {*desc.schema.names, *(f.name for f in SYSTEM_FIELDS)}
    pinned = LakeContract(Schema(*(f for f in schema.fields if f.name in own)), LakeContract.of(table, desc).spec)
    now = table.metadata.current_schema_id
    with table.transaction() as change:
        last = SetCurrentSchemaUpdate.model_validate({"action": "set-current-schema", "schema-id": -1})
        as_it_was = AssertCurrentSchemaId.model_validate({"current-schema-id": now})
        change._apply((AddSchemaUpdate(schema=schema), last), (as_it_was,))
        about = dict(desc.comments).get(0)
        if about is not None:
            change.set_properties({_TABLE_COMMENT: about})
        elif 0 in said:
            change.remove_properties(_TABLE_COMMENT)
        comments = {COMMENTS: json.dumps(desc.comments)} if desc.comments or said else {}
        mapping = name_mapping(table)
        names = {} if mapping is None else {NAME_MAPPING: _mapped(mapping, schema).model_dump_json()}
        change.set_properties({**pinned.to_properties(), DEFINITION: str(desc.schema_id), **comments, **names})
    return True


def _mapped(mapping: NameMapping, schema: Schema) -> NameMapping:
    """What fields are called in files without ids: as before, and by the names that they have now. A name that means
    another field in such files, also one that is gone, goes on to mean that."""
    return NameMapping(_mapped_within(mapping.root, schema.fields))


def _mapped_within(mapped: Sequence[MappedField], fields: Iterable[NestedField]) -> list[MappedField]:
    known = {m.field_id: m for m in mapped}
    taken = {name for m in mapped for name in m.names}
    now: dict[int, MappedField] = {}
    for f in fields:
        there = known.get(f.field_id)
        names = [*(there.names if there is not None else ()), *([] if f.name in taken else [f.name])]
        inner = _mapped_within([] if there is None else there.fields, _within(f.field_type))
        now[f.field_id] = MappedField.model_validate({"field-id": f.field_id, "names": names, "fields": inner})
    gone = [m for m in mapped if m.field_id not in now]
    return [*now.values(), *gone]


def _within(t: IcebergType) -> Sequence[NestedField]:
    if isinstance(t, StructType):
        return t.fields
    if isinstance(t, MapType):
        return t.key_field, t.value_field
    return (t.element_field,) if isinstance(t, ListType) else ()


def _documented(schema: Schema, desc: TableDescriptor, said: Mapping[int, str]) -> Schema:
    """The lake's schema with the table's comments as docs; one that nobody gave here, and nobody took back, stays."""
    now, fields = dict(desc.comments), []
    ids = {f.name: field_id(f) or 0 for f in desc.schemas.current.fields}
    for f in schema.fields:
        about = ids.get(f.name)
        changed = about is not None and now.get(about) != said.get(about)
        fields.append(f.model_copy(update={"doc": now.get(about or 0)}) if changed else f)
    return Schema(*fields, schema_id=schema.schema_id, identifier_field_ids=schema.identifier_field_ids)


def evolved(table: Table, desc: TableDescriptor, written: TableSchema) -> Schema:
    """The lake's schema under the definition in force.

    Args:
        written: the one that it has.

    Raises:
        LakeStateError: another engine has added a column of a name that is to be the table's own, of another type, or
            changed what tiering relies on, or says in ways that cannot be read how the lake is written.
        InvalidSchemaError: a column gets the name of a partition field.
    """
    check_contract(table, desc.as_of(written.id))
    require_settings(table)
    name_mapping(table)
    now = table.schema()
    _require_no_partition_field(table, desc, written)
    theirs = {f.name: f for f in now.fields}
    held = {field_id(f): (f, theirs.pop(f.name)) for f in written.fields}
    system = [theirs.pop(f.name) for f in SYSTEM_FIELDS]
    ids = itertools.count(table.metadata.last_column_id + 1)
    fields = []
    for f, lake in zip(desc.schemas.current.fields, lake_schema(desc.schema), strict=True):
        found = held.get(field_id(f))
        if found is not None:
            fields.append(_followed(found[1], found[0], f, lake, ids))
            continue
        adopted = next((t for t in theirs.values() if t.name.casefold() == f.name.casefold()), None)
        if adopted is None:
            fields.append(_own(lake, ids))
        elif (
            adopted.name == f.name
            and not adopted.required
            and _own(lake, itertools.count(1)).field_type == _renumbered(adopted).field_type
            and default_of(f) is None  # it is null in files that were written since it is there
        ):
            fields.append(theirs.pop(f.name))
        else:
            raise LakeStateError(
                f"another engine has added column {adopted.name!r} of type {adopted.field_type} to the lake table of"
                f" {desc.path}: drop it there, choose another name, or add it of that type and without a default",
                table=str(desc.path),
                column=f.name,
            )
    number = max(s.schema_id for s in table.metadata.schemas) + 1
    every = [*fields, *system, *theirs.values()]
    return Schema(*every, schema_id=number, identifier_field_ids=now.identifier_field_ids)


def _require_no_partition_field(table: Table, desc: TableDescriptor, written: TableSchema) -> None:
    """Refuse a new name of a column that a partition field of the lake has: Iceberg has both in one table only where
    the field is that column itself."""
    before = {field_id(f): f.name for f in written.fields}
    lake = table.schema()
    for f in desc.schemas.current.fields:
        if before.get(field_id(f)) == f.name:
            continue
        for spec in table.specs().values():
            for part in spec.fields:
                source = lake.find_column_name(part.source_id)
                if part.name == f.name and source != before.get(field_id(f)):
                    raise InvalidSchemaError(
                        f"a column of {desc.path} cannot be called {f.name!r}: a partition field of its lake table is,"
                        f" {part.transform} of {source!r}; choose another name",
                        column=f.name,
                    )


def _followed(
    found: NestedField, written: pa.Field, wanted: pa.Field, lake: pa.Field, ids: itertools.count[int]
) -> NestedField:
    """A field that the lake has, as it is to be.

    Args:
        found: as it is in the lake.
        written: as it is in the definition that the lake has.
        wanted, lake: as it is in the definition in force, with the ids of the table, and with the types of lakes.
    """
    required = found.required and not wanted.nullable
    kind = _followed_type(found.field_type, written, wanted, lake, ids)
    return NestedField(found.field_id, wanted.name, kind, required=required, doc=found.doc)


def _followed_type(
    found: IcebergType, written: pa.Field, wanted: pa.Field, lake: pa.Field, ids: itertools.count[int]
) -> IcebergType:
    inner = [*zip(children(written.type), children(wanted.type), children(lake.type), strict=False)]
    if isinstance(found, StructType):
        held = {field_id(w): (w, f) for w, f in zip(children(written.type), found.fields, strict=True)}
        fields = []
        for f, own in zip(children(wanted.type), children(lake.type), strict=True):
            there = held.get(field_id(f))
            fields.append(_own(own, ids) if there is None else _followed(there[1], there[0], f, own, ids))
        return StructType(*fields)
    if isinstance(found, ListType):
        element = _followed(found.element_field, *inner[0], ids)
        return ListType(found.element_id, element.field_type, element_required=element.required)
    if isinstance(found, MapType):
        value = _followed(found.value_field, *inner[1], ids)
        return MapType(found.key_id, found.key_type, found.value_id, value.field_type, value_required=value.required)
    own_type = _own(lake, itertools.count(1)).field_type
    return found if holds(own_type, found) else own_type  # another engine may have widened it already


def _renumbered(f: NestedField) -> NestedField:
    """The field with ids from 1 on, as one alone."""
    return assign_fresh_schema_ids(Schema(f)).fields[0]


def _own(f: pa.Field, ids: itertools.count[int]) -> NestedField:
    """A field of the table as the lake has it, with new ids."""
    plain = pa.schema(without_ids([f]))
    fresh = assign_fresh_schema_ids(_pyarrow_to_schema_without_ids(plain), lambda: next(ids))
    return fresh.fields[0]
