"""The report's functions in Spark, against the same figures taken from the CSV in plain Python."""

import json
import statistics
from collections import defaultdict

import pytest
from pyspark.sql import SparkSession

from contrail_flights.dataset import Flight, load_dataset
from contrail_flights.report import Report, make_report
from contrail_flights.tally import tally_of

pytestmark = pytest.mark.spark

LIMIT = 4_000


@pytest.fixture(scope="module")
def flights() -> list[Flight]:
    """The first flights of the year."""
    return load_dataset(LIMIT).flights


@pytest.fixture(scope="module")
def report(spark: SparkSession, flights: list[Flight]) -> Report:
    """A report on them."""
    messages = spark.createDataFrame(
        [(flight.subject, flight.payload) for flight in flights], "subject string, data binary"
    )
    return make_report(messages, {"UA": "United Air Lines Inc."}, {"JFK": "John F Kennedy Intl"})


def percentile(values: list[float], share: float) -> float:
    """The percentile with linear interpolation between neighbours."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def test_spark_tallies_what_python_tallies(report: Report, flights: list[Flight]) -> None:
    assert report.tally == tally_of((flight.subject, flight.payload) for flight in flights)


def test_delays_of_an_airline_are_those_of_its_rows(report: Report, flights: list[Flight]) -> None:
    delays: dict[str, list[float | None]] = defaultdict(list)
    for flight in flights:
        row = json.loads(flight.payload)
        delays[row["carrier"]].append(row["dep_delay"])
    assert len(report.carriers.rows) == len(delays)
    for carrier, _, count, cancelled, mean, median, p90 in report.carriers.rows:
        flown = [delay for delay in delays[str(carrier)] if delay is not None]
        assert count == len(delays[str(carrier)])
        assert cancelled == len(delays[str(carrier)]) - len(flown)
        assert mean == pytest.approx(statistics.mean(flown), abs=0.0501)
        assert median == pytest.approx(statistics.median(flown))
        assert p90 == pytest.approx(percentile(flown, 0.9), abs=0.0501)


def test_tables_are_sorted_by_what_they_are_about(report: Report) -> None:
    for table in (report.carriers, report.airports, report.destinations):
        means = [float(str(mean)) for mean in table.column("mean_delay")]
        assert means == sorted(means, reverse=True)
    counts = [int(str(count)) for count in report.routes.column("flights")]
    assert counts == sorted(counts, reverse=True)
    assert len(counts) == 20


def test_every_flight_is_counted_once_in_each_grouping(report: Report) -> None:
    for table in (report.carriers, report.airports):
        assert sum(int(str(count)) for count in table.column("flights")) == LIMIT


def test_rare_destinations_are_left_out(report: Report) -> None:
    assert all(int(str(count)) >= 365 for count in report.destinations.column("flights"))


def test_names_stand_beside_codes_and_codes_where_no_name_is_known(report: Report) -> None:
    names = dict(
        zip(report.carriers.column("carrier"), report.carriers.column("name"), strict=True)
    )
    assert (names["UA"], names["DL"]) == ("United Air Lines Inc.", "DL")


def test_an_empty_stream_makes_an_empty_report(spark: SparkSession) -> None:
    nothing = spark.createDataFrame([], "subject string, data binary")
    report = make_report(nothing, {}, {})
    assert report.tally == tally_of([])
    assert report.carriers.rows == []
