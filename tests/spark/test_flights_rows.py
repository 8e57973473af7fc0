"""All flights of the year through Spark, row by row against the CSV file."""

import importlib.util
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

from contrail_client import Contrail
from contrail_flights.dataset import PACKAGE, SUBJECTS, Dataset
from contrail_flights.stream import STREAM, publish_all
from tests.support.servers import ServerProcess

pytestmark = [pytest.mark.spark, pytest.mark.long]

COPY = "COPY"
FLIGHTS = 336_776


@pytest.fixture
def client(running: ServerProcess, dataset: Dataset) -> Iterator[Contrail]:
    """A server that has all flights."""
    with Contrail(running.url) as client:
        client.ensure_stream(STREAM, {"subjects": [SUBJECTS]})
        publish_all(client, dataset.flights, lambda _: None)
        client.ensure_stream(COPY, {"subjects": ["copy.>"], "duplicate_window": "100ms"})
        yield client


def csv_lines() -> list[str]:
    """The lines of the file, sorted, without its head."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    with zipfile.ZipFile(Path(spec.origin).parent / "data" / "flights.csv.zip") as files:
        [name] = files.namelist()
        return sorted(files.read(name).decode().splitlines()[1:])


def lines_read(spark: SparkSession, server: ServerProcess, stream: str) -> list[str]:
    """The same lines, made from what Spark reads from ``stream``."""
    frame = spark.read.format("contrail").options(url=server.url, stream=stream)
    table = frame.option("columns", "subject,data").load().toArrow()
    decode = msgspec.json.decode
    lines = []
    for subject, data in zip(*(column.to_pylist() for column in table.columns), strict=True):
        row = decode(data)
        place = f"{row['origin']}.{row['dest']}.{row['carrier']}"
        assert subject.partition(".")[2] == place
        lines.append(",".join("NA" if value is None else str(value) for value in row.values()))
    return sorted(lines)


def test_every_row_of_the_file_is_read_once_and_once_more_after_a_copy_by_a_query(
    spark: SparkSession, running: ServerProcess, client: Contrail, tmp_path: Path
) -> None:
    expected = csv_lines()
    assert len(expected) == FLIGHTS
    assert lines_read(spark, running, STREAM) == expected
    options = {"url": running.url, "stream": STREAM, "startingPosition": "earliest"}
    query = (
        spark.readStream.format("contrail")
        .options(maxMessagesPerTrigger=100_000, **options)
        .load()
        .selectExpr("replace(subject, 'flights.', 'copy.') as subject", "* except (subject)")
        .writeStream.format("contrail")
        .options(url=running.url, stream=COPY, sourceStream=STREAM)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert lines_read(spark, running, COPY) == expected
