"""What Spark looks for by itself: modules named ``pyspark_*`` whose ``DefaultSource`` is a data source.

Wherever the package is installed, ``format("lakehead")`` is known without a registration: in plain sessions, in SQL
shells, through Spark Connect and in pipelines.
"""

from lakehead.spark.source import LakeheadDataSource as DefaultSource

__all__ = ["DefaultSource"]
