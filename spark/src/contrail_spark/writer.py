"""The writers: each partition of a frame is published, as a part of one numbered batch."""

import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from contrail_spark.batch import freeze_modules
from contrail_spark.bodies import Rows
from contrail_spark.errors import ContrailSparkError, message_first
from contrail_spark.layout import Layout
from contrail_spark.options import WriteOptions
from contrail_spark.publisher import NumberedBatch, Publisher

PARTITIONS_TOGETHER: Final = 16
_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Written(WriterCommitMessage):
    """The messages of one partition: all of them, and how many the stream had before."""

    messages: int
    duplicates: int


class ContrailBatchWriter(DataSourceArrowWriter):
    """``df.write``: all attempts of a task publish the same messages of the same batch.

    The name of the write is made here, in the driver, and pickled for the tasks.
    """

    def __init__(self, options: WriteOptions, layout: Layout) -> None:
        self._options = options
        self._layout = layout
        self._name = f"spark-{secrets.token_hex(8)}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Publish the rows of one partition, in their order."""
        with message_first():
            partition = _task().partitionId()
            # A stream holds a limited number of ids for a batch, and remembers a limited number of
            # producers. The partitions that run at about the same time share one.
            producer = f"{self._name}-{partition // PARTITIONS_TOGETHER}"
            batch = NumberedBatch(
                producer,
                1,
                f"partition {partition}",
                "A part of the write is stored. To avoid this, use smaller partitions, or raise "
                "the duplicate_window of the stream above the duration of a write",
            )
            origin = f"{self._name}:{partition}"
            return _publish(iterator, self._options, self._layout, batch, origin)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Log the counts. There is nothing to commit: every message is stored already."""
        _log_counts("a batch write", self._options, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing: what is stored can be read already, and is not deleted."""


class ContrailStreamWriter(DataSourceStreamArrowWriter):
    """``df.writeStream``: each micro-batch is a batch of the query, numbered from 1.

    The query keeps its id in its checkpoint. A micro-batch that Spark repeats after a restart has
    the same number, so the server stores only the messages that it does not have.
    """

    def __init__(self, options: WriteOptions, layout: Layout) -> None:
        self._options = options
        self._layout = layout

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Publish the rows of one partition of a micro-batch, in their order."""
        with message_first():
            task = _task()
            query, number = task.getLocalProperty(_QUERY_ID), task.getLocalProperty(_BATCH_ID)
            if query is None or number is None:
                raise ContrailSparkError("Spark did not name the query and batch of a task")
            batch = NumberedBatch(
                query,
                int(number) + 1,
                f"batch {number} of query {query}",
                "Compare the stream with the source of the query, and start the query with a new "
                "checkpoint. Smaller batches, or a longer duplicate_window of the stream, avoid "
                "this",
            )
            origin = f"{query}:{number}:{task.partitionId()}"
            return _publish(iterator, self._options, self._layout, batch, origin)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 Spark's name
        """Log the counts. The number of the next batch tells the server that this one is over."""
        _log_counts(f"batch {batchId}", self._options, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 Spark's name
        """Do nothing: the query repeats the batch when it is restarted."""


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None  # Spark calls `write` in tasks only
    return task


def _publish(
    batches: Iterator[pa.RecordBatch],
    options: WriteOptions,
    layout: Layout,
    batch: NumberedBatch,
    origin: str,
) -> Written:
    freeze_modules()
    messages = duplicates = 0
    with closing(Publisher(options, batch)) as publisher:
        for found in batches:
            rows = Rows(found, layout, origin, messages + 1)
            for body in rows.bodies():
                duplicates += publisher.publish(body, rows)
            messages += found.num_rows
    return Written(messages, duplicates)


def _log_counts(
    what: str, options: WriteOptions, messages: Sequence[WriterCommitMessage | None]
) -> None:
    parts = [one for one in messages if isinstance(one, Written)]
    _log.info(
        "%s wrote %d messages to stream %s, of which %d were duplicates",
        what,
        sum(one.messages for one in parts),
        options.stream,
        sum(one.duplicates for one in parts),
    )
