"""Incarnations: each start of a folder's owner is one, with a number that only grows; a copy begins a new folder.

Whoever opens a folder cannot ask the one it was copied from. So what lies at another place than where it was last
served, and was not just renamed, is taken for a copy: it gets a folder id of its own, and the starts before count as
inherited. What those own outside the folder is then not this folder's.
"""

from __future__ import annotations

import sqlite3

from lakehead.env.place import Place
from lakehead.env.randomness import Randomness
from lakehead.types import Incarnation


def unfenced() -> None:
    """The fence of a folder that can have no other owner."""


def begin_incarnation(db: sqlite3.Connection, place: Place | None, randomness: Randomness) -> Incarnation:
    """Note one more start in a transaction that is open.

    Args:
        place: where the folder lies now; None leaves open whether it is a copy.
    """
    meta: dict[str, str] = dict(db.execute("select name, value from meta"))
    folder_id = meta.get("folder_id") or randomness.uuid_hex()
    if place is not None and _was_copied(meta.get("place"), place):
        folder_id = randomness.uuid_hex()
        disown(db)
    number = int(meta.get("incarnation", "0")) + 1
    made = Incarnation(folder_id, number, randomness.uuid_hex())
    _note(db, "folder_id", folder_id)
    _note(db, "incarnation", str(number))
    if place is not None:
        _note(db, "place", place.to_json())
    db.execute("insert into incarnations values (?, 1)", (str(made),))
    return made


def disown(db: sqlite3.Connection) -> None:
    """Make what lies in a metadata file a copy: its next start begins a new folder, and those before are inherited."""
    db.execute("update incarnations set own = 0")
    db.execute("insert or replace into meta values ('place', '')")


def _was_copied(stored: str | None, place: Place) -> bool:
    """Folders of formats 1 and 2 do not say where they were."""
    if stored is None:
        return False
    former = Place.from_json(stored)
    return former is None or place.is_copy_of(former)


def _note(db: sqlite3.Connection, name: str, value: str) -> None:
    db.execute("insert or replace into meta values (?, ?)", (name, value))
