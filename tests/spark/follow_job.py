"""A Spark program that follows stream S into Parquet files: `follow_job URL FOLDER LIMIT`.

It is a process of its own, so that a test can kill it at any moment.
"""

import sys
from pathlib import Path

from contrail_spark.session import local_session


def main(url: str, folder: Path, limit: str) -> None:
    """Read up to the end that the stream has now, at most ``limit`` messages in a batch."""
    spark = local_session("follow", settings={"spark.sql.warehouse.dir": str(folder / "warehouse")})
    options = {"url": url, "stream": "S", "startingPosition": "earliest"}
    frame = spark.readStream.format("contrail").options(**options)
    query = (
        frame.option("maxMessagesPerTrigger", limit)
        .load()
        .writeStream.format("parquet")
        .option("path", str(folder / "out"))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
