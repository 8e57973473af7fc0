"""``python -m tests.spark.killed_job KIND URL MASTER FOLDER``: a Spark job that may be killed.

It brings stream SOURCE to stream OUT, or into the Parquet files FOLDER/files. Started again, it
goes on, or writes everything again if it is no streaming query.
"""

import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from contrail_spark.session import cluster_session

LIMIT = 4_000
"""Messages in a batch of a query."""
PARTITIONS = 24
"""Of a batch write."""
TO_OUT = "regexp_replace(subject, '^in', 'out') as subject"


def write(spark: SparkSession, url: str, folder: Path) -> None:
    """Write the stream to OUT, which knows the ids of all messages for an hour."""
    frame = spark.read.format("contrail").options(url=url, stream="SOURCE", splits=PARTITIONS)
    copy = frame.load().selectExpr(TO_OUT, "* except (subject)").write.format("contrail")
    copy.options(url=url, stream="OUT", sourceStream="SOURCE").mode("append").save()


def copy(spark: SparkSession, url: str, folder: Path) -> None:
    """Follow the stream into OUT."""
    query = followed(spark, url).selectExpr(TO_OUT, "* except (subject)").writeStream
    query = query.format("contrail").options(url=url, stream="OUT", sourceStream="SOURCE")
    query.option("checkpointLocation", str(folder / "checkpoint")).trigger(
        availableNow=True
    ).start().awaitTermination()


def files(spark: SparkSession, url: str, folder: Path) -> None:
    """Follow the stream into Parquet files, and gather what Spark then reads from them."""
    query = followed(spark, url).writeStream.format("parquet").option("path", str(folder / "all"))
    query.option("checkpointLocation", str(folder / "checkpoint")).trigger(
        availableNow=True
    ).start().awaitTermination()
    found = spark.read.parquet(str(folder / "all")).coalesce(1)
    found.write.mode("overwrite").parquet(str(folder / "files"))


def followed(spark: SparkSession, url: str) -> DataFrame:
    """The stream from its beginning, in small batches."""
    reader = spark.readStream.format("contrail").options(url=url, stream="SOURCE")
    reader = reader.options(startingPosition="earliest", maxMessagesPerTrigger=LIMIT)
    return reader.option("minPartitions", 3).load()


KINDS = {"write": write, "copy": copy, "files": files}


def main(kind: str, url: str, master: str, folder: Path) -> None:
    """Run a job to its end."""
    settings = {"spark.sql.warehouse.dir": str(folder / "warehouse")}
    spark = cluster_session(kind, master, settings=settings)
    KINDS[kind](spark, url, folder)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]))
