"""Spark sessions set up for Lakehead: settings that measurements showed to matter, and a start without noise."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lakehead.api.connection import Connection
from lakehead.errors import MissingDependencyError
from lakehead.spark.connections import bind_session, opened, require_reachable
from lakehead.spark.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_MASTER = "local[2]"
STATIC_SETTINGS = {
    # A hop between the JVM and Python takes half the time of TCP on loopback.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.daemon.module": "lakehead.spark.daemon",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
}
LOCAL_SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "8",
    # Listing files that are named one by one needs no Spark job.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "10000",
}
RUNTIME_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Lake columns are found by field id: a renamed one would silently be null by name.
    "spark.sql.parquet.fieldId.read.enabled": "true",
    "spark.sql.timeType.enabled": "true",
}
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
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


def open_session(con_or_uri: Connection | str, conf: Mapping[str, Any]) -> SparkSession:
    """See `lakehead.spark.session`."""
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    if running is None or running.sparkContext._jsc is None:
        java = find_java()
    con = opened(con_or_uri)
    if running is not None and running.sparkContext._jsc is not None:
        return attach_session(running, con)
    settings = session_settings(conf)
    require_reachable(con, settings["spark.master"])
    builder = SparkSession.builder
    with _launch_environment(java.home, local=is_local(settings["spark.master"])) as logging:
        options = f"-Dlog4j2.configurationFile={logging} {settings.get(_JAVA_OPTIONS, '')}".strip()
        for name, value in {**settings, _JAVA_OPTIONS: options}.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
    return attach_session(spark, con, {k: v for k, v in settings.items() if k in RUNTIME_SETTINGS})


def attach_session(
    spark: SparkSession, con_or_uri: Connection | str, runtime: Mapping[str, str] | None = None
) -> SparkSession:
    """See `lakehead.spark.attach`; ``runtime`` overrides `RUNTIME_SETTINGS`."""
    from lakehead.spark.source import LakeheadDataSource

    con = opened(con_or_uri)
    for name, value in {**RUNTIME_SETTINGS, **(runtime or {})}.items():
        spark.conf.set(name, value)
    # Before the source is registered, which takes along what workers are given.
    bind_session(spark, con)
    spark.dataSource.register(LakeheadDataSource)
    return spark


def session_settings(conf: Mapping[str, Any]) -> dict[str, str]:
    """All settings of a session; what the user gives wins, ``master`` and ``app_name`` too."""
    given = {k: _text(v) for k, v in conf.items()}
    master = given.pop("master", given.pop("spark.master", DEFAULT_MASTER))
    name = given.pop("app_name", given.pop("spark.app.name", "lakehead"))
    local = LOCAL_SETTINGS if is_local(master) else {}
    return {
        **STATIC_SETTINGS,
        **local,
        **RUNTIME_SETTINGS,
        **given,
        "spark.master": master,
        "spark.app.name": name,
    }


def is_local(master: str) -> bool:
    """Whether the executors of this master run in the driver's process, and so share its files."""
    return master == "local" or master.startswith("local[")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@contextmanager
def _launch_environment(java_home: str, *, local: bool) -> Iterator[str]:
    """What Spark's launcher takes from the environment: which Java, which Python the workers run, which address.

    Yields the path of a file that configures logging before Spark's own settings are read.
    """
    wanted = {"JAVA_HOME": java_home, "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable)}
    if local:
        wanted["SPARK_LOCAL_IP"] = "127.0.0.1"
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    with tempfile.NamedTemporaryFile("w", suffix=".properties") as logging:
        logging.write(_LOGGING)
        logging.flush()
        try:
            yield logging.name
        finally:
            for name, old in before.items():
                if old is None:
                    del os.environ[name]
                else:
                    os.environ[name] = old
