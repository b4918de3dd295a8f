"""Named points in the life of a process, at which it can be killed, stopped or lied to.

They wrap seams of the product (files, the metadata store, the lake's catalog, requests) inside a child process, before
anything of it runs: the product has no hooks. What is to happen is read from a plan file each time a point is reached,
so that a process can be armed before it starts or while it runs, and forked ones share the plan. Taking the plan is
renaming it: one process dies, once, and the file that stays tells where.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PLAN_VARIABLE = "LAKEHEAD_CRASH_PLAN"
"""Environment variable with the path of the plan file."""
REACHED = ".reached"
"""Suffix of a plan that was carried out."""

_WRITE_STEPS = (
    "create.before", "create.after", "append.before", "append.torn", "append.after", "sync.before", "sync.after",
)  # fmt: skip
SEGMENT = tuple(f"segment.{step}" for step in _WRITE_STEPS)
CHECKPOINT = tuple(f"checkpoint.{step}" for step in (*_WRITE_STEPS, "rename.before", "rename.after"))
TRIM = (
    "maintain.before", "maintain.after", "log-start.create.before", "log-start.create.after",
    "log-start.rename.before", "log-start.rename.after", "segment.remove.before", "segment.remove.after",
    "checkpoint.remove.before", "checkpoint.remove.after",
)  # fmt: skip
REQUESTS = ("metadata.commit.before", "metadata.commit.after", "answer.Write", "answer.OpenWriter")
CREATE_AND_DROP = (
    "catalog.create.before", "catalog.create.after", "answer.CreateTable", "folder.make.before", "folder.make.after",
    "catalog.drop.before", "catalog.drop.after", "folder.remove.before", "folder.remove.half", "folder.remove.after",
    "answer.DropTable",
)  # fmt: skip
STOP = (
    "stop.before", "stop-record.write.before", "stop-record.write.torn", "stop-record.write.tmp",
    "stop-record.write.after",
)  # fmt: skip
RECOVERY = ("recovery.begin", "recovery.segment.sync.before", "recovery.segment.sync.after", "recovery.end")
RECOVERY_AFTER = {
    "recovery.segment.truncate.before": "segment.append.torn",
    "recovery.segment.truncate.after": "segment.append.torn",
    "recovery.checkpoint.remove.before": "checkpoint.append.torn",
    "recovery.checkpoint.remove.after": "checkpoint.append.torn",
    "recovery.segment.remove.before": "segment.remove.before",
    "recovery.segment.remove.after": "segment.remove.before",
}
"""Points of a recovery that has something to clean up: killed there first, then in the recovery from it."""
ROUND = (
    "round.watermarks", "round.read", "lake.data.open", "lake.data.closed", "lake.deletes.open", "lake.deletes.closed",
    "lake.manifest.open", "lake.manifest.closed", "lake.manifest-list.open", "lake.manifest-list.closed",
    "catalog.commit.before", "lake.metadata.open", "lake.metadata.closed", "catalog.commit.after", "round.done",
)  # fmt: skip
WORKER = ("round.read", "lake.data.open", "lake.data.closed")
COMPACTION = tuple(
    f"compact.{step}"
    for step in (
        "begin", "lake.data.open", "lake.data.closed", "lake.stage.before", "lake.manifest.open",
        "lake.manifest.closed", "lake.manifest-list.open", "lake.manifest-list.closed", "lake.metadata.open",
        "lake.metadata.closed", "lake.stage.after", "catalog.commit.before", "catalog.commit.after", "done",
    )
)  # fmt: skip
EXPIRY = tuple(
    f"expire.{step}"
    for step in (
        "begin", "lake.metadata.open", "lake.metadata.closed", "catalog.commit.before", "catalog.commit.after",
        "lake.remove.before", "lake.remove.after", "done",
    )
)  # fmt: skip
"""What stands between the list's commit and ``done`` is the removal of files, one after the other."""
CLEAN_UP_AFTER = {
    "orphans.catalog.commit.before": "compact.lake.manifest-list.closed",
    "orphans.catalog.commit.after": "compact.catalog.commit.before",
    "orphans.done": "expire.catalog.commit.after",
}
"""Points of a removal of orphans that finds some: what left them is killed first."""
_IN_FORCE = ("tablet.alter.before", "tablet.alter.after")
ALTER = (
    "command.AlterTable.before", "command.AlterTable.after", *_IN_FORCE, "follow.schema.before", "follow.schema.after",
    "answer.AlterTable",
)  # fmt: skip
"""The catalog's command decides, the tablets take it over one after the other, the lake follows with a commit."""
RENAME = (
    "command.RenameTables.before", "command.RenameTables.after", *_IN_FORCE, "follow.name.before", "follow.name.after",
    "answer.RenameTable",
)  # fmt: skip
TRUNCATE = (
    "tablet.seal.before", "tablet.seal.after", "command.TruncateTable.before", "command.TruncateTable.after",
    "tablet.truncate.before", "tablet.truncate.after", "command.EndTruncation.before", "command.EndTruncation.after",
    "answer.Truncate",
)  # fmt: skip
TRUNCATE_LOG = ("segment.append.before", "segment.append.torn", "segment.append.after")
"""Of a keyed table, whose tablets log each row's deletion; nobody else writes."""
TRUNCATE_LAKE = tuple(
    f"truncate.{step}"
    for step in (
        "begin", "lake.manifest-list.open", "lake.manifest-list.closed", "lake.metadata.closed",
        "catalog.commit.before", "catalog.commit.after", "done",
    )
)  # fmt: skip
"""Of a log table with a lake: the server notes the ends, who asks empties the lake, the server cuts the logs."""
STAGE = ("staged.write.before", "staged.write.torn", "staged.write.after", "answer.Stage")
PUBLISH = (
    "command.BeginPublication.before", "command.BeginPublication.after", "segment.append.before",
    "segment.append.torn", "segment.append.after", "command.EndPublication.before", "command.EndPublication.after",
    "folder.remove.before", "folder.remove.half", "folder.remove.after", "answer.Publish",
)  # fmt: skip
"""What a job has staged is written to the tablets, and then removed."""
OVERWRITE_LOG = (
    "checkpoint.append.torn", "log-start.rename.before", "log-start.rename.after", "segment.remove.before",
    "segment.remove.after",
)  # fmt: skip
"""Of a log table alone."""
OVERWRITE = (
    *PUBLISH, "tablet.seal.before", "tablet.seal.after", "tablet.truncate.before", "tablet.truncate.after",
    *OVERWRITE_LOG, "command.EndTruncation.before", "command.EndTruncation.after",
)  # fmt: skip
"""What a job has staged takes the place of what the same partitions had: their tablets are sealed before it is decided,
truncated as they take it, and cut."""
PUBLISHER = ("stage.before", "stage.after", "publish.before", "publish.after")
"""Of who stages and publishes: around a piece, and around the request that decides."""
JOB = ("round.read", "lake.data.closed", "catalog.commit.before", "catalog.commit.after")
MAINTENANCE_ROUNDS = 3
"""After so many rounds the tiering service does maintenance here."""
SNAPSHOTS_KEPT = 4
"""By its expiry, here."""

_recovering = threading.local()


class LostAnswerError(OSError):
    """What a caller sees when the answer of a catalog is lost."""


class Points:
    """Reads the plan at each point and carries it out."""

    def __init__(self, plan: str) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._armed = ""
        self._seen = 0
        self._doing = ""

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """While the process does this, in whatever thread, the names of its points begin with it."""
        self.reach(f"{what}.begin")
        self._doing = f"{what}."
        try:
            yield
        finally:
            self._doing = ""
        self.reach(f"{what}.done")

    def reach(self, name: str, last: Callable[[], object] | None = None) -> None:
        """Carry out the plan if it names this point; ``last`` is done first, if the process is to die."""
        try:
            with open(self._plan) as f:
                text = f.read()
        except FileNotFoundError:
            return
        plan = json.loads(text) if text else {}
        if plan.get("point") != self._doing + name:
            return
        with self._lock:
            if text != self._armed:
                self._armed, self._seen = text, 0
            self._seen += 1
            if self._seen < plan["nth"]:
                return
            try:
                os.rename(self._plan, self._plan + REACHED)
            except FileNotFoundError:
                return
        if plan["action"] == "lose":
            raise LostAnswerError(f"the answer was lost at {name}")
        if plan["action"] == "kill" and last is not None:
            last()
        if plan["action"] != "report":
            # To this very thread, which must not take another step: a process-wide signal may reach another first.
            signal.pthread_kill(threading.get_ident(), signal.SIGKILL if plan["action"] == "kill" else signal.SIGSTOP)

    def around(self, owner: Any, method: str, name: str) -> None:
        """Points ``name.before`` and ``name.after`` around a method."""
        original = getattr(owner, method)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.reach(f"{name}.before")
            result = original(*args, **kwargs)
            self.reach(f"{name}.after")
            return result

        setattr(owner, method, wrapped)


def install(plan: str) -> None:
    """Put all points into this process; modules are wrapped when they are first imported."""
    points = Points(plan)
    _wrap_metadata(points)
    sys.meta_path.insert(
        0,
        _AfterImport(
            {
                "lakehead.env.storage": functools.partial(_wrap_storage, points),
                "lakehead.log.tablet": functools.partial(_wrap_log, points),
                "lakehead.server.metadata": functools.partial(_wrap_commands, points),
                "lakehead.server.tablet": functools.partial(_wrap_tablet, points),
                "lakehead.server.service": functools.partial(_wrap_service, points),
                "lakehead.server.maintenance": lambda m: points.around(m.Maintenance, "run", "maintain"),
                "lakehead.client.staging": functools.partial(_wrap_staging, points),
                "lakehead.client.remote_log": functools.partial(_wrap_client, points),
                "lakehead.iceberg.file_io": functools.partial(_wrap_lake_files, points),
                "lakehead.iceberg.staging": lambda m: points.around(m, "swap_metadata", "catalog.commit"),
                "lakehead.iceberg.iceberg_table": lambda m: points.around(m.IcebergLakeTable, "stage", "lake.stage"),
                "lakehead.iceberg.orphans": functools.partial(_wrap_task, points, "remove_orphans", "orphans"),
                "lakehead.tiering.round": functools.partial(_wrap_round, points),
                "lakehead.tiering.compaction": functools.partial(_wrap_task, points, "compact", "compact"),
                "lakehead.tiering.expiry": functools.partial(_wrap_task, points, "expire", "expire"),
                "lakehead.tiering.truncation": functools.partial(_wrap_task, points, "empty_lake", "truncate"),
                "lakehead.tiering.expiry_plan": _keep_few_snapshots,
                "lakehead.tiering.queue": _maintain_often,
                "pyiceberg.catalog.sql": functools.partial(_wrap_catalog, points),
            }
        ),
    )


class _AfterImport(MetaPathFinder):
    """Has something done with modules right after they were imported."""

    def __init__(self, patches: dict[str, Callable[[ModuleType], None]]) -> None:
        self._patches = patches

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        patch = self._patches.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None, f"{name} is gone: its points must move"
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def die_with_parent() -> None:
    """Leave nothing running when the suite itself is killed (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


# ---- files --------------------------------------------------------------------------------------------------------


def _point_of(path: str) -> str:
    """The kind of a file, as the first part of its points' names."""
    name = os.path.basename(path).removesuffix(".tmp")
    kind = {"log": "segment", "checkpoint": "checkpoint", "start": "log-start"}.get(name.rpartition(".")[2], "file")
    kind = "stop-record" if name == "stopped.json" else kind
    kind = "staged" if "/staged/" in path else kind
    return f"recovery.{kind}" if getattr(_recovering, "active", False) else kind


def _wrap_storage(points: Points, storage: ModuleType) -> None:
    log, local = storage.LocalLogFile, storage.LocalStorage
    append, open_log, write_atomic, remove_tree = log.append, local.open_log, local.write_atomic, local.remove_tree

    def torn_append(self: Any, parts: Sequence[Any]) -> None:
        kind = _point_of(self.path)
        points.reach(f"{kind}.append.before")
        points.reach(f"{kind}.append.torn", lambda: _append_torn(self.path, list(map(bytes, parts))))
        append(self, parts)
        points.reach(f"{kind}.append.after")

    def open_named(self: Any, path: str) -> Any:
        if os.path.exists(path):
            return open_log(self, path)
        kind = _point_of(path)
        points.reach(f"{kind}.create.before")
        file = open_log(self, path)
        points.reach(f"{kind}.create.after")
        return file

    def torn_write(self: Any, path: str, data: bytes) -> None:
        kind, temporary = _point_of(path), f"{path}.tmp"
        points.reach(f"{kind}.write.before")
        points.reach(f"{kind}.write.torn", lambda: _write(temporary, data, "wb"))
        points.reach(f"{kind}.write.tmp", lambda: _write(temporary, data * 2, "wb"))
        write_atomic(self, path, data)
        points.reach(f"{kind}.write.after")

    def half_remove(self: Any, path: str) -> None:
        points.reach("folder.remove.before")
        points.reach("folder.remove.half", lambda: _remove_half(path))
        remove_tree(self, path)
        points.reach("folder.remove.after")

    log.append, local.open_log, local.write_atomic, local.remove_tree = torn_append, open_named, torn_write, half_remove
    _around_path(points, log, "sync", lambda self: self.path)
    _around_path(points, log, "truncate", lambda self, size: self.path)
    _around_path(points, local, "remove", lambda self, path: path)
    _around_path(points, local, "rename", lambda self, path, to: to)
    points.around(local, "make_folder", "folder.make")


def _around_path(points: Points, owner: Any, method: str, path_of: Callable[..., str]) -> None:
    original = getattr(owner, method)

    @functools.wraps(original)
    def wrapped(*args: Any) -> Any:
        kind = _point_of(path_of(*args))
        points.reach(f"{kind}.{method}.before")
        result = original(*args)
        points.reach(f"{kind}.{method}.after")
        return result

    setattr(owner, method, wrapped)


def _append_torn(path: str, parts: list[bytes]) -> None:
    """All but the second half of the last part: half of all may be whole frames, after which nothing is torn."""
    with open(path, "ab") as f:
        f.write(b"".join(parts[:-1]) + parts[-1][: len(parts[-1]) // 2])


def _write(path: str, data: bytes, mode: str) -> None:
    """The first half of the bytes, as far as the kernel."""
    with open(path, mode) as f:
        f.write(data[: max(len(data) // 2, 1)])


def _remove_half(path: str) -> None:
    files = sorted(os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    for name in files[: (len(files) + 1) // 2]:
        os.unlink(name)


def _wrap_log(points: Points, module: ModuleType) -> None:
    tablet = module.LogTablet
    init = tablet.__init__

    def recovering(self: Any, *args: Any, **kwargs: Any) -> None:
        points.reach("recovery.begin")
        _recovering.active = True
        try:
            init(self, *args, **kwargs)
        finally:
            _recovering.active = False
        points.reach("recovery.end")

    tablet.__init__ = recovering


# ---- server -------------------------------------------------------------------------------------------------------


class _PointedConnection(sqlite3.Connection):
    points: Points

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if sql != "commit":
            return super().execute(sql, *args)
        self.points.reach("metadata.commit.before")
        result = super().execute(sql, *args)
        self.points.reach("metadata.commit.after")
        return result


def _wrap_metadata(points: Points) -> None:
    connect = sqlite3.connect
    _PointedConnection.points = points

    def pointed(database: Any, *args: Any, **kwargs: Any) -> sqlite3.Connection:
        if str(database).endswith("metadata.db"):
            kwargs["factory"] = _PointedConnection
        made: sqlite3.Connection = connect(database, *args, **kwargs)
        return made

    # SQLAlchemy, and so the lake's catalog, goes by sqlite3.dbapi2.
    sqlite3.connect = pointed  # type: ignore[assignment]


def _wrap_commands(points: Points, module: ModuleType) -> None:
    store = module.MetadataStore
    submit_all = store.submit_all

    def named(self: Any, commands: Any, **how: Any) -> Any:
        names = dict.fromkeys(f"command.{type(command).__name__}" for command in commands)
        for name in names:
            points.reach(f"{name}.before")
        planned = submit_all(self, commands, **how)
        for name in names:
            points.reach(f"{name}.after")
        return planned

    store.submit_all = named


def _wrap_tablet(points: Points, module: ModuleType) -> None:
    for method in ("alter", "seal", "truncate"):
        points.around(module.Tablet, method, f"tablet.{method}")


def _wrap_service(points: Points, module: ModuleType) -> None:
    service = module.Service
    call = service.call

    def answered(self: Any, request: Any, attachments: Any, caller: Any) -> Any:
        answer = call(self, request, attachments, caller)
        points.reach(f"answer.{type(request).__name__}")
        return answer

    service.call = answered
    points.around(service, "close", "stop")


# ---- rounds -------------------------------------------------------------------------------------------------------


def _wrap_client(points: Points, module: ModuleType) -> None:
    client = module.RemoteLog
    watermarks, read = client.watermarks, client.read

    def watermarked(self: Any) -> Any:
        result = watermarks(self)
        points.reach("round.watermarks")
        return result

    def reading(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for batch in read(self, *args, **kwargs):
            points.reach("round.read")
            yield batch

    client.watermarks, client.read = watermarked, reading


def _wrap_staging(points: Points, module: ModuleType) -> None:
    points.around(module.Staging, "send", "stage")
    points.around(module, "publish_together", "publish")


def _lake_kind(path: str) -> str:
    name = os.path.basename(path)
    if name.endswith(".parquet"):
        return "lake.deletes" if name.endswith("-deletes.parquet") else "lake.data"
    if name.endswith(".avro"):
        return "lake.manifest-list" if name.startswith("snap-") else "lake.manifest"
    return "lake.metadata"


def _wrap_lake_files(points: Points, module: ModuleType) -> None:
    io, stream = module.SyncedFileIO, module._SyncedStream
    new_output, close, delete = io.new_output, stream.close, io.delete

    def opened(self: Any, location: str) -> Any:
        points.reach(f"{_lake_kind(location)}.open")
        return new_output(self, location)

    def closed(self: Any) -> None:
        again = self.closed
        close(self)
        if not again:
            points.reach(f"{_lake_kind(self._synced_path)}.closed")

    def removed(self: Any, location: Any) -> None:
        # The catalog removes old metadata files with each commit.
        name = "lake.metadata.remove" if _lake_kind(str(location)) == "lake.metadata" else "lake.remove"
        points.reach(f"{name}.before")
        delete(self, location)
        points.reach(f"{name}.after")

    io.new_output, stream.close, io.delete = opened, closed, removed


def _wrap_round(points: Points, module: ModuleType) -> None:
    run_round = module.run_round

    @functools.wraps(run_round)
    def reported(*args: Any, **kwargs: Any) -> Any:
        result = run_round(*args, **kwargs)
        points.reach("round.done")
        return result

    module.run_round = reported  # type: ignore[attr-defined]


def _wrap_task(points: Points, function: str, what: str, module: ModuleType) -> None:
    original = getattr(module, function)

    @functools.wraps(original)
    def named(*args: Any, **kwargs: Any) -> Any:
        with points.doing(what):
            return original(*args, **kwargs)

    setattr(module, function, named)


def _keep_few_snapshots(module: ModuleType) -> None:
    module.USUAL = module.Retention(keep=SNAPSHOTS_KEPT, older_than_us=0)  # type: ignore[attr-defined]


def _maintain_often(module: ModuleType) -> None:
    module.TieringQueue.__init__.__kwdefaults__["maintenance_rounds"] = MAINTENANCE_ROUNDS


def _wrap_catalog(points: Points, module: ModuleType) -> None:
    points.around(module.SqlCatalog, "create_table", "catalog.create")
    points.around(module.SqlCatalog, "drop_table", "catalog.drop")
    # Rounds commit by themselves: this is how a lake follows its table.
    points.around(module.SqlCatalog, "commit_table", "follow.schema")
    points.around(module.SqlCatalog, "rename_table", "follow.name")
