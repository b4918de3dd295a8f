"""The classes that Spark's JVM loads, kept as they are in memory: to read and check them anew is two fifths of the
JVM's work for a session's first answer.

It is Java's class data sharing (JEP 350, "Dynamic CDS Archives"). A JVM takes no class from an archive of another Java
or of other jars, and does without where it cannot map one; one that was cut short would end it, so the name of an
archive tells how long it is.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import os
import stat
import subprocess
import sys
import tempfile

from lakehead.env.own_folders import own_folders
from lakehead.errors import MissingDependencyError, StorageError
from lakehead.spark.java import Java, find_java

_SECONDS_MAX = 600
_TRAINING = """
import sys
import pyarrow as pa
from pyspark import SparkContext
import lakehead as lh, lakehead.spark as lhs
from lakehead.spark import class_archive

class_archive.options = lambda java: ()  # a JVM that makes an archive takes none
folder = sys.argv[1]
with lh.connect(f"{folder}/data") as con:
    rows = pa.table({"id": [1, 2, 3], "v": ["a", "b", None]})
    for name, how in (("log", {}), ("keyed", {"primary_key": "id"})):
        table = con.create_table(f"a.{name}", rows.schema, lake="iceberg", freshness="200ms", **how)
        table.append(rows) if name == "log" else table.upsert(rows)
    spark = lhs.session(con, master="local[2]")
    rounds = []
    lhs.tiering_service(spark, con, on_round=rounds.append).run(lambda: bool(rounds))
    con.table("a.keyed").upsert(rows.slice(0, 1))
    assert lhs.table(spark, "a.keyed").where("id > 1").count() == 2
    lhs.sql(spark, "select v, count(*), sum(id) from a.keyed join a.log using (id, v) group by v order by v").collect()
    at = {"uri": con.uri}
    batch = spark.read.format("lakehead").options(**at, table="a.log").load()
    batch.write.format("lakehead").options(**at, table="a.log").mode("append").save()
    stream = spark.readStream.format("lakehead").options(**at, table="a.log", start="full").load()
    query = stream.writeStream.format("lakehead").options(**at, table="a.copy", checkpointLocation=f"{folder}/1")
    query.trigger(availableNow=True).start().awaitTermination()
    lhs.pipeline(
        stream, lambda rows, out: out.append("a.piped", rows), checkpoint=f"{folder}/2", trigger="available now"
    ).awaitTermination()
    gateway = SparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()  # it writes the archive as it ends
"""
"""What is read, written and streamed to have the classes loaded that this takes."""


def options(java: Java) -> tuple[str, ...]:
    """What has a JVM of ours take the classes that were kept for this user; nothing where none were."""
    for place in own_folders("classes"):
        found = find(place.path, java)
        if found is not None and all(_is_own(path) for path in (os.path.dirname(place.path), place.path, found)):
            return (f'"-XX:SharedArchiveFile={found}"', "-Xlog:cds=off")
    return ()


def find(folder: str, java: Java) -> str | None:
    """The archive in a folder for this Java and the Spark that is installed; None where there is none that is whole."""
    for path in glob.glob(f"{glob.escape(folder)}/{_of_spark()}-{_of(java)}-*.jsa"):
        size = path.removesuffix(".jsa").rpartition("-")[2]
        if size.isdecimal() and os.path.getsize(path) == int(size):
            return path
    return None


def keep(folder: str | None = None) -> str:
    """Make the archive, in the place of older ones for the same Spark, unless it is there; returns where. That takes
    a minute, 200 MB, and a JVM that may listen on loopback, as each of Spark's does.

    Args:
        folder: where it goes; None: where `options` looks for it.

    Raises:
        MissingDependencyError: there is no Java that Spark takes, or it cannot make such archives.
        StorageError: there is no folder for it, or no room.
    """
    java = find_java()
    if folder is None:
        place = next(own_folders("classes"))
        place.keep_private("Spark's classes")
        folder = place.path
    folder = os.path.abspath(folder)
    if (found := find(folder, java)) is not None:
        return found
    try:
        # Where the archive goes, which is looked at before a minute is spent.
        with tempfile.TemporaryDirectory(prefix="making-", dir=folder) as work:
            made = _made(java, work)
            path = os.path.join(folder, f"{_of_spark()}-{_of(java)}-{os.path.getsize(made)}.jsa")
            os.chmod(made, 0o600)
            os.replace(made, path)
    except OSError as e:
        raise StorageError(f"cannot keep Spark's classes in {folder}: {e.strerror}", path=folder) from e
    for older in glob.glob(f"{glob.escape(folder)}/{_of_spark()}-*.jsa"):
        if older != path:
            os.unlink(older)
    return path


def _made(java: Java, work: str) -> str:
    """An archive in a folder for this alone."""
    made = os.path.join(work, "made.jsa")
    env = {k: v for k, v in os.environ.items() if k not in ("PYSPARK_SUBMIT_ARGS", "SPARK_CONF_DIR")}
    env["SPARK_SUBMIT_OPTS"] = f'"-XX:ArchiveClassesAtExit={made}" -Xlog:disable'
    command = [sys.executable, "-c", _TRAINING, work]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_SECONDS_MAX, check=False)
    except subprocess.TimeoutExpired as e:
        raise StorageError(f"Spark's classes were not there after {_SECONDS_MAX} seconds: try again") from e
    if done.returncode or not os.path.exists(made):
        told = "; ".join(line for line in done.stderr.splitlines() if line.strip())[-500:]
        raise MissingDependencyError(
            f"{java.executable} (Java {java.version}) keeps no classes, and Spark goes on without:"
            f" {told or 'it made no archive'}"
        )
    return made


def _jars() -> str:
    """The folder of those that are installed with PySpark."""
    spec = importlib.util.find_spec("pyspark")
    return os.path.join(os.path.dirname(spec.origin), "jars") if spec is not None and spec.origin else ""


def _of_spark() -> str:
    """Where Spark is installed."""
    return hashlib.sha256(_jars().encode()).hexdigest()[:12]


def _of(java: Java) -> str:
    """What an archive is made of: this Java, Spark's jars, and what was done to have classes loaded."""
    parts = os.path.join(java.home, "lib", "modules"), _jars()
    made = [os.stat(path).st_mtime_ns if os.path.exists(path) else 0 for path in parts]
    return hashlib.sha256(repr((java.home, made, _TRAINING)).encode()).hexdigest()[:12]


def _is_own(path: str) -> bool:
    """Whether nobody but this user can have written there: what is in it runs."""
    found = os.lstat(path)
    return found.st_uid == os.getuid() and not stat.S_ISLNK(found.st_mode) and not found.st_mode & 0o022
