"""What stands between rows that are staged and rows that count, and what they overwrite."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

OF_PUBLISHING = (
    Mutant(
        "publish a batch that is there already",
        "server/staging.py",
        "if any(batch <= self._metadata.publication(table_id, job).batch",
        "if any(batch < self._metadata.publication(table_id, job).batch",
        "tests/unit/server/test_staging.py",
    ),
    Mutant(
        "leave a decided batch to its job",
        "server/tables.py",
        "                self._complete(table)\n",
        "                pass\n",
        "tests/unit/server/test_staging.py",
    ),
    Mutant(
        "publish to tablets that have it",
        "server/writes.py",
        "if last is not None and last >= stamp.sequence:",
        "if False:",
        "tests/unit/server/test_staging.py",
    ),
    Mutant(
        "number every batch of a job from the start",
        "server/staging.py",
        "EndPublication(table_id, job, batch, of.stamp.sequence, now)",
        "EndPublication(table_id, job, batch, 0, now)",
        "tests/unit/server/test_staging.py",
    ),
    Mutant(
        "forget staged rows before it is known that they are written",
        "server/staging.py",
        "self._metadata.submit_all(ends, synced=bool(folders))",
        "self._metadata.submit_all(ends, synced=False)",
        "tests/unit/server/test_staging.py",
    ),
    Mutant(
        "publish the first batch of each tablet alone",
        "server/staging.py",
        "        waiting = {key: waiting[key] for key, _ in batches}\n",
        "        waiting = {}\n",
        "tests/unit/server/test_staging.py",
    ),
    Mutant(
        "decide a batch without what it overwrites",
        "server/catalog.py",
        "rows = [(table_id, *end) for end in command.truncates.get(table_id, {}).items()]",
        "rows: list[object] = []",
        "tests/unit/server/test_unseen.py",
    ),
    Mutant(
        "write rows beside the partitions that are overwritten",
        "server/staging.py",
        "if named and (beside := written.difference(named)):",
        "if named and (beside := set[str]()):",
        "tests/unit/server/test_unseen.py",
    ),
    Mutant(
        "leave the rows of a partition that is overwritten and gets none",
        "server/staging.py",
        "    return named or written\n",
        "    return written\n",
        "tests/unit/server/test_unseen.py",
    ),
    Mutant(
        "show readers a partition that is half overwritten",
        "server/unseen.py",
        "        self._log.apply(frames, rows)\n",
        "        self._log.apply(frames, rows)\n        self._log.advance_high_watermark()\n",
        "tests/unit/server/test_unseen.py",
    ),
    Mutant(
        "overwrite what came after it was decided",
        "server/unseen.py",
        "self._kv.deletions(before)",
        "self._kv.deletions(self._log.log_end_offset)",
        "tests/unit/server/test_unseen.py",
    ),
    Mutant(
        "publish rows that come along unseen",
        "server/staging.py",
        "                self._writes.checked(table, write, bodies)\n",
        "",
        "tests/unit/server/test_staging.py",
    ),
    Mutant(
        "publish a piece that is damaged",
        "server/staging.py",
        "if magic != _MAGIC or crc32c.crc32c(view[_HEAD.size : at]) != crc:",
        "if False:",
        "tests/unit/server/test_staging.py",
    ),
    Mutant(
        "make a table again that was dropped under a stream",
        "spark/sink.py",
        "        if number == 0:\n",
        "        if True:\n",
        "tests/integration/test_spark_write.py",
    ),
    Mutant(
        "overwrite a table with partitions when nothing is said of them",
        "spark/sink.py",
        "if desc.partition_by and options.overwrites is None:",
        "if False:",
        "tests/integration/test_spark_overwrite.py",
    ),
)
