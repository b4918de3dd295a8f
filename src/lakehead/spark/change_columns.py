"""What the arguments of `lakehead.spark.apply_changes` say of the changes: columns by name, and expressions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from pyspark.errors import AnalysisException
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as st

from lakehead.errors import ColumnNotFoundError, InvalidRequestError, InvalidSchemaError
from lakehead.format.schema import nearest_name
from lakehead.spark.handled_errors import handled
from lakehead.spark.key_join import Alike
from lakehead.types import RESERVED_PREFIX

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Names: TypeAlias = "str | Column | Sequence[str | Column]"
"""Columns of a DataFrame, by name or as such."""


def expression_of(changes: DataFrame, what: str, given: str | Column) -> tuple[Column, st.StructField]:
    """An argument that is a column of changes, or is made of them, and what Spark takes it for.

    Raises:
        ColumnNotFoundError: the changes do not have one of its columns.
        InvalidRequestError: it is no expression.
    """
    if not isinstance(given, str | Column):
        raise InvalidRequestError(f"{what}={given!r} must be an expression, as text or as a column")
    try:
        with handled():
            column = F.expr(given) if isinstance(given, str) else given
            fields = changes.select(column).schema.fields
            if len(fields) == 1:  # no aggregate, no window, and nothing that makes several rows of one
                _ = changes.where(column.isNotNull()).schema
    except AnalysisException as e:
        why = str(e).partition("\n")[0]
        if (e.getCondition() or "").startswith("UNRESOLVED_COLUMN"):
            name = (e.getMessageParameters() or {}).get("objectName", "").strip("`")
            raise ColumnNotFoundError(f"{what} has a column that the changes do not have: {why}", column=name) from e
        raise InvalidRequestError(f"{what} is no expression on the changes: {why or e}") from e
    if len(fields) != 1:
        raise InvalidRequestError(f"{what} is {[f.name for f in fields]}: say one expression")
    return column, fields[0]


def condition_of(changes: DataFrame, what: str, given: str | Column) -> Column:
    """What says of each of the changes whether it is so; null is no."""
    column, field = expression_of(changes, what, given)
    if isinstance(field.dataType, st.StringType):
        raise InvalidRequestError(
            f"{what} is text, and not a condition: say which text it is, as in \"op = 'd'\", or cast(c as boolean) of"
            " one that is true or false"
        )
    return F.coalesce(expression_of(changes, what, column.cast("boolean"))[0], F.lit(False))


def columns_named(changes: DataFrame, what: str, given: Names, alike: Alike) -> tuple[str, ...]:
    """The names of columns as the changes have them; they may be given as such.

    Raises:
        ColumnNotFoundError: the changes do not have one.
    """
    several = (given,) if isinstance(given, str | Column) else given
    if not isinstance(several, Iterable) or not all(isinstance(c, str | Column) for c in several):
        raise InvalidRequestError(f"{what}={given!r} must name columns of the changes")
    names = [c if isinstance(c, str) else expression_of(changes, what, c)[1].name for c in several]
    there, folded = changes.columns, {alike(c): c for c in changes.columns}
    found = [c if c in there else folded.get(alike(c)) for c in names]
    for name, c in zip(names, found, strict=True):
        if c is None:
            raise ColumnNotFoundError(f"the changes have no column {name!r}; {nearest_name(name, there)}", column=name)
    return tuple(c for c in found if c is not None)


def require_columns(changes: DataFrame, keys: Sequence[str], columns: Sequence[str], alike: Alike) -> None:
    """Refuse columns that no table has side by side.

    Raises:
        InvalidRequestError: one is named, or there, twice.
        InvalidSchemaError: one has a name of ours.
    """
    of_frame = [alike(c) for c in changes.columns]
    if twice := sorted({c for c in columns if of_frame.count(alike(c)) > 1}):
        raise InvalidRequestError(f"the changes have columns {twice} twice: rename or drop one of each")
    for what, names in (("keys", keys), ("column_list", columns)):
        if twice := sorted({c for c in names if names.count(c) > 1}):
            raise InvalidRequestError(f"{what} has columns {twice} twice: name each once")
    if ours := [c for c in columns if c.startswith(RESERVED_PREFIX)]:
        raise InvalidSchemaError(
            f"columns {ours}: names that start with '__' are reserved for system columns; rename them, or leave"
            " them out with except_column_list",
            column=ours[0],
        )
