"""The streaming query of a transformation: its SQL, its checks, and where its rows go."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
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
_IN_ORDER: Final = frozenset(
    {
        "CTERelationDef",
        "CTERelationRef",
        "EventTimeWatermark",
        "Filter",
        "Generate",
        "Project",
        "ResolvedHint",
        "StreamingRelationV2",
        "SubqueryAlias",
        "Union",
        "View",
        "WithCTE",
    }
)
"""Operators that repeat the rows of a batch in the same partitions and order."""


@dataclass(frozen=True, slots=True)
class Transformation:
    """A transformation of the stream ``source``; ``target`` are the options of the sink."""

    sql: str
    source: Mapping[str, str]
    form: str
    target: Mapping[str, str]

    @property
    def folder(self) -> Path | None:
        """Where its files go; None if it writes to a stream."""
        return Path(self.target["path"]) if self.form == "parquet" else None

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
            if self.form == "contrail":
                self._check_layout(spark, result)
        except PySparkException as error:
            failure = failure_of(error)
            if failure.passing:
                raise
            raise Misuse(f"the SQL cannot be run: {failure.sentence}") from error
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

    def _check_layout(self, spark: SparkSession, result: DataFrame) -> None:
        try:
            layout = parse_layout(result.schema, parse_write_options(self._target(result)))
        except ContrailSparkError as error:
            text = str(error).replace("the frame", "the result of the SQL")
            raise Misuse(text) from error
        if layout.ids is IdSource.ROW:
            _check_rows(result)
        else:
            _check_ids(spark, result)


def _check_rows(result: DataFrame) -> None:
    """Raise Misuse unless a row has the same place when Spark repeats a batch."""
    plan = result._jdf.queryExecution().analyzed()
    nodes = list(_nodes(plan))
    moved = sorted({each.nodeName() for each in nodes} - _IN_ORDER)
    if moved:
        cause = f"the operator {moved[0]}, after which Spark may repeat rows in another order"
    elif not all(each.subqueries().isEmpty() for each in nodes):
        cause = "a subquery, after which Spark may repeat rows in another order"
    elif not plan.deterministic():
        cause = "a function such as rand or uuid, with which Spark may repeat other rows"
    else:
        return
    raise Misuse(
        f"the SQL has {cause}: give each row an id of its own in a column msg_id, or keep the "
        "columns shard and seq, so that no message is stored twice"
    )


def _check_ids(spark: SparkSession, result: DataFrame) -> None:
    """Raise Misuse if a row may have another id when Spark repeats a batch."""
    msg_id, source = "msg_id", ("shard", "seq", "stream")
    names = [msg_id] if msg_id in result.columns else [*set(source) & set(result.columns)]
    plan = result.select(*names)._jdf.queryExecution().analyzed()
    # The optimizer removes what the ids are not made of.
    pruned = spark._jsparkSession.sessionState().optimizer().execute(plan)
    # Which rows there are may vary: each is stored once all the same.
    if all(_is_fixed(each) for each in _nodes(pruned) if each.nodeName() != "Filter"):
        return
    text = "the column msg_id has" if msg_id in names else "the columns shard and seq have"
    raise Misuse(
        f"{text} values of a function such as rand or uuid, which are others when Spark repeats a "
        "batch, so that messages would be stored twice: make the id of what is in the message"
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


def _nodes(plan: Any) -> Iterator[Any]:
    """The operators of a plan."""
    yield plan
    for child in _each(plan.children()):
        yield from _nodes(child)


def _is_fixed(node: Any) -> bool:
    return all(each.deterministic() for each in _each(node.expressions()))


def _each(found: Any) -> Iterator[Any]:
    """The elements of a sequence in Scala."""
    return (found.apply(at) for at in range(found.size()))


def _check_append(spark: SparkSession, result: DataFrame) -> None:
    """Raise the error with which Spark would refuse to start the query."""
    jvm: Any = spark._jvm
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    mode = jvm.org.apache.spark.sql.streaming.OutputMode.Append()
    checker.checkForStreaming(result._jdf.queryExecution().analyzed(), mode)
