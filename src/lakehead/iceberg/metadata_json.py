"""A metadata file's bytes, of which only what is new since the last is made.

Most of one is its snapshots and their log. A commit adds one entry to each: JSON of the others stays as it was.
"""

from __future__ import annotations

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import IcebergBaseModel
from pyiceberg.utils.config import Config

from lakehead.env.place import require_working_folder
from lakehead.env.recently_used import RecentlyUsed

_PIECE = 32
"""Entries whose JSON is one piece: that of the last, which is not full, is made anew."""
_LISTS = {"snapshots": "snapshots", "snapshot_log": "snapshot-log"}
"""What grows with commits: PyIceberg's names, and the format's."""

_known: RecentlyUsed[tuple[str, str], tuple[list[IcebergBaseModel], list[bytes]]] = RecentlyUsed(256)
"""By a table's id and a list's name, the entries of the version that was written last, and the pieces of their JSON."""


def metadata_json(metadata: TableMetadata) -> list[bytes]:
    """In pieces, what ``metadata.model_dump_json()`` says, with the lists that grow at its end."""
    require_working_folder("PyIceberg")  # where its configuration may be
    # As PyIceberg does: with this setting a table without a snapshot says so with -1.
    exclude_none = not Config().get_bool("legacy-current-snapshot-id")
    head = metadata.model_dump_json(exclude=set(_LISTS), exclude_none=exclude_none)
    pieces = [head[:-1].encode()]
    for field, name in _LISTS.items():
        pieces += (f',"{name}":['.encode(), *_pieces(metadata, field), b"]")
    return [*pieces, b"}"]


def _pieces(metadata: TableMetadata, field: str) -> list[bytes]:
    entries: list[IcebergBaseModel] = getattr(metadata, field)
    key = (str(metadata.table_uuid), field)
    written, pieces = _known.get(key) or ([], [])
    # Those that stayed are the same objects: that is soon told.
    full = len(written) // _PIECE if entries[: len(written)] == written else 0
    pieces = pieces[:full]
    for start in range(full * _PIECE, len(entries), _PIECE):
        text = ",".join(entry.model_dump_json() for entry in entries[start : start + _PIECE])
        pieces.append(f"{',' if start else ''}{text}".encode())
    _known.note(key, (entries, pieces))
    return pieces
