"""Finds message ids that a stream has stored twice within its duplicate window."""

from typing import Final

from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as fn

from contrail_common.model import MSG_ID
from contrail_pipeline.audit.findings import NAMED_MAX, Finding

_NS_PER_US: Final = 1_000


def repeated_ids(spark: SparkSession, options: dict[str, str], window_ns: int) -> list[Finding]:
    """Messages whose id an earlier message of the shard has, less than ``window_ns`` before.

    The ids may be far apart in the stream, so Spark sorts them. Times are whole microseconds, so a
    message at the very end of the window is left out.
    """
    own = Window.partitionBy("shard", "id").orderBy("seq")
    age_us = fn.unix_micros("time") - fn.lag(fn.unix_micros("time")).over(own)
    repeated = (
        spark.read.format("contrail")
        .options(**options, columns="shard,seq,time,headers", failOnDataLoss="false")
        .load()
        .withColumn("id", fn.element_at("headers", fn.lit(MSG_ID))[0])
        .where("id is not null")
        .select("shard", "seq", "id", fn.lag("seq").over(own).alias("before"), age_us.alias("age"))
        .where(fn.col("age") < window_ns // _NS_PER_US - 1)
    )
    found = [
        Finding(
            "message_id",
            f"shard {row.shard} sequence {row.seq} has the id {row.id!r} of sequence {row.before}, "
            "which was in the duplicate window",
            shard=row.shard,
            from_seq=row.seq,
            to_seq=row.seq,
        )
        for row in repeated.orderBy("shard", "seq").limit(NAMED_MAX + 1).collect()
    ]
    if len(found) <= NAMED_MAX:
        return found
    more = repeated.count() - NAMED_MAX
    return [*found[:NAMED_MAX], Finding("message_id", f"{more:,} more repeated ids")]
