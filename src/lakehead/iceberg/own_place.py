"""Where a lake table's files may lie, and which of them may be removed.

A lake beside its data is copied with its folder, so all of it has to lie there: a copy whose lake names files elsewhere
would have them in common with the original, and remove what that one still needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pyiceberg.table import TableProperties
from sqlalchemy import URL

from lakehead.errors import InvalidUriError, LakeStateError
from lakehead.iceberg.open_catalog import is_rest
from lakehead.lake.marks import COLLECTED, TABLE_ID

if TYPE_CHECKING:
    from pyiceberg.table import Table

NOT_IN_ADDRESSES = "%?#\t\n\r"
"""Where one of these stands, libraries differ in what an address leads to, or cut it off there."""
SCHEMES = ("file://", "file:", "")
"""How addresses of local files begin; the first as they are written here."""
_FILE = "catalog.db"
_PLACES = (TableProperties.WRITE_DATA_PATH, TableProperties.WRITE_METADATA_PATH)


def local_path(address: str) -> str:
    """The path of a local file's address, however it is spelled."""
    for scheme in SCHEMES[:2]:
        if address.startswith(scheme):
            return address[len(scheme) :]
    return address


def catalog_beside(data_dir: str) -> dict[str, str]:
    """The properties of the catalog that lies beside the data.

    Raises:
        InvalidUriError: addresses of files cannot hold the folder's path.
    """
    if bad := [c for c in NOT_IN_ADDRESSES if c in data_dir]:
        raise InvalidUriError(
            f"the data folder {data_dir!r} has {bad[0]!r} in its path, which lake file addresses cannot hold: move it",
            path=data_dir,
        )
    folder = os.path.join(data_dir, "lake")
    return {"type": "sql", "uri": _uri(folder), "warehouse": f"{SCHEMES[0]}{folder}"}


def lake_beside(catalog: Mapping[str, str]) -> str | None:
    """The lake folder of a catalog that lies beside the data; None of a catalog elsewhere."""
    folder = catalog.get("warehouse", "").removeprefix(SCHEMES[0])
    return folder if os.path.isabs(folder) and catalog.get("uri") == _uri(folder) else None


def _uri(folder: str) -> str:
    return URL.create("sqlite", database=os.path.join(folder, _FILE)).render_as_string(hide_password=False)


def lies_in(address: str, folder: str) -> bool:
    """Whether a local address is one of a file in a folder."""
    path = local_path(address)
    return path.startswith(f"{folder}/") and ".." not in path.split("/")


def require_own_place(table: Table) -> None:
    """Return when the files of a lake that lies beside its data are written there.

    Raises:
        LakeStateError: another engine has had them written elsewhere.
    """
    folder = lake_beside(table.catalog.properties)
    if folder is None:
        return
    places = {"its location": table.location()}
    places |= {f"property {key!r}": table.properties[key] for key in _PLACES if key in table.properties}
    for what, address in places.items():
        if not lies_in(address, folder):
            name = ".".join(table.name())
            raise LakeStateError(
                f"{what} of lake table {name} leads to {address}, out of the data folder, whose copies would share and"
                f" remove those files: another engine has set it, so remove it, or set it to a place in {folder}; for a"
                " lake elsewhere give lake=",
                table=name,
                address=address,
            )


def require_collectable(table: Table) -> None:
    """Return when nobody else may need files that the table does not name any more.

    Raises:
        LakeStateError: the table says that others may.
    """
    said = table.properties.get(COLLECTED)
    if said is not None and said.strip().lower() != "true":
        name = ".".join(table.name())
        raise LakeStateError(
            f"lake table {name} says {COLLECTED}={said}: other tables may share its files, so none is removed; set"
            " it to true, or remove it, once none does",
            table=name,
            name=COLLECTED,
        )


def require_own_folder(table: Table) -> None:
    """Return when all that lies in a table's folder is the table's, as Lakehead chose it, or a catalog's server.

    Raises:
        LakeStateError: another engine has had the table's files written to a folder of its choice.
    """
    own, chosen = table.properties.get(TABLE_ID, ""), "://" in table.catalog.properties.get("warehouse", "")
    if chosen and not is_rest(table.catalog) and not (own and table.location().rstrip("/").endswith(f"-{own}")):
        name = ".".join(table.name())
        raise LakeStateError(
            f"lake table {name} lies at {table.location()}, where another engine has put it, and others' files may lie"
            " there, too: set its location back, or remove orphans with that engine",
            table=name,
        )


def removable(table: Table, addresses: Iterable[str]) -> list[str]:
    """Of files that nothing names any more those that may go: of a lake beside its data, what lies there."""
    folder = lake_beside(table.catalog.properties)
    return [address for address in addresses if folder is None or lies_in(address, folder)]
