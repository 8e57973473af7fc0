"""``python -m tests.spark.query_to_stream URL LINES CHECKPOINT``: a driver that a test may kill.

It writes the files of the folder LINES to stream S, a few in each micro-batch, and ends when all
are written.
"""

import sys

from contrail_spark.session import local_session


def main(url: str, lines: str, checkpoint: str) -> None:
    """Run the query to its end."""
    spark = local_session("writer")
    frame = spark.readStream.option("maxFilesPerTrigger", 2).text(lines)
    query = (
        frame.selectExpr("concat('s.', value % 7) as subject", "value as data", "value as msg_id")
        .writeStream.format("contrail")
        .options(url=url, stream="S", checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
