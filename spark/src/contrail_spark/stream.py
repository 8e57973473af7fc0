"""The stream reader: micro-batches that follow a stream."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from contrail_spark.batch import freeze_modules
from contrail_spark.client import ReplayClient
from contrail_spark.errors import (
    CheckpointError,
    ContrailSparkError,
    StreamChangedError,
    message_first,
)
from contrail_spark.lake.store import Lake
from contrail_spark.offsets import (
    Heads,
    advance,
    check_shards,
    heads_of,
    initial,
    loss,
    parse_offset,
    ranges,
)
from contrail_spark.options import ReplayOptions
from contrail_spark.plan import ReplayPlan, Split
from contrail_spark.schema import arrow_schema, conform
from contrail_spark.tiered import check_lake, client_of, reaching_back

NEW_CHECKPOINT: Final = "Use a new checkpointLocation"
GO_ON: Final = 'or go on without what is lost: .option("failOnDataLoss", "false")'

_log: Final = logging.getLogger(__name__)


@dataclass
class StreamPartition(InputPartition):
    """A Spark partition that reads one split of one incarnation of the stream."""

    incarnation: str
    split: Split


class ContrailStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a stream in micro-batches; an offset has the last sequence of each shard.

    Spark keeps the offsets in its checkpoint, and the server keeps nothing for a query: `commit`
    does nothing. The object lives as long as the query, but `partitions` and `read` also work in
    a new one, which has only the offsets in the checkpoint.
    """

    def __init__(self, options: ReplayOptions, schema: StructType, partitions: int | None) -> None:
        self._options = options
        self._schema = schema
        self._partitions = partitions
        # What the server had when it was last asked.
        self._seen: Heads | None = None
        # Where a query with trigger `availableNow` ends.
        self._target: Heads | None = None

    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint starts."""
        with message_first():
            return initial(self._options, self._plan(self._options.start_time)).document()

    def getDefaultReadLimit(self) -> ReadLimit:
        """`maxMessagesPerTrigger`, or no limit."""
        most = self._options.max_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of the query at what the stream has now."""
        with message_first():
            self._target = heads_of(self._plan())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Where the next batch ends; ``start`` if there is nothing new.

        Raises CheckpointError if the stream does not continue what was read up to ``start``.
        """
        with message_first():
            begin = parse_offset(start)
            heads = self._seen = self._target or heads_of(self._plan())
            check_shards(begin, heads)
            if lost := loss(begin, heads):
                self._lost(f"stream {self._options.stream} {lost}")
            most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
            return advance(begin, heads, most).document()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The end of the stream when it was last asked for, which Spark shows in its progress."""
        return None if self._seen is None else self._seen.newest().document()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The partitions of a batch, the same ones each time that Spark repeats it."""
        with message_first():
            upto = parse_offset(end)
            splits = ranges(parse_offset(start), upto, self._partitions)
            return [StreamPartition(upto.incarnation, split) for split in splits]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """The record batches of one partition; None means that the batch has no partitions."""
        if not isinstance(partition, StreamPartition):
            return
        freeze_modules()
        plan = ReplayPlan(self._options.stream, partition.incarnation, ())
        wanted = arrow_schema(self._schema)
        with message_first():
            client = client_of(self._options, self._lake(plan))
            try:
                for batch in client.read(plan, partition.split, tuple(wanted.names)):
                    yield conform(batch, wanted)
            except StreamChangedError as changed:
                lost = f"{partition.split.from_seq}..{partition.split.to_seq}"
                self._lost(
                    f"stream {self._options.stream} was re-created before sequences {lost} of "
                    f"shard {partition.split.shard} were read",
                    changed,
                )

    def _plan(self, start_time: str | None = None) -> ReplayPlan:
        """A plan of the whole stream, for its heads, or of what is since ``start_time``.

        Only the leader may answer: a replica that is behind would look like a stream that has
        lost its end.
        """
        asked = replace(
            self._options,
            from_seq=None,
            start_time=start_time,
            splits=1,
            split_bytes=None,
            consistency=None,
        )
        plan = ReplayClient(asked).plan()
        lake = self._lake(plan)
        return plan if lake is None else reaching_back(plan, lake, start_time)

    def _lake(self, plan: ReplayPlan) -> Lake | None:
        if self._options.lake is None:
            return None
        lake = Lake.open(self._options.lake)
        check_lake(self._options, lake, plan)
        return lake

    def _lost(self, what: str, cause: Exception | None = None) -> None:
        """Report a loss: an error, or a line in the log if the user accepts losses."""
        if self._options.fail_on_data_loss:
            raise CheckpointError(f"{what}. {NEW_CHECKPOINT}, {GO_ON}") from cause
        _log.warning("%s; continuing with what is there", what)


class RefusedStreamReader(DataSourceStreamReader):
    """Ends a query with ``error``, which is a mistake in its options or columns.

    Spark 4.3 replaces what `streamReader` raises by a mistake of its own, but reports what a reader
    raises.
    """

    def __init__(self, error: ContrailSparkError) -> None:
        self._error = error

    def initialOffset(self) -> dict[str, Any]:
        """Raise the error; Spark calls this first in a new query."""
        self._refuse()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Raise the error; Spark calls this first in a query that goes on."""
        self._refuse()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Raise the error; Spark calls this first in a query that repeats a batch."""
        self._refuse()

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """Raise the error; there are no partitions to read."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        with message_first():
            raise self._error
