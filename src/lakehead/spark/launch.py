"""Spark sessions set up for Lakehead: settings that measurements showed to matter, and a start without noise."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lakehead.api.connection import Connection
from lakehead.env.randomness import SystemRandomness
from lakehead.errors import LakeheadError, MissingDependencyError
from lakehead.spark import class_archive
from lakehead.spark.connections import (
    bind_session,
    opened,
    require_classic,
    require_reachable,
    tell_address,
    tell_workers,
)
from lakehead.spark.java import Java, find_java
from lakehead.spark.own_python import is_own_python, quick_python
from lakehead.spark.privacy import (
    LOOPBACK,
    Scratch,
    close_to_others,
    is_local,
    is_local_cluster,
    is_private,
    private_settings,
    tells_a_secret,
)

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

DEFAULT_MASTER = "local[2]"
_DAEMON = "spark.python.daemon.module"
STATIC_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
}
OUR_PYTHON_SETTINGS = {
    # A hop between the JVM and Python takes half the time of TCP on loopback. In folders of other machines, those of a
    # YARN container among them, a socket's path may be too long.
    "spark.python.unix.domain.socket.enabled": "true",
    # Executors on other machines, or of another Python, may get Lakehead by --py-files, which this starts before.
    _DAEMON: "lakehead.spark.daemon",
}
"""Where the driver starts the executors; the daemon's module, where they run its own Python."""
LOCAL_SETTINGS = {
    "spark.sql.shuffle.partitions": "8",
    # Listing files that are named one by one needs no Spark job.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "10000",
}
FIELD_IDS = "spark.sql.parquet.fieldId.read.enabled"
RUNTIME_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Lake columns are found by field id: a renamed one would silently be null by name.
    FIELD_IDS: "true",
    "spark.sql.timeType.enabled": "true",
}
_OF_THE_LAUNCHER = {"spark.app.name": "pyspark-shell", "spark.ui.showConsoleProgress": "true"}
"""What Spark's launcher sets where nobody has."""
_LOGGING = """
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} Spark %p %c{1}: %m%n%ex
"""


def require_pyspark() -> None:
    """Refuse when PySpark is missing.

    Raises:
        MissingDependencyError: the message says how to install it.
    """
    try:
        import pyspark  # noqa: F401
    except ImportError as e:
        raise MissingDependencyError("PySpark is not installed: pip install 'lakehead[spark]'") from e


_scratch: Scratch | None = None
_removes_scratch = False
_launched: dict[str, str] = {}
"""Of the JVM that this process started: where its files are, whether it removes them as it ends, and with what
settings, which outlive the session."""


def open_session(con_or_uri: Connection | str, conf: Mapping[str, Any], *, plans: bool = True) -> SparkSession:
    """See `lakehead.spark.session`; ``plans`` as of `attach_session`."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    if running is None and SparkContext._active_spark_context is not None:
        running = SparkSession.builder.getOrCreate()
    if running is not None:
        require_classic(running)
    if running is None or running.sparkContext._jsc is None:
        java = find_java()
    con = opened(con_or_uri)
    if running is not None and running.sparkContext._jsc is not None:
        return attach_session(running, con, _settable(running, given_settings(conf)), plans=plans)
    given = given_settings(conf)
    if "spark.master" in given:
        require_reachable(con, given["spark.master"])
    spark = _started(con, java, given)
    runtime = {k: v for k, v in given.items() if k in RUNTIME_SETTINGS}
    try:
        return attach_session(spark, con, runtime, plans=plans)
    except LakeheadError:
        spark.stop()
        raise


def _settable(running: SparkSession, given: Mapping[str, str]) -> dict[str, str]:
    """Of what a caller gave, what a session that runs can still be told; of the rest it is warned."""
    now = running.sparkContext.getConf()
    settable = {name: value for name, value in given.items() if running.conf.isModifiable(name)}
    late = [n for n, value in given.items() if n not in settable and now.get(n) != value and n != "spark.app.name"]
    if late:
        warnings.warn(
            f"the Spark session runs already, without {', '.join(f'{n}={given[n]}' for n in late)}: stop it first"
            " (spark.stop()), these are read when it begins",
            stacklevel=4,
        )
    return settable


def _started(con: Connection, java: Java, given: Mapping[str, str]) -> SparkSession:
    """A session whose settings are those given, those that Spark is configured with, and ours, in this order."""
    global _scratch, _removes_scratch
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    if _scratch is None:
        _scratch = Scratch.made()
        atexit.register(_remove, _scratch.folder, os.getpid())
    ours = SparkContext._gateway is None and "PYSPARK_GATEWAY_PORT" not in os.environ
    # What the JVM is started with stands in its arguments.
    launch = SparkConf(loadDefaults=False)
    for name, value in given.items():
        if not tells_a_secret(name):
            launch.set(name, value)
    with _launch_environment(java, _scratch.folder, launch.get("spark.master")):
        SparkContext._ensure_initialized(conf=launch)
        if ours:
            _launched.update({**dict(launch.getAll()), "spark.master": given.get("spark.master", DEFAULT_MASTER)})
        jvm = SparkContext._jvm
        assert jvm is not None
        jvm.org.apache.spark.util.ShutdownHookManager.registerShutdownDeleteDir(jvm.java.io.File(_scratch.folder))
        _removes_scratch = True
        conf = SparkConf()
        configured = {k: v for k, v in conf.getAll() if v != _launched.get(k, _OF_THE_LAUNCHER.get(k))}
        local_dirs = any(jvm.java.lang.System.getenv(name) for name in ("SPARK_EXECUTOR_DIRS", "SPARK_LOCAL_DIRS"))
        own = is_own_python(os.environ["PYSPARK_PYTHON"])
        settings = session_settings(configured, given, _scratch, has_local_dirs=local_dirs, own_python=own)
        for name, value in settings.items():
            conf.set(name, value)
        master = conf.get("spark.master", DEFAULT_MASTER)
        require_reachable(con, master)
        if is_local(master) and os.environ["PYSPARK_PYTHON"] == sys.executable:
            os.environ["PYSPARK_PYTHON"] = quick_python(_scratch.folder)
        context = SparkContext.getOrCreate(conf)
        if is_local(master):
            _write_no_checksums(context)
        if is_local_cluster(master):
            # Its executors have the folder in which Spark is installed for what they print.
            home = jvm.java.lang.System.getenv("SPARK_HOME") or "."
            close_to_others(os.path.join(home, "work"), context.applicationId)
        return SparkSession.builder.getOrCreate()


def _write_no_checksums(context: SparkContext) -> None:
    """Have files on local disks written without another one beside each, of its checksums: a process (``chmod``) is
    started for every file, which is what the offsets and the end of a small micro-batch take their time for."""
    jvm = context._jvm
    assert jvm is not None
    found = jvm.org.apache.hadoop.fs.FileSystem.get(jvm.java.net.URI("file:///"), context._jsc.hadoopConfiguration())
    if jvm.java.lang.Class.forName("org.apache.hadoop.fs.LocalFileSystem").isInstance(found):  # none is configured
        found.setWriteChecksum(False)


def _remove(folder: str, pid: int) -> None:
    """Remove what Spark's processes wrote, where no JVM does so as it ends, which it does after this process: it never
    came up, or was killed."""
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    removes = _removes_scratch and (process is None or process.poll() is None)
    if pid == os.getpid() and not removes:  # a forked child's copy is the parent's
        shutil.rmtree(folder, ignore_errors=True)


def attach_session(
    spark: SparkSession, con_or_uri: Connection | str, runtime: Mapping[str, str] | None = None, *, plans: bool = True
) -> SparkSession:
    """See `lakehead.spark.attach`; ``runtime`` overrides `RUNTIME_SETTINGS`, and ``plans`` is whether the data source
    is going to be used."""
    from lakehead.spark.checks import require_executors, require_planner
    from lakehead.spark.source import LakeheadDataSource

    require_classic(spark)
    con = opened(con_or_uri)
    configured = spark._jsparkSession.sessionState().conf()
    for name, value in RUNTIME_SETTINGS.items():
        if name == FIELD_IDS and configured.contains(name) and spark.conf.get(name) != value:
            warnings.warn(f"{name} is set to {value}: without it renamed columns of lakes read as null", stacklevel=3)
        elif name != FIELD_IDS and configured.contains(name):
            continue  # as the user has it
        spark.conf.set(name, value)
    for name, value in (runtime or {}).items():
        spark.conf.set(name, value)
    tell_workers(spark, con)
    if plans:
        require_planner(spark)
    require_executors(spark, con)
    # Names mean what they meant when any of this was refused. The source takes along what workers are told by now.
    tell_address(spark, con)
    spark.dataSource.register(LakeheadDataSource)
    bind_session(spark, con)
    return spark


def given_settings(conf: Mapping[str, Any]) -> dict[str, str]:
    """What a caller of `lakehead.spark.session` gave, by the names that Spark has for it."""
    given = {k: _text(v) for k, v in conf.items()}
    for short, name in (("master", "spark.master"), ("app_name", "spark.app.name")):
        if short in given:
            given[name] = given.pop(short)
    return given


def session_settings(
    configured: Mapping[str, str],
    given: Mapping[str, str],
    scratch: Scratch,
    *,
    has_local_dirs: bool = False,
    own_python: bool = True,
) -> dict[str, str]:
    """What a session gets beside what Spark is ``configured`` with, by ``spark-submit`` or in its folder; that stays as
    it is, but for what is ``given``. ``own_python`` says whether executors run the driver's own."""
    users = {**configured, **given}
    master = users.get("spark.master", DEFAULT_MASTER)
    ours = {"spark.master": master, "spark.app.name": "lakehead", **STATIC_SETTINGS, **RUNTIME_SETTINGS}
    if is_local(master):
        ours |= LOCAL_SETTINGS
    if is_private(master):
        ours |= {k: v for k, v in OUR_PYTHON_SETTINGS.items() if own_python or k != _DAEMON}
        ours |= private_settings(master, users, scratch, SystemRandomness(), has_local_dirs=has_local_dirs)
    return {**{k: v for k, v in ours.items() if k not in configured}, **given}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@contextmanager
def _launch_environment(java: Java, scratch: str, master: str | None) -> Iterator[None]:
    """What Spark's launcher takes from the environment: which Java, which Python the workers run, how it logs before
    its settings are read, where its temporary files are, and which master and address, unless others are configured."""
    with tempfile.NamedTemporaryFile("w", suffix=".properties") as logging:
        logging.write(_LOGGING)
        logging.flush()
        # Options that the user configured come after these, and so win.
        options = " ".join([*java.options, *class_archive.options(java), os.environ.get("SPARK_SUBMIT_OPTS", "")])
        options = f"{options} -Dlog4j2.configurationFile={logging.name}"
        wanted = {
            "JAVA_HOME": java.home,
            "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable),
            "SPARK_SUBMIT_OPTS": f'{options} "-Djava.io.tmpdir={scratch}"'.strip(),
            "MASTER": os.environ.get("MASTER", DEFAULT_MASTER),
        }
        if is_private(master or os.environ.get("MASTER", DEFAULT_MASTER)) and (master or not _names_master()):
            wanted["SPARK_LOCAL_IP"] = os.environ.get("SPARK_LOCAL_IP", LOOPBACK)
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, old in before.items():
                if old is None:
                    del os.environ[name]
                else:
                    os.environ[name] = old


def _names_master() -> bool:
    """Whether Spark may be configured with a master; the environment aside."""
    if re.search("master|properties-file", os.environ.get("PYSPARK_SUBMIT_ARGS", "")):
        return True
    import pyspark

    home = os.environ.get("SPARK_HOME") or os.path.dirname(pyspark.__file__)
    folder = os.environ.get("SPARK_CONF_DIR") or os.path.join(home, "conf")
    try:
        with open(os.path.join(folder, "spark-defaults.conf"), encoding="utf-8", errors="replace") as file:
            return any(line.lstrip().startswith("spark.master") for line in file)
    except OSError:
        return False
