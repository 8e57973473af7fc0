"""``format("contrail")``: a fixed range of a stream, the stream as it goes on, and writes to it."""

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from contrail_spark.batch import ContrailBatchReader
from contrail_spark.errors import ContrailSparkError, OptionError, message_first
from contrail_spark.layout import Layout, parse_layout
from contrail_spark.options import (
    BATCH_ONLY,
    STREAM_ONLY,
    WriteOptions,
    parse_options,
    parse_write_options,
    refuse,
)
from contrail_spark.schema import checked_projection, spark_schema
from contrail_spark.stream import ContrailStreamReader, RefusedStreamReader
from contrail_spark.tiered import TieredPlan, make_plan
from contrail_spark.writer import ContrailBatchWriter, ContrailStreamWriter


class ContrailDataSource(DataSource):
    """The data source named ``contrail``; the options are listed in ``contrail_spark.options``.

    The range is fixed once per ``load()``: every action, self-join and task retry on one DataFrame
    reads the same messages. Call ``load()`` again for newer ones.
    """

    _plan: TieredPlan | None = None

    @classmethod
    def name(cls) -> str:
        """The name given to ``format``."""
        return "contrail"

    def schema(self) -> StructType:
        """The requested columns. Spark calls this once per ``load()``, so it fixes the range.

        Spark pickles this object afterwards, so every later call has the same plan.
        """
        with message_first():
            options = parse_options(self.options)
            schema = spark_schema(options.columns)
            self._plan = make_plan(options)
            return schema

    def reader(self, schema: StructType) -> ContrailBatchReader:
        """A reader of the splits. If the user gives ``.schema(...)``, Spark skips ``schema``."""
        with message_first():
            options = parse_options(self.options)
            refuse(self.options, STREAM_ONLY, "spark.read")
            projection = checked_projection(schema, options.columns)
            if self._plan is None:
                self._plan = make_plan(options)
            return ContrailBatchReader(options, self._plan, projection)

    def streamReader(self, schema: StructType) -> ContrailStreamReader | RefusedStreamReader:
        """A reader that follows the stream. Its range is in Spark's checkpoint, not in a plan."""
        try:
            options = parse_options(self.options)
            refuse(self.options, BATCH_ONLY, "spark.readStream")
            projection = checked_projection(schema, options.columns)
        except ContrailSparkError as error:
            return RefusedStreamReader(error)
        partitions = options.splits if "minPartitions" in self.options else None
        return ContrailStreamReader(options, projection, partitions)

    def writer(self, schema: StructType, overwrite: bool) -> ContrailBatchWriter:
        """A writer that publishes the rows of a frame."""
        with message_first():
            return ContrailBatchWriter(*self._write_plan(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> ContrailStreamWriter:
        """A writer that publishes the rows of each micro-batch."""
        with message_first():
            return ContrailStreamWriter(*self._write_plan(schema, overwrite))

    def _write_plan(self, schema: StructType, overwrite: bool) -> tuple[WriteOptions, Layout]:
        if overwrite:
            raise OptionError(
                "messages cannot be overwritten: use mode append, or output mode append for a "
                "streaming query, and purge the stream if it is to be empty"
            )
        options = parse_write_options(self.options)
        return options, parse_layout(schema, options)
