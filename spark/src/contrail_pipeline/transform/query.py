"""The streaming query of a transformation: its SQL, its checks, and where its rows go."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from contrail_client.cli.ending import Misuse
from contrail_pipeline.transform.failures import failure_of
from contrail_spark.errors import ContrailSparkError
from contrail_spark.layout import IdSource, parse_layout
from contrail_spark.options import parse_write_options

VIEW: Final = "messages"
_REORDERING: Final = frozenset(
    {
        "Aggregate",
        "Deduplicate",
        "DeduplicateWithinWatermark",
        "Distinct",
        "GlobalLimit",
        "Join",
        "LocalLimit",
        "Offset",
        "Repartition",
        "RepartitionByExpression",
        "RebalancePartitions",
        "Sample",
        "Sort",
        "Window",
    }
)
"""Operators after which Spark may repeat rows in other partitions, or in another order."""


@dataclass(frozen=True, slots=True)
class Transformation:
    """A transformation of the stream ``source``; ``target`` are the options of the sink."""

    sql: str
    source: Mapping[str, str]
    form: str
    target: Mapping[str, str]

    def result(self, spark: SparkSession) -> DataFrame:
        """The frame of the SQL over the followed stream; Misuse if it cannot be the query.

        A failure that may pass, such as a server that does not answer, is raised as Spark has it.
        """
        try:
            frame = spark.readStream.format("contrail").options(**self.source).load()
            frame.createOrReplaceTempView(VIEW)
            _check_select(spark, self.sql)
            result = spark.sql(self.sql)
            if not result.isStreaming:
                raise Misuse(f"the SQL does not read the view {VIEW}, which has the stream")
            _check_append(spark, result)
        except PySparkException as error:
            failure = failure_of(error)
            if failure.passing:
                raise
            raise Misuse(f"the SQL cannot be run: {failure.sentence}") from error
        if self.form == "contrail":
            self._check_layout(result)
        return result

    def plan(self, spark: SparkSession) -> str:
        """Spark's plan of a batch, which reads what the stream has now."""
        source = {
            name: value
            for name, value in self.source.items()
            if name not in ("startingPosition", "maxMessagesPerTrigger")
        }
        spark.read.format("contrail").options(**source).load().createOrReplaceTempView(VIEW)
        execution = spark.sql(self.sql)._jdf.queryExecution()
        jvm: Any = spark._jvm
        return str(jvm.PythonSQLUtils.explainString(execution, "formatted"))

    def start(self, spark: SparkSession, checkpoint: str, every_ms: int | None) -> StreamingQuery:
        """Start the query; without ``every_ms`` it ends when it has read what is there."""
        result = self.result(spark)
        writer = (
            result.writeStream.format(self.form)
            .options(**self._target(result))
            .option("checkpointLocation", checkpoint)
            .outputMode("append")
        )
        if every_ms is None:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{every_ms} milliseconds").start()

    def _target(self, result: DataFrame) -> dict[str, str]:
        names = set(result.columns)
        if self.form == "contrail" and names & {"shard", "seq"} and "stream" not in names:
            return {**self.target, "sourceStream": self.source["stream"]}
        return dict(self.target)

    def _check_layout(self, result: DataFrame) -> None:
        try:
            layout = parse_layout(result.schema, parse_write_options(self._target(result)))
        except ContrailSparkError as error:
            text = str(error).replace("the frame", "the result of the SQL")
            raise Misuse(text) from error
        if layout.ids is not IdSource.ROW:
            return
        plan = result._jdf.queryExecution().analyzed()
        moved = sorted(_operators(plan) & _REORDERING)
        if moved or not plan.deterministic():
            cause = "a function such as rand or uuid, with which Spark may repeat other rows"
            if moved:
                cause = (
                    f"the operator {moved[0]}, after which Spark may repeat rows in another order"
                )
            raise Misuse(
                f"the SQL has {cause}: give each row an id of its own in a column msg_id, or keep "
                "the columns shard and seq, so that no message is stored twice"
            )


def _check_select(spark: SparkSession, sql: str) -> None:
    """Raise Misuse for a statement other than a query: Spark would run it at once."""
    parser = spark._jsparkSession.sessionState().sqlParser()
    # What is no statement at all has an error that says where.
    parser.parsePlan(sql)
    try:
        parser.parseQuery(sql)
    except PySparkException as error:
        raise Misuse("the file must have one SELECT, and no other statement") from error


def _operators(plan: Any) -> set[str]:
    """The names of the operators in a plan."""

    def below(node: Any) -> Iterator[str]:
        yield node.nodeName()
        children = node.children()
        for at in range(children.size()):
            yield from below(children.apply(at))

    return set(below(plan))


def _check_append(spark: SparkSession, result: DataFrame) -> None:
    """Raise the error with which Spark would refuse to start the query."""
    jvm: Any = spark._jvm
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    mode = jvm.org.apache.spark.sql.streaming.OutputMode.Append()
    checker.checkForStreaming(result._jdf.queryExecution().analyzed(), mode)
