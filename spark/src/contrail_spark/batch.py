"""The batch reader: one Spark partition for each split of a plan."""

import functools
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from contrail_spark.client import ReplayClient
from contrail_spark.errors import message_first
from contrail_spark.options import ReplayOptions
from contrail_spark.plan import ReplayPlan, Split
from contrail_spark.schema import arrow_schema, conform


@dataclass
class SplitPartition(InputPartition):
    """A Spark partition that reads one split of the plan."""

    split: Split


class ContrailBatchReader(DataSourceReader):
    """Reads the splits of one plan.

    It deliberately has no ``pushFilters``: Spark 4.3 keeps the pushed filter per relation, not per
    scan, so a second query on the same DataFrame would silently get the rows of the first.
    Options and ``.schema(...)`` narrow a read instead.
    """

    def __init__(self, options: ReplayOptions, plan: ReplayPlan, schema: StructType) -> None:
        self._options = options
        self._plan = plan
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """The splits of the plan; an empty range has none."""
        return [SplitPartition(split) for split in self._plan.splits]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """The record batches of one partition; None means that the plan has no partitions."""
        # Spark calls `read` once with None if there are no partitions.
        if not isinstance(partition, SplitPartition):
            return
        with message_first():
            yield from read_split(self._options, self._plan, partition.split, self._schema)


def read_split(
    options: ReplayOptions, plan: ReplayPlan, split: Split, schema: StructType
) -> Iterator[pa.RecordBatch]:
    """The record batches of one split as Spark takes them; raises as `ReplayClient.read`."""
    freeze_modules()
    wanted = arrow_schema(schema)
    for batch in ReplayClient(options).read(plan, split, tuple(wanted.names)):
        yield conform(batch, wanted)


@functools.cache
def freeze_modules() -> None:
    """Exempt what is loaded now from garbage collection, once per process.

    Spark's workers run a full collection after each task, and the next task waits for it. It takes
    30 ms and more, because it visits every object of the imported modules.
    """
    gc.freeze()
