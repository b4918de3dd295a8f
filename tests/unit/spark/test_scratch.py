"""Addresses as Spark reads them."""

from __future__ import annotations

from lakehead.spark.scratch import spark_path


def test_paths_are_literal() -> None:
    assert spark_path("file:///a b/é+/x.parquet") == "file:///a b/é+/x.parquet"
    assert spark_path("file:///a[b]/{c}*/x") == r"file:///a\[b\]/\{c\}\*/x"
    assert spark_path("s3://bucket/x") == "s3a://bucket/x"
