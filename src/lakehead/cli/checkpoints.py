"""`lakehead inspect snapshot`: what a checkpoint of a tablet holds, offline, without a lock, changing nothing."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from lakehead.cli.offline import mapped, require_whole, time_text
from lakehead.cli.output import count_text, write_json, write_line, write_table
from lakehead.cli.session import Session
from lakehead.errors import CorruptionError, UnsupportedFormatError

if TYPE_CHECKING:
    from lakehead.log.checkpoint import Checkpoint

_NAME = re.compile(r"(\d{20})\.checkpoint")


@dataclass(frozen=True)
class WriterReport:
    """One writer as a checkpoint remembers it; anonymous ones have epoch 0."""

    writer_id: str
    epoch: int
    last_sequence: int
    acked_through: int
    answers: int


@dataclass
class SnapshotReport:
    """What a checkpoint file holds; where it is damaged, what could be read.

    Attributes:
        offset: the log below it is covered.
        timestamp: greatest commit timestamp below the offset.
        rows: live rows of a keyed tablet.
        problems: each a sentence that says where, what, and what to do.
    """

    path: str
    bytes: int
    offset: int | None = None
    timestamp: str | None = None
    schema_id: int | None = None
    rows: int = 0
    batches: int = 0
    columns: list[str] = field(default_factory=list)
    writers: list[WriterReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_snapshot(path: str) -> SnapshotReport:
    """Read a checkpoint file whole and check its checksum, its rows and its name.

    Raises:
        InvalidFileError: the file cannot be read.
        UnsupportedFormatError: a newer version wrote it.
    """
    from lakehead.log.checkpoint import Checkpoint

    buffer = mapped(path, ".checkpoint")
    report = SnapshotReport(path, buffer.size)
    try:
        checkpoint = Checkpoint(path, buffer)
    except UnsupportedFormatError:
        raise
    except CorruptionError as e:
        report.problems.append(f"at byte {e.context.get('position', 0)}: {e}; {_remedy(path)}")
        return report
    footer = checkpoint.footer
    report.offset, report.schema_id, report.timestamp = footer.offset, footer.schema_id, time_text(footer.timestamp_us)
    report.writers = [
        WriterReport(w.writer_id.hex(), w.epoch, w.last_sequence, w.acked_through, len(w.answers) // 3)
        for w in footer.writers
    ]
    named = _NAME.fullmatch(os.path.basename(path))
    if named and int(named[1]) != footer.offset:
        report.problems.append(
            f"the file's name says offset {int(named[1])}, its footer {footer.offset}; {_remedy(path)}"
        )
    try:
        _read_rows(checkpoint, report)
    except CorruptionError as e:
        report.problems.append(f"{e}; {_remedy(path)}")
    if not report.problems and report.rows != footer.rows:
        report.problems.append(f"it holds {report.rows} rows, its footer says {footer.rows}; {_remedy(path)}")
    return report


def _read_rows(checkpoint: Checkpoint, report: SnapshotReport) -> None:
    import numpy as np

    last = -1
    for batch in checkpoint.batches():
        report.columns = [f"{f.name} {f.type}" for f in batch.rows.schema]
        report.batches += 1
        report.rows += len(batch.offsets)
        ends = np.concatenate([[last], batch.offsets, [checkpoint.offset]])
        if (np.diff(ends) <= 0).any():
            raise CorruptionError(f"batch {report.batches} of its rows has offsets out of order")
        last = int(batch.offsets[-1]) if len(batch.offsets) else last


def _remedy(path: str) -> str:
    folder = os.path.dirname(path) or "."
    if any(name.endswith(".start") for name in os.listdir(folder)):
        return "the log before it was trimmed, so opening the table refuses: restore the file from a backup"
    return "the log was never trimmed: with the server stopped, remove this file and all is replayed from the log"


def snapshot(
    session: Session,
    path: Annotated[str, typer.Argument(metavar="PATH", help="A .checkpoint file under DATA/tables.")],
    limit: Annotated[int, typer.Option(help="In text: show so many writers.", min=0)] = 20,
) -> None:
    """Explain and check a checkpoint of a tablet: its offset, live rows and writers.

    Changes nothing and needs no lock. Exit code 5 when the file is damaged.
    """
    report = read_snapshot(path)
    if session.json:
        write_json(asdict(report))
    else:
        _write_text(report, limit)
    require_whole(path, report.problems, position=0)


def _write_text(report: SnapshotReport, limit: int) -> None:
    if report.writers[:limit]:
        columns = ["writer", "epoch", "last sequence", "acked through", "answers kept"]
        shown = report.writers[:limit]
        write_table(columns, [[w.writer_id[:8], w.epoch, w.last_sequence, w.acked_through, w.answers] for w in shown])
    if len(report.writers) > limit:
        write_line(f"{len(report.writers) - limit} more writers are not shown; -o json lists all")
    write_line(f"{report.path}: {report.bytes} bytes")
    if report.offset is not None:
        write_line(
            f"stands for the log below offset {report.offset} (last committed {report.timestamp}):"
            f" {count_text(report.rows, 'live row')} of schema {report.schema_id},"
            f" {count_text(len(report.writers), 'writer')}"
        )
    if report.columns:
        write_line(f"columns: {', '.join(report.columns)}")
    for problem in report.problems:
        write_line(f"problem {problem}")
    if not report.problems:
        write_line("the checksum matches")
