"""``spark.read.format("contrail")``: a fixed range of a stream as a DataFrame."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from contrail_spark.client import ReplayClient
from contrail_spark.errors import message_first
from contrail_spark.options import ReplayOptions, parse_options
from contrail_spark.plan import ReplayPlan, Split
from contrail_spark.schema import arrow_schema, checked_projection, conform, spark_schema


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
        client = ReplayClient(self._options)
        schema = arrow_schema(self._schema)
        with message_first():
            for batch in client.read(self._plan, partition.split, tuple(schema.names)):
                yield conform(batch, schema)


class ContrailDataSource(DataSource):
    """The data source named ``contrail``; the options are listed in ``contrail_spark.options``.

    The range is fixed once per ``load()``: every action, self-join and task retry on one DataFrame
    reads the same messages. Call ``load()`` again for newer ones.
    """

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        with message_first():
            self._parsed = parse_options(options)
        self._plan: ReplayPlan | None = None

    @classmethod
    def name(cls) -> str:
        """The name given to ``format``."""
        return "contrail"

    def schema(self) -> StructType:
        """The requested columns. Spark calls this once per ``load()``, so it fixes the range.

        Spark pickles this object afterwards, so every later call has the same plan.
        """
        with message_first():
            schema = spark_schema(self._parsed.columns)
            self._plan = ReplayClient(self._parsed).plan()
            return schema

    def reader(self, schema: StructType) -> ContrailBatchReader:
        """A reader of the splits. If the user gives ``.schema(...)``, Spark skips ``schema``."""
        with message_first():
            projection = checked_projection(schema, self._parsed.columns)
            if self._plan is None:
                self._plan = ReplayClient(self._parsed).plan()
            return ContrailBatchReader(self._parsed, self._plan, projection)
