"""``spark.read.format("contrail")``: a stream as a DataFrame over a pinned snapshot."""

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

    The snapshot is pinned once per ``load()``: every action, self-join and task retry on one
    DataFrame reads the same messages.  ``load()`` again for newer ones.
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
        """The columns asked for; called once per ``load()``, so the snapshot is pinned here.

        Spark pickles this object afterwards, and the plan reaches every later call with it.
        """
        with message_first():
            schema = spark_schema(self._parsed.columns)
            self._plan = ReplayClient(self._parsed).plan()
            return schema

    def reader(self, schema: StructType) -> ContrailBatchReader:
        """A reader of the pinned splits.  With ``.schema(...)`` given, Spark skips ``schema``."""
        with message_first():
            projection = checked_projection(schema, self._parsed.columns)
            if self._plan is None:
                self._plan = ReplayClient(self._parsed).plan()
            return ContrailBatchReader(self._parsed, self._plan, projection)
