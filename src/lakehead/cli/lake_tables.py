"""`lakehead inspect lake`: what the files of a lake table say, offline, without a catalog, changing nothing."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lakehead.cli.offline import mapped, require_whole
from lakehead.cli.output import count_text, write_json, write_line, write_table
from lakehead.cli.session import Session

if TYPE_CHECKING:
    from lakehead.iceberg.table_report import LakeTableReport


def lake(
    session: Session,
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="A lake table's folder, as in DATA/lake, or a .metadata.json file; file:// too."
        ),
    ],
    limit: Annotated[int, typer.Option(help="In text: show so many of the newest snapshots.", min=0)] = 20,
) -> None:
    """Explain a lake table: its columns, snapshots, how far each reaches, and files.

    Of a folder the newest metadata file is read; the catalog may name an older one.
    Changes nothing and needs no catalog. Exit code 5 when a file is gone or damaged.
    """
    from lakehead.iceberg.table_report import metadata_file, read_lake_table

    file = metadata_file(path)
    mapped(file, ".metadata.json")  # or the error of a file that cannot be read
    report = read_lake_table(file)
    if session.json:
        write_json(asdict(report))
    else:
        _write_text(report, limit)
    require_whole(path, report.problems)


def _write_text(report: LakeTableReport, limit: int) -> None:
    shown = report.snapshots[-limit:] if limit else []
    if shown:
        columns = ["snapshot", "time (UTC)", "operation", "added rows", "files", "delete files", "log offsets"]
        write_table(columns, [_cells(s) for s in shown])
    if len(shown) < len(report.snapshots):
        write_line(f"{len(report.snapshots) - len(shown)} older snapshots are not shown; -o json lists all")
    whose = f"table {report.table_id}" if report.table_id else "no table of Lakehead's"
    write_line(f"{report.path}: Iceberg format {report.format_version}, of {whose}, at {report.location}")
    write_line(f"columns: {', '.join(report.columns)}")
    if report.partition_by:
        write_line(f"partitioned by {', '.join(report.partition_by)}")
    if report.current_snapshot is None:
        write_line("no snapshot yet")
    else:
        write_line(
            f"current snapshot {report.current_snapshot}: {count_text(report.rows - report.deleted, 'live row')} in"
            f" {count_text(report.data_files, 'data file')}, {count_text(report.delete_files, 'delete file')},"
            f" {report.bytes} bytes"
        )
    for problem in report.problems:
        write_line(f"problem {problem}")
    if not report.problems:
        write_line("all its files are there")


def _cells(snapshot: dict[str, Any]) -> list[Any]:
    time = snapshot["committed_at"].isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "")
    head = [snapshot["snapshot_id"], time, snapshot["operation"], snapshot["added_rows"]]
    return [*head, snapshot["total_files"], snapshot["total_delete_files"], snapshot["offsets"]]
