"""Break central lines one at a time and see that the tests notice: `make mutants`.

Each mutant is a copy of the package with one change. The tests named with it run against the copy and must fail; were
they to pass, a guarantee would stand on nothing. Run without mutants first, they must pass.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutation.mutant import Mutant
from tests.mutation.of_access import OF_ACCESS
from tests.mutation.of_clients import OF_CLIENTS
from tests.mutation.of_memory import OF_MEMORY
from tests.mutation.of_publishing import OF_PUBLISHING
from tests.mutation.of_reading import OF_READING

ROOT = Path(__file__).parents[2]


_COMMITS = "            self.committer.commit(self._log, frames)\n"
_OBSERVES = (
    "            if now < self._log.last_timestamp_us:\n                self._log.observe(now, self._steady_us())\n"
)
_APPLIES = "            self._apply(frames, rows)\n"

MUTANTS = (
    *OF_ACCESS,
    *OF_CLIENTS,
    *OF_MEMORY,
    *OF_PUBLISHING,
    *OF_READING,
    Mutant(
        "skip the fdatasync",
        "log/tablet.py",
        "            self._segments[-1].sync()\n        except",
        "            pass\n        except",
        "tests/unit/log/test_tablet.py tests/unit/log/test_checkpoint.py",
    ),
    Mutant(
        "acknowledge before the sync",
        "server/committer.py",
        "        if self.waits:\n",
        "        if False:\n",
        "tests/unit/server/test_tablet.py",
    ),
    Mutant(
        "write on after a failed sync",
        "log/tablet.py",
        "        if self.sync_failed:\n",
        "        if False:\n",
        "tests/unit/log/test_tablet.py tests/unit/server/test_tablet.py",
    ),
    Mutant(
        "truncate a tablet that takes no writes",
        "server/tablet.py",
        "                self._require_writable()\n                unseen",
        "                unseen",
        "tests/unit/server/test_tablet.py",
    ),
    Mutant(
        "append frames where they do not belong",
        "log/tablet.py",
        "if frame.base_offset != at:",
        "if False:",
        "tests/unit/log/test_tablet.py",
    ),
    Mutant(
        "apply frames that do not follow",
        "log/tablet_state.py",
        "if base != self.offset:",
        "if False:",
        "tests/unit/log/test_tablet.py",
    ),
    Mutant(
        "take damage for a torn tail",
        "log/tablet.py",
        "if was_written or segment.end_offset < max(mark, segment.synced_end_after(position)):",
        "if was_written:",
        "tests/unit/log/test_tablet.py",
    ),
    Mutant(
        "cut what another owner wrote",
        "log/tablet.py",
        "was_written = not last or segment.is_whole_at(position)",
        "was_written = not last",
        "tests/unit/log/test_tablet.py",
    ),
    Mutant(
        "trust the names that are there",
        "log/tablet.py",
        "            self._storage.sync_folder(self._folder)\n",
        "            pass\n",
        "tests/properties/test_durable_names.py",
    ),
    Mutant(
        "believe the bytes",
        "format/frame.py",
        "if check and crc32c.crc32c(body_buffer) != header.crc:",
        "if False:",
        "tests/unit/log/test_tablet.py tests/unit/format/test_frame.py",
    ),
    Mutant(
        "forget what a writer was answered",
        "log/writers.py",
        "if known is not None:",
        "if False:",
        "tests/unit/log/test_writers.py",
    ),
    Mutant(
        "answer another batch",
        "log/writers.py",
        "if known.content.contradicts(content):",
        "if False:",
        "tests/unit/log/test_writers.py",
    ),
    Mutant(
        "compare a batch per tablet only",
        "server/named_writers.py",
        "if stamp.sequence <= name.newest:",
        "if False:",
        "tests/unit/server/test_named_writers.py",
    ),
    Mutant(
        "go on after a batch that landed in part",
        "server/named_writers.py",
        "return bool(holders) and all(a.tablets == len(holders) for a in holders.values())",
        "return bool(holders)",
        "tests/unit/server/test_named_writers.py",
    ),
    Mutant(
        "let an epoch go back",
        "server/named_writers.py",
        "if epoch >= name.epoch:",
        "if epoch:",
        "tests/unit/server/test_named_writers.py",
    ),
    Mutant(
        "let a fenced writer write",
        "log/writers.py",
        "if stamp.epoch < writer.epoch:",
        "if False:",
        "tests/unit/log/test_writers.py",
    ),
    Mutant(
        "checkpoints without writers",
        "log/tablet.py",
        "schema_id, 0, self.state.writers.state(), number)",
        "schema_id, 0, [], number)",
        "tests/unit/log/test_checkpoint.py",
    ),
    Mutant(
        "trim past the checkpoint",
        "log/tablet.py",
        "s.id < self._uncovered and s.end_offset <= before",
        "s.end_offset <= before",
        "tests/unit/log/test_checkpoint.py",
    ),
    Mutant(
        "trim what is not tiered",
        "server/tablet.py",
        "keep = keep if tiered is None else min(keep, tiered)",
        "keep = keep",
        "tests/integration/test_trimmed.py",
    ),
    Mutant(
        "read past a lease",
        "server/streams.py",
        "views[part.key] = leased.get(part.key) or tablet.view()",
        "views[part.key] = tablet.view()",
        "tests/integration/test_trimmed.py",
    ),
    Mutant(
        "apply what was not logged",
        "server/tablet.py",
        _COMMITS + _OBSERVES + _APPLIES,
        _APPLIES + _COMMITS + _OBSERVES,
        "tests/unit/server/test_tablet.py",
    ),
    Mutant(
        "let a table pass its changelog",
        "api/lake.py",
        "HeldBack(source, kept.offsets))",
        "source)",
        "tests/integration/test_lake_changelog.py",
    ),
    Mutant(
        "count positions as if no row group was skipped",
        "iceberg/reader.py",
        "pieces.append(of_group + (rows - position) if rows < position else of_group)",
        "pieces.append(of_group)",
        "tests/unit/iceberg/test_reader.py",
    ),
    Mutant(
        "hold long values as short ones",
        "kv/heap.py",
        "if longest <= _SHORT_MAX:",
        "if longest <= 1 << 20:",
        "tests/unit/kv/test_heap.py",
    ),
    Mutant(
        "believe lengths in Avro files",
        "iceberg/avro.py",
        "if not 0 <= n <= self.left:",
        "if False:",
        "tests/unit/iceberg/test_avro.py",
    ),
    Mutant(
        "take a manifest that was cut",
        "iceberg/manifests.py",
        "if len(said) == len(counts) and len(entries) != sum(said):",
        "if False:",
        "tests/unit/iceberg/test_manifests.py",
    ),
    Mutant(
        "use what is remembered of manifests that changed",
        "iceberg/planner.py",
        " or known.stamps != file_stamps(table.io, known.stamps)",
        "",
        "tests/unit/iceberg/test_planner.py",
    ),
    Mutant(
        "ask a condition of rows that are gone",
        "predicate/__init__.py",
        "if live is not None and live.false_count:",
        "if False:",
        "tests/properties/test_predicate.py",
    ),
    Mutant(
        "leave checksums of pages alone",
        "iceberg/file_io.py",
        "default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)",
        "",
        "tests/properties/test_lake_damage.py",
    ),
    Mutant(
        "tell watermarks of two moments",
        "server/reads.py",
        "            since = None if at is None else tablet.offset_at(at)\n",
        "            since = None if at is None else tablet.offset_at(at)\n            end = tablet.high_watermark\n",
        "tests/unit/server/test_tables.py",
    ),
    Mutant(
        "take any snapshots for those that were written",
        "iceberg/metadata_json.py",
        "if entries[: len(written)] == written else 0",
        "",
        "tests/unit/iceberg/test_known_metadata.py",
    ),
    Mutant(
        "commit with an old epoch",
        "tiering/commit.py",
        "if mark and mark.epoch > plan.epoch:",
        "if False:",
        "tests/unit/tiering/test_commit.py tests/unit/lake/test_lake_table.py",
    ),
    Mutant(
        "trim without noting the start",
        "log/tablet.py",
        "            self._mark_start(kept[0].base_offset)\n",
        "            pass\n",
        "tests/unit/log/test_checkpoint.py",
    ),
    Mutant(
        "view without a second look",
        "log/tablet.py",
        "if checkpoint is self.checkpoint:",
        "if True:",
        "tests/unit/log/test_checkpoint.py",
    ),
    Mutant(
        "checkpoint without a new segment",
        "log/tablet.py",
        "        self.sync()\n        self.roll()\n        number",
        "        self.sync()\n        number",
        "tests/unit/log/test_checkpoint.py",
    ),
    Mutant(
        "apply when others may look at the log's end",
        "server/tablet.py",
        _OBSERVES + _APPLIES,
        _OBSERVES + _APPLIES.removeprefix("    "),
        "tests/unit/server/test_tablet.py",
    ),
    Mutant(
        "pin views while watermarks move",
        "server/reads.py",
        "        with self._tables.moment:",
        "        if True:",
        "tests/unit/server/test_tables.py",
    ),
    Mutant(
        "every refused attempt is dead",
        "tiering/commit.py",
        "return not landed and descends_from(version, base.current_id)",
        "return not landed",
        "tests/unit/tiering/test_commit.py",
    ),
    Mutant(
        "tell readers the catalog's password",
        "iceberg/file_io.py",
        "if str(k).startswith((PY_IO_IMPL, *STORAGE_PREFIXES))",
        "if k",
        "tests/integration/test_catalogs.py",
    ),
    Mutant(
        "unknown attempts are dead",
        "tiering/commit.py",
        "attempt.answer.outcome is Outcome.UNKNOWN and self._lake.lands_late",
        "False",
        "tests/unit/tiering/test_commit.py",
    ),
    Mutant(
        "take rows of others in a keyed lake",
        "lake/census.py",
        "if keyed and found.strangers:",
        "if False:",
        "tests/unit/tiering/test_commit.py",
    ),
    Mutant(
        "who is due last goes first",
        "tiering/queue.py",
        "key=lambda turn: turn[0],",
        "key=lambda turn: -turn[0],",
        "tests/unit/tiering/test_queue.py",
    ),
    Mutant(
        "let a fenced table come back",
        "tiering/queue.py",
        "elif table.table_id not in self._fenced:",
        "else:",
        "tests/unit/tiering/test_queue.py tests/properties/test_tiering_queue.py",
    ),
    Mutant(
        "give a table to a job while another may be at work on it",
        "server/tiering_jobs.py",
        "if not any(t in other.has for other in others)",
        "if True",
        "tests/unit/server/test_tiering_jobs.py",
    ),
    Mutant(
        "never hand on a silent job's tables",
        "server/tiering_jobs.py",
        "if now - job.asked_at > SILENT_SECONDS",
        "if False",
        "tests/unit/server/test_tiering_jobs.py",
    ),
    Mutant(
        "tier a range of a long log that is not its oldest",
        "tiering/round_plan.py",
        "return {tablet: (start, ends[tablet]) for",
        "return {tablet: (start + 1, ends[tablet] + 1) for",
        "tests/unit/tiering/test_round_plan.py tests/unit/tiering/test_round.py",
    ),
    Mutant(
        "a reader moves to a stream that has forgotten what came in between",
        "client/tails.py",
        "if not begun.issuperset(behind.items()):",
        "if False:",
        "tests/integration/test_shared_streams.py",
    ),
    Mutant(
        "a count is of now",
        "server/tablet.py",
        "self._log.live_rows if self._kv is not None",
        "len(self._kv) if self._kv is not None",
        "tests/integration/test_counts.py",
    ),
    Mutant(
        "let a server name any class",
        "iceberg/told_properties.py",
        "        if key == PY_IO_IMPL and value not in FILE_IOS:\n",
        "        if False:\n",
        "tests/unit/iceberg/test_told_properties.py",
    ),
    Mutant(
        "let deletes of small files reach into large ones",
        "iceberg/data_files.py",
        "SMALL if first.nbytes <= SMALL_BYTES else ''",
        "''",
        "tests/unit/iceberg/test_data_files.py",
    ),
    Mutant(
        "a table without news gets a round",
        "tiering/queue.py",
        "return self.lake_end is None or end is None or end > self.lake_end",
        "return True",
        "tests/unit/tiering/test_queue.py tests/unit/tiering/test_service.py",
    ),
    Mutant(
        "miss no row that is replaced",
        "lake/deleted_rows.py",
        "    if lacking:",
        "    if False:",
        "tests/unit/tiering/test_commit.py tests/unit/lake/test_lake_table.py",
    ),
    Mutant(
        "live rows with a wrong time",
        "log/checkpoint.py",
        "to_arrow(some.timestamps_us, TIMESTAMP_TYPE)",
        "to_arrow(some.timestamps_us * 0, TIMESTAMP_TYPE)",
        "tests/unit/log/test_checkpoint.py",
    ),
    Mutant(
        "rows with a wrong time",
        "log/records.py",
        "constant(self.frame.timestamp_us, self.frame.body.row_count, np.int64)",
        "constant(0, self.frame.body.row_count, np.int64)",
        "tests/unit/server/test_projection.py",
    ),
    Mutant(
        "leases end at once",
        "server/leases.py",
        "if x.used >= (planned if x.planned else held)}",
        "if False}",
        "tests/unit/server/test_leases.py",
    ),
    Mutant(
        "a lease is no use",
        "server/leases.py",
        "            return held.views",
        "            return {}",
        "tests/unit/server/test_leases.py",
    ),
    Mutant(
        "offset_at one frame late",
        "log/tablet.py",
        "known_us) >= timestamp_us",
        "known_us) > timestamp_us",
        "tests/unit/log/test_checkpoint.py",
    ),
    Mutant(
        "do not tell that the time was trimmed",
        "log/tablet.py",
        "return or_trimmed(at) if at == view.log_start_offset else at",
        "return at",
        "tests/unit/log/test_checkpoint.py",
    ),
    Mutant(
        "forget what a closed writer had seen",
        "server/named_writers.py",
        "self._metadata.writer_acked_through(table.desc.table_id, writer_id), -1)",
        "-1, -1)",
        "tests/unit/server/test_named_writers.py",
    ),
    Mutant(
        "keep the answer of one batch",
        "log/writers.py",
        "ANSWERS_KEPT = 64",
        "ANSWERS_KEPT = 1",
        "tests/unit/log/test_writers.py",
    ),
    Mutant(
        "serve a log that ends before its lake",
        "server/tables.py",
        "            if lake is not None and desc.lake:\n",
        "            if False:\n",
        "tests/unit/server/test_tables.py",
    ),
    Mutant(
        "believe a checkpoint",
        "log/checkpoint.py",
        'if reader.read(size - 8, 4).to_pybytes() != struct.pack("<I", crc):',
        "if False:",
        "tests/unit/log/test_checkpoint.py",
    ),
    Mutant(
        "read the watermark after the rows",
        "server/tablet.py",
        "            return self._log.high_watermark, self._kv.live_rows(columns)",
        "            rows = self._kv.live_rows(columns)\n        return self._log.high_watermark, rows",
        "tests/unit/server/test_tablet.py",
    ),
    Mutant(
        "read columns of an older schema by their names",
        "format/read_as.py",
        "        found = [ids.get(field_id(f)) for f in wanted]",
        "        found = [{w.name: at for at, w in enumerate(there)}.get(f.name) for f in wanted]",
        "tests/unit/format/test_read_as.py",
    ),
    Mutant(
        "skip frames by the bounds of another field of that name",
        "format/read_as.py",
        "known.append(replace(bound, column=name))",
        "known.append(bound)",
        "tests/unit/format/test_read_as.py",
    ),
    Mutant(
        "compact over deletes that came meanwhile",
        "tiering/commit.py",
        "            if found is not None and found != file:\n",
        "            if False:\n",
        "tests/unit/tiering/test_compaction.py",
    ),
    Mutant(
        "remove files that somebody reads",
        "iceberg/expiry.py",
        "        reached.add_use(use, left.metadata)\n",
        "        pass\n",
        "tests/unit/tiering/test_expiry.py",
    ),
    Mutant(
        "expire what the mark is read from",
        "tiering/expiry_plan.py",
        "        if snapshot.mark is not None:\n            break\n",
        "        break\n",
        "tests/unit/tiering/test_expiry.py",
    ),
    Mutant(
        "publish on whatever version there is",
        "iceberg/staging.py",
        '.where(*ROW, COLUMNS.metadata_location == bindparam("old"))',
        ".where(*ROW)",
        "tests/unit/iceberg/test_staging.py",
    ),
    Mutant(
        "compact and forget what was deleted meanwhile",
        "tiering/commit.py",
        "            stale=stale,\n",
        "",
        "tests/unit/tiering/test_compaction.py",
    ),
    Mutant(
        "open the file of a database beside SQLite",
        "env/storage.py",
        "        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))\n",
        "        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))\n",
        "tests/unit/env/test_storage.py",
    ),
    Mutant(
        "collect what a child inherited",
        "env/forks.py",
        "    gc.freeze()\n",
        "",
        "tests/unit/env/test_forks.py",
    ),
)


def run(mutant: Mutant | None, tests: str) -> bool:
    """Whether these tests pass on a copy of the package with the mutant in it."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", f"{folder}/src", ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            path = Path(folder, "src", "lakehead", mutant.file)
            text = path.read_text()
            if mutant.line not in text:
                sys.exit(f"{mutant.name}: {mutant.file} does not hold {mutant.line!r} any more")
            path.write_text(text.replace(mutant.line, mutant.becomes))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests.split()]
        environ = {**os.environ, "PYTHONPATH": f"{folder}/src"}
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            sys.exit(done.stdout + done.stderr)
        return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("words", nargs="*", help="only mutants whose name holds one of these")
    words = parser.parse_args().words
    chosen = [m for m in MUTANTS if not words or any(w in m.name for w in words)]
    if not run(None, " ".join(sorted({t for m in chosen for t in m.tests.split()}))):
        sys.exit("the tests fail without any mutant")
    survivors = 0
    for mutant in chosen:
        survived = run(mutant, mutant.tests)
        survivors += survived
        print(f"{'SURVIVED' if survived else 'caught':<9} {mutant.name:<36} {mutant.file}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
