"""Makes ``spark.read.format("contrail")`` work without a registration call.

Spark imports every top-level module named ``pyspark_*`` and registers its ``DefaultSource``.
"""

from contrail_spark.source import ContrailDataSource as DefaultSource

__all__ = ["DefaultSource"]
