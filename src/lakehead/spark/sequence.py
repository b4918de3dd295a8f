"""Sequences of several values, of which the first that differs decides: texts that are in the same order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as st

_LEAST = -(1 << 63)


def _number(c: Column) -> Column:
    # Flipping the sign makes the least number the least text.
    return F.lpad(F.hex(c.cast("bigint").bitwiseXOR(F.lit(_LEAST))), 16, "0")


def _micros(c: Column) -> Column:
    """Of a time without a zone, by the calendar: the session's zone has some of them twice."""
    minutes = (F.unix_date(c.cast("date")).cast("bigint") * 24 + F.hour(c)) * 60 + F.minute(c)
    return minutes * 60_000_000 + (F.extract(F.lit("SECOND"), c) * 1_000_000).cast("bigint")


_TEXTS: Mapping[type[st.DataType], Callable[[Column], Column]] = {
    **dict.fromkeys((st.ByteType, st.ShortType, st.IntegerType, st.LongType), _number),
    st.BooleanType: lambda c: _number(c.cast("int")),
    st.DateType: lambda c: _number(F.unix_date(c)),
    st.TimestampType: lambda c: _number(F.unix_micros(c)),
    st.TimestampNTZType: lambda c: _number(_micros(c)),
}


def ordering_text(sequence: Column, t: st.StructType) -> Column | None:
    """What orders changes as these structs do, null where one of their values is; None where there is no such text.

    The fields are integers, booleans, dates and timestamps; the last may be a string.
    """
    texts = []
    for n, f in enumerate(t.fields):
        last_text = isinstance(f.dataType, st.StringType) and n == len(t.fields) - 1
        text = (lambda c: c.cast("string")) if last_text else _TEXTS.get(type(f.dataType))
        if text is None:
            return None
        texts.append(text(sequence.getField(f.name)))
    return F.concat(*texts) if texts else None
