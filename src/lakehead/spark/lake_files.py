"""Native Parquet scans of lake files in Spark, with columns by field id, whatever a file calls them.

Spark reads columns by id, but takes filters to a file by name: where a name once stood for another column, it skips the
wrong rows, and its vectorised reader stumbles over types. Files that may be such are read by the names they use.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F
from pyspark.sql import types as st

from lakehead.format.defaults import defaults_of
from lakehead.iceberg.columns import FileColumns, has_ids, plain_files, with_defaults
from lakehead.iceberg.contract import names_are_lasting
from lakehead.iceberg.data_files import is_ours, lake_arrow_schema
from lakehead.iceberg.file_io import lake_files, locate_file
from lakehead.iceberg.iceberg_table import native_table
from lakehead.lake.lake_table import LakeFile, missing_file
from lakehead.lake.pinned_lake import PinnedLake
from lakehead.spark.floats import quoted, unprunable_floats
from lakehead.spark.frame_steps import read_parquet, select, weak_files
from lakehead.spark.handled_errors import handled
from lakehead.spark.scratch import ScratchFile, spark_path
from lakehead.spark.types import SPARK_ID, fitted, literal, may_not_fit, narrowed, spark_schema
from lakehead.types import SYSTEM_FIELDS, field_id

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


def opens_lake(spark: SparkSession, view: PinnedLake) -> bool:
    """Whether Spark has a driver for the storage of a lake: for object stores it is a Hadoop package of its own."""
    scheme, found, _ = spark_path(native_table(view.table).location()).partition(":")
    if not found or scheme == "file":
        return True
    context = spark.sparkContext
    try:
        context._jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass(scheme, context._jsc.hadoopConfiguration())
        return True
    except Py4JJavaError:
        return False


_Extra: TypeAlias = Mapping[str, tuple[str, st.DataType]]


def lake_columns(view: PinnedLake, names: Iterable[str]) -> pa.Schema:
    """Columns of a table as its lake's files have them, with their field ids."""
    lake = lake_arrow_schema(native_table(view.table).schema())
    return pa.schema([lake.field(name) for name in names])


class LakeScan:
    """Scans files of one lake snapshot as a table's own and system columns.

    Attributes:
        reads: weak references to what reads the files in the JVM; see `lakehead.spark.held_pins`.
    """

    def __init__(self, spark: SparkSession, view: PinnedLake) -> None:
        self.reads: list[Any] = []
        self._spark = spark
        table = native_table(view.table)
        self._io = table.io
        lake = with_defaults(lake_arrow_schema(table.schema()), view.desc)
        self._defaults = defaults_of(lake)
        self._columns: FileColumns | None = None
        if self._defaults or not names_are_lasting(table):
            self._columns = FileColumns.of(table, view.desc)
        self._name = ".".join(table.name())
        self._columns_own = columns = pa.schema([*view.desc.schema, *SYSTEM_FIELDS])
        self._own = spark_schema(columns, lake)
        self._schema = spark_schema(columns, lake, as_stored="us")
        self._of_others = spark_schema(columns, lake, as_stored="others")
        self._fits = not may_not_fit(self._of_others, pa.struct(list(columns)))

    def __call__(
        self, files: Iterable[LakeFile], extra: _Extra | None = None, beside: Sequence[ScratchFile] = ()
    ) -> DataFrame:
        """All rows of these files, at least one.

        Args:
            extra: more columns, of Spark's metadata of files and rows, as SQL and of these types.
            beside: more files, written as `lake_columns` says; columns that they lack are null.

        Raises:
            LakeFileMissingError: a file is gone.
        """
        ours: list[LakeFile] = []
        others: list[LakeFile] = []
        for f in files:
            (ours if self._fits or is_ours(f.path) else others).append(f)
        frames = [*self._frames(self._schema, ours, extra or {}, beside)]
        frames += self._frames(self._of_others, others, extra or {})
        return reduce(lambda a, b: a.unionByName(b), frames)

    def _frames(
        self, stored: st.StructType, files: list[LakeFile], extra: _Extra, beside: Sequence[ScratchFile] = ()
    ) -> Iterator[DataFrame]:
        plain, named = files, dict[str, tuple[st.StructType, list[LakeFile]]]()
        if self._columns is not None:
            plain, others = plain_files(self._io, files, self._columns, self._defaults)
            for f in others:
                schema = self._schema_in(f, stored)
                named.setdefault(schema.json(), (schema, []))[1].append(f)
        if plain or beside:
            yield self._read(stored, stored, plain, extra, beside)
        for schema, some in named.values():
            yield self._read(schema, stored, some, extra)

    def _read(
        self,
        schema: st.StructType,
        stored: st.StructType,
        files: Sequence[LakeFile],
        extra: _Extra,
        beside: Sequence[ScratchFile] = (),
    ) -> DataFrame:
        paths = [spark_path(f.path) for f in files]
        try:
            with handled():
                rows = read_parquet(self._spark, schema, [*paths, *(file.address for file in beside)])
        except AnalysisException as e:
            if e.getCondition() != "PATH_NOT_FOUND":
                raise
            gone = str((e.getMessageParameters() or {}).get("path", e))
            raise missing_file(next((f.path for f in files if posixpath.basename(f.path) in gone), gone)) from e
        self.reads.append(weak_files(rows))
        for file in beside:
            file.read_by(self.reads[-1])
        if extra:
            rows = select(rows, ["*", *(f"{text} as {name}" for name, (text, _) in extra.items())])
        if schema != self._own or stored is self._of_others:
            own = []
            for at, (f, there) in enumerate(zip(self._own, schema, strict=True)):
                column, of = self._bound(f, there), self._columns_own.field(at).type
                fits = (
                    fitted(column, there.dataType, of, self._name)
                    if stored is self._of_others
                    else narrowed(column, f.dataType)
                )
                own.append(fits.alias(f.name))
            rows = rows.select(*own, *extra)
        return unprunable_floats(rows, [*self._own, *(st.StructField(n, t) for n, (_, t) in extra.items())])

    def _bound(self, f: st.StructField, there: st.StructField) -> Column:
        default = self._defaults.get(f.name)
        is_there = default is None or there.name != _missing(f)
        return F.col(quoted(there.name)) if is_there else literal(default)

    def _schema_in(self, file: LakeFile, stored: st.StructType) -> st.StructType:
        assert self._columns is not None
        fs, path = locate_file(self._io, file.path)
        with lake_files(file.path):
            physical = pq.read_schema(path, filesystem=fs)
        named = _named_as(stored, self._columns.written(physical))
        return named if has_ids(physical) else _without_ids(named)


def _without_ids(t: Any) -> Any:
    """The type as Spark reads it from a file without field ids, by name."""
    if isinstance(t, st.StructType):
        return st.StructType([st.StructField(f.name, _without_ids(f.dataType), f.nullable) for f in t.fields])
    if isinstance(t, st.ArrayType):
        return st.ArrayType(_without_ids(t.elementType), t.containsNull)
    if isinstance(t, st.MapType):
        return st.MapType(_without_ids(t.keyType), _without_ids(t.valueType), t.valueContainsNull)
    return t


def _named_as(schema: st.StructType, physical: Iterable[pa.Field]) -> st.StructType:
    """The columns with the names that a file has for their ids; those that it lacks with a name that nothing has."""
    there = {field_id(f): f for f in physical}
    fields = []
    for f in schema.fields:
        found = there.get(f.metadata[SPARK_ID])
        name = _missing(f) if found is None else found.name
        t = f.dataType if found is None else _type_named_as(f.dataType, found.type)
        fields.append(st.StructField(name, t, f.nullable, f.metadata))
    return st.StructType(fields)


def _missing(f: st.StructField) -> str:
    return f"__missing_{f.metadata[SPARK_ID]}"


def _type_named_as(t: st.DataType, physical: pa.DataType) -> st.DataType:
    if isinstance(t, st.StructType):
        return _named_as(t, [physical.field(i) for i in range(physical.num_fields)])
    if isinstance(t, st.ArrayType):
        return st.ArrayType(_type_named_as(t.elementType, physical.value_type), t.containsNull)
    if isinstance(t, st.MapType):
        key, value = (_type_named_as(*p) for p in ((t.keyType, physical.key_type), (t.valueType, physical.item_type)))
        return st.MapType(key, value, t.valueContainsNull)
    return t
