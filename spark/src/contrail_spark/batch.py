"""The batch reader: one Spark partition for each split of a plan, of the stream or its lake."""

import functools
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from contrail_spark.errors import message_first
from contrail_spark.lake.reader import LakeReader
from contrail_spark.lake.splits import LakeSplit
from contrail_spark.options import ReplayOptions
from contrail_spark.plan import Split
from contrail_spark.schema import arrow_schema, conform
from contrail_spark.tiered import TieredPlan, client_of, selection


@dataclass
class SplitPartition(InputPartition):
    """A Spark partition that reads one split of the plan."""

    split: Split


@dataclass
class LakePartition(InputPartition):
    """A Spark partition that reads one split of the lake."""

    split: LakeSplit


class ContrailBatchReader(DataSourceReader):
    """Reads the splits of one plan.

    It deliberately has no ``pushFilters``: Spark 4.3 keeps the pushed filter per relation, not per
    scan, so a second query on the same DataFrame would silently get the rows of the first.
    Options and ``.schema(...)`` narrow a read instead.
    """

    def __init__(self, options: ReplayOptions, plan: TieredPlan, schema: StructType) -> None:
        self._options = options
        self._plan = plan
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """The splits of the plan; an empty range has none."""
        stream = self._plan.stream
        return [
            *map(LakePartition, self._plan.lake_splits),
            *map(SplitPartition, stream.splits if stream else ()),
        ]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """The record batches of one partition; None means that the plan has no partitions."""
        # Spark calls `read` once with None if there are no partitions.
        if not isinstance(partition, SplitPartition | LakePartition):
            return
        freeze_modules()
        wanted = arrow_schema(self._schema)
        with message_first():
            for batch in self._batches(partition, tuple(wanted.names)):
                yield conform(batch, wanted)

    def _batches(
        self, partition: SplitPartition | LakePartition, columns: tuple[str, ...]
    ) -> Iterator[pa.RecordBatch]:
        plan = self._plan
        if isinstance(partition, LakePartition):
            assert plan.lake is not None
            return LakeReader(plan.lake, selection(self._options)).read(partition.split, columns)
        assert plan.stream is not None
        client = client_of(self._options, plan.lake)
        return client.read(plan.stream, partition.split, columns)


@functools.cache
def freeze_modules() -> None:
    """Exempt what is loaded now from garbage collection, once per process.

    Spark's workers run a full collection after each task, and the next task waits for it. It takes
    30 ms and more, because it visits every object of the imported modules.
    """
    gc.freeze()
