"""`lakehead inspect segment`: what a log file holds, offline, without a lock, changing nothing."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lakehead.cli.checkpoints import snapshot
from lakehead.cli.lake_tables import lake
from lakehead.cli.offline import mapped, require_whole, time_text
from lakehead.cli.output import count_text, write_json, write_line, write_table
from lakehead.cli.session import Session, command
from lakehead.errors import CorruptionError, UnsupportedFormatError

if TYPE_CHECKING:
    import pyarrow as pa

_REMEDY = "this is damage that opening the table refuses: restore the file from a backup"


def register(app: typer.Typer) -> None:
    """Add the commands that explain files."""
    nouns = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Explain files, offline and read-only.")
    command(nouns, "segment")(segment)
    command(nouns, "snapshot")(snapshot)
    command(nouns, "lake")(lake)
    app.add_typer(nouns, name="inspect")


@dataclass(frozen=True)
class FrameReport:
    """One batch frame as found at a position of the file; ``problem`` is None when it is as it was written."""

    position: int
    bytes: int
    base_offset: int
    rows: int
    timestamp: str
    schema_id: int
    kind: str
    compressed: bool
    writer_id: str
    sequence: int
    epoch: int
    synced_end: int
    checksum: str
    problem: str | None = None


@dataclass
class SegmentReport:
    """What a segment file holds.

    Attributes:
        end_offset: after the last row of the last whole frame; None without frames.
        unread_bytes: bytes that form no frame.
        problems: each a sentence that says where and what.
    """

    path: str
    bytes: int
    rows: int = 0
    base_offset: int | None = None
    end_offset: int | None = None
    unread_bytes: int = 0
    problems: list[str] = field(default_factory=list)
    frames: list[FrameReport] = field(default_factory=list)


def read_segment(path: str) -> SegmentReport:
    """Read every frame of a log file and check both checksums and the order of offsets.

    A frame whose body is bad is reported and stepped over; after a bad header the next good one is looked for.

    Raises:
        InvalidFileError: the file cannot be read.
        UnsupportedFormatError: a newer version wrote it.
    """
    from lakehead.log.segment import SegmentId

    buffer = mapped(path, ".log")
    report = SegmentReport(path, buffer.size)
    named = SegmentId.of_name(os.path.basename(path))
    expected = named.base_offset if named else None
    position = 0
    while position < buffer.size:
        try:
            frame = _frame_at(buffer, position)
        except UnsupportedFormatError as e:
            raise UnsupportedFormatError(f"{path} at byte {position}: {e}", path=path, position=position) from e
        except CorruptionError as e:
            following = _next_frame(buffer, position)
            report.unread_bytes += following - position
            report.problems.append(_unread(buffer, position, following, e))
            position, expected = following, None
            continue
        if expected is not None and frame.base_offset != expected:
            said = "the file's name says" if not report.frames else "the frame before it ends at"
            report.problems.append(
                f"at byte {position}: the frame starts at offset {frame.base_offset}, but {said} {expected}: frames are"
                " missing, or the file is not where it belongs; restore it from a backup"
            )
        if report.frames and frame.epoch < report.frames[-1].epoch:
            report.problems.append(
                f"at byte {position}: the frame was written by start {frame.epoch} of a server, after start"
                f" {report.frames[-1].epoch}: two servers wrote this file; restore it from a backup"
            )
        if frame.problem is not None:
            report.problems.append(f"at byte {position}, offset {frame.base_offset}: {frame.problem}; {_REMEDY}")
        report.frames.append(frame)
        report.rows += frame.rows
        # A damaged body may lie about itself.
        expected = frame.base_offset + frame.rows if frame.problem is None else None
        position += frame.bytes
    if report.frames:
        last = report.frames[-1]
        report.base_offset, report.end_offset = report.frames[0].base_offset, last.base_offset + last.rows
    return report


def _next_frame(buffer: pa.Buffer, position: int) -> int:
    """Where the next frame with a good header begins after this byte; the end when there is none."""
    from lakehead.format.frame import ALIGNMENT, HEADER_BYTES, MAGIC, decode_header

    data = buffer.slice(position).to_pybytes()
    at = 0
    while (at := data.find(MAGIC, at + 1)) > 0:
        if at % ALIGNMENT == 0:
            with suppress(CorruptionError):
                decode_header(buffer.slice(position + at, min(HEADER_BYTES, len(data) - at)))
                return position + at
    return buffer.size


def _frame_at(buffer: pa.Buffer, position: int) -> FrameReport:
    import crc32c

    from lakehead.format.frame import CHANGES, COMPRESSED, HEADER_BYTES, decode_body_unchecked, decode_header

    header = decode_header(buffer.slice(position, min(HEADER_BYTES, buffer.size - position)))
    if position + header.length > buffer.size:
        raise CorruptionError(
            f"a frame of {header.length} bytes from offset {header.base_offset} is cut off after"
            f" {buffer.size - position} bytes"
        )
    body_buffer = buffer.slice(position + HEADER_BYTES, header.length - HEADER_BYTES)
    problem = None if crc32c.crc32c(body_buffer) == header.crc else "the rows do not match their checksum"
    try:
        body = decode_body_unchecked(body_buffer, header.crc)
    except CorruptionError as e:
        raise CorruptionError(f"the frame from offset {header.base_offset} is damaged: {e}") from e
    return FrameReport(
        position=position,
        bytes=header.length,
        base_offset=header.base_offset,
        rows=body.row_count,
        timestamp=time_text(header.timestamp_us),
        schema_id=body.schema_id,
        kind="changes" if body.flags & CHANGES else "append",
        compressed=bool(body.flags & COMPRESSED),
        writer_id=body.stamp.writer_id.hex(),
        sequence=body.stamp.sequence,
        epoch=header.epoch,
        synced_end=header.synced_end,
        checksum="ok" if problem is None else "bad",
        problem=problem,
    )


def _unread(buffer: pa.Buffer, start: int, end: int, error: CorruptionError) -> str:
    data = buffer.slice(start, end - start).to_pybytes()
    why = str(error)
    if not data.strip(b"\0"):
        why = "they are all zero, as after a power cut before the data reached the disk"
    if end < buffer.size:
        return (
            f"at byte {start}: {len(data)} bytes form no frame: {why}; whole frames follow at byte {end}, so {_REMEDY}"
        )
    return (
        f"at byte {start}: the last {len(data)} bytes form no frame: {why}. When this is the newest segment, opening"
        " the table cuts a tail that was never acknowledged and refuses anything worse"
    )


def segment(
    session: Session,
    path: Annotated[str, typer.Argument(metavar="PATH", help="A .log file under DATA/tables.")],
    limit: Annotated[int, typer.Option(help="In text: show so many frames from each end.", min=1)] = 20,
) -> None:
    """List and check the frames of a log segment.

    Changes nothing and needs no lock. Exit code 5 when the file is damaged.
    """
    report = read_segment(path)
    if session.json:
        write_json(asdict(report))
    else:
        _write_text(report, limit)
    require_whole(path, report.problems)


def _write_text(report: SegmentReport, limit: int) -> None:
    columns = ["byte", "bytes", "offset", "rows", "time (UTC)", "kind", "schema", "writer", "sequence", "checksum"]
    last = len(report.frames) - limit
    shown = [f for i, f in enumerate(report.frames) if i < limit or i >= last or f.problem]
    if shown:
        write_table(columns, [_cells(f) for f in shown])
    if len(shown) < len(report.frames):
        write_line(f"{len(report.frames) - len(shown)} frames between are not shown; -o json lists all")
    frames = count_text(len(report.frames), "frame")
    offsets = f", offsets [{report.base_offset}, {report.end_offset})" if report.frames else ""
    write_line(f"{report.path}: {report.bytes} bytes, {frames}, {count_text(report.rows, 'row')}{offsets}")
    for problem in report.problems:
        write_line(f"problem {problem}")
    if not report.problems:
        write_line("all checksums match")


def _cells(frame: FrameReport) -> list[Any]:
    time = frame.timestamp.replace("+00:00", "").replace("T", " ")
    kind = frame.kind + (" (compressed)" if frame.compressed else "")
    head = [frame.position, frame.bytes, frame.base_offset, frame.rows, time, kind, frame.schema_id]
    return [*head, frame.writer_id[:8], frame.sequence, frame.checksum]
