"""``spark.read.format("contrail")``: a fixed range of a stream as a DataFrame."""

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from contrail_spark.batch import ContrailBatchReader
from contrail_spark.client import ReplayClient
from contrail_spark.errors import message_first
from contrail_spark.options import parse_options
from contrail_spark.plan import ReplayPlan
from contrail_spark.schema import checked_projection, spark_schema


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
