"""The command `contrail pipeline transform`."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from contrail_client.cli import show
from contrail_client.cli.ending import Failed, Misuse
from contrail_pipeline.job import Job, folder_of
from contrail_spark.lake.layout import LAKE_FILE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from contrail_pipeline.transform.query import Transformation
    from contrail_pipeline.transform.supervision import Progress

BATCH: Final = 100_000
RETRIES: Final = 10

Sql = Annotated[
    Path, typer.Argument(metavar="QUERY.sql", help="File with one SELECT from `messages`.")
]
From = Annotated[str, typer.Option("--from", metavar="STREAM", help="The stream to read.")]
To = Annotated[str | None, typer.Option("--to", metavar="STREAM", help="The stream to write to.")]
ToParquet = Annotated[
    Path | None, typer.Option("--to-parquet", metavar="FOLDER", help="Write Parquet files there.")
]
Checkpoint = Annotated[
    Path, typer.Option(metavar="FOLDER", help="Where the position of the query is kept.")
]
Once = Annotated[
    bool, typer.Option("--once", help="End when all is read that the stream has at the start.")
]
Every = Annotated[str, typer.Option(metavar="DURATION", help="Time between two batches.")]
Start = Annotated[
    Literal["earliest", "latest"], typer.Option(help="Where a new checkpoint begins.")
]
Batch = Annotated[int, typer.Option(min=1, help="Messages in a batch, at most.")]
Retries = Annotated[
    int, typer.Option(min=0, max=1_000, help="Attempts after a failure without a finished batch.")
]
Accept = Annotated[bool, typer.Option("--accept-changes", help="Go on with SQL that was changed.")]


def transform(  # noqa: PLR0913 - all of them are named
    job: Job,
    query: Sql,
    *,
    source: From,
    checkpoint: Checkpoint,
    to: To = None,
    to_parquet: ToParquet = None,
    once: Once = False,
    every: Every = "1s",
    start: Start = "earliest",
    batch: Batch = BATCH,
    retries: Retries = RETRIES,
    accept_changes: Accept = False,
) -> None:
    """Follow a stream with a query in SQL, and write its rows to a stream or to files.

    Each row is written once, even if this command is killed and started again.
    """
    from contrail_pipeline.transform.checkpoint import Made, check, check_rows, note  # noqa: PLC0415

    every_ms = None if once else _milliseconds(every)
    sql = _read(query)
    limits = {"startingPosition": start, "maxMessagesPerTrigger": str(batch)}
    work = _transformation(job, sql, source, limits, to, to_parquet)
    target = to if to is not None else f"parquet:{work.folder}"
    made = Made(sql=sql, source=source, target=target)
    folder = folder_of(checkpoint, "--checkpoint")
    check(folder, made, accept=accept_changes)
    if work.folder is not None:
        check_rows(folder, work.folder)
    with job.spark() as spark:
        _silence(spark)
        _check(spark, work)
        if job.dry_run:
            _show(job, spark, work)
            return
        note(folder, made)
        _run(job, spark, Run(work, folder, every_ms, retries))


@dataclass(frozen=True, slots=True)
class Run:
    """How a transformation runs: where its position is, how often a batch begins, and attempts."""

    work: "Transformation"
    checkpoint: Path
    every_ms: int | None
    retries: int


def _check(spark: "SparkSession", work: "Transformation") -> None:
    """Refuse what cannot be run, before anything is written."""
    from pyspark.errors import PySparkException  # noqa: PLC0415

    from contrail_pipeline.transform.failures import failure_of  # noqa: PLC0415

    try:
        work.result(spark)
    except PySparkException as error:
        raise Failed(failure_of(error).sentence) from error


def _silence(spark: "SparkSession") -> None:
    """Keep Spark from printing each failure itself, with pages of frames."""
    spark.sparkContext.setLogLevel("OFF")
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _read(path: Path) -> str:
    try:
        sql = path.read_text(encoding="utf-8-sig").strip().removesuffix(";").strip()
    except UnicodeDecodeError as error:
        raise Misuse(f"{path} is not UTF-8: {error}") from error
    if not sql:
        raise Misuse(f"{path} has no SQL")
    return sql


def _milliseconds(text: str) -> int:
    from contrail_common.timeunits import NS_PER_MS, parse_duration  # noqa: PLC0415

    try:
        every_ms = parse_duration(text) // NS_PER_MS
    except ValueError as error:
        raise Misuse(f"--every: {error}") from None
    if every_ms < 1:
        raise Misuse("--every must be at least 1ms")
    return every_ms


def _transformation(
    job: Job, sql: str, source: str, limits: dict[str, str], to: str | None, folder: Path | None
) -> "Transformation":
    from contrail_pipeline.transform.query import Transformation  # noqa: PLC0415

    if (to is None) == (folder is None):
        raise Misuse("say where the rows go: either --to STREAM or --to-parquet FOLDER")
    if to == source:
        raise Misuse(f"the query would read what it writes: --from and --to are both {to}")
    job.client.get_stream(source)
    read = job.server_options(source) | limits
    if to is not None:
        job.client.get_stream(to)
        return Transformation(sql, read, "contrail", job.server_options(to))
    assert folder is not None  # as was checked above
    root = folder_of(folder, "--to-parquet")
    if root.exists() and not root.is_dir():
        raise Misuse(f"--to-parquet: {folder} is no folder")
    if (root / LAKE_FILE).exists():
        raise Misuse(f"--to-parquet: {folder} is a lake, to which only its jobs may write")
    return Transformation(sql, read, "parquet", {"path": str(root)})


def _show(job: Job, spark: "SparkSession", work: "Transformation") -> None:
    result = work.result(spark)
    columns = {field.name: field.dataType.simpleString() for field in result.schema.fields}
    plan = work.plan(spark)
    listed = ", ".join(f"{name} {kind}" for name, kind in columns.items())
    job.done(f"Would write: {listed}", {"dry_run": True, "columns": columns, "plan": plan})
    if not job.as_json:
        show.console.print(plan.strip(), markup=False, soft_wrap=True)


def _run(job: Job, spark: "SparkSession", run: Run) -> None:
    from contrail_pipeline.transform.checkpoint import check_writable  # noqa: PLC0415
    from contrail_pipeline.transform.supervision import (  # noqa: PLC0415
        Supervisor,
        ended_by_signals,
    )

    def start() -> "StreamingQuery":
        check_writable(run.checkpoint, "checkpoint")
        if run.work.folder is not None:
            check_writable(run.work.folder, "folder of the rows")
        return run.work.start(spark, str(run.checkpoint), run.every_ms)

    def told(progress: "Progress") -> None:
        if job.as_json:
            show.json_line(progress.document())
        else:
            show.console.print(progress.line(), markup=False, soft_wrap=True)

    def failed(sentence: str, pause_s: float) -> None:
        text = f"{sentence}; next attempt in {pause_s:.0f} s"
        show.warning(text, as_json=job.as_json)

    supervisor = Supervisor(
        start=start,
        told=told,
        failed=failed,
        retries=run.retries,
    )
    with ended_by_signals(supervisor.stopping):
        supervisor.run()
    stopped = supervisor.stopping.is_set()
    job.done(
        f"{'Stopped' if stopped else 'Done'}: {supervisor.rows:,} rows read in "
        f"{supervisor.batches:,} {'batch' if supervisor.batches == 1 else 'batches'}",
        {"stopped": stopped, "rows": supervisor.rows, "batches": supervisor.batches},
    )
