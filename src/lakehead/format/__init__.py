"""Bytes <-> values: batch frames, statistics, schemas, bucketing, predicates. Pure: no disk, no clock, no threads."""
