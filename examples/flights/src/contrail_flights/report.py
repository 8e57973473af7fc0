"""The Spark job: read the stream as a DataFrame, tally it, and summarise the year."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf

from contrail_flights.tally import SEPARATOR, Tally

SPLITS: Final = 4
ROUTES_SHOWN: Final = 20
DESTINATION_FLIGHTS_MIN: Final = 365
"""Destinations with less than one flight a day are left out: their averages mean little."""

_PAYLOAD: Final = (
    "origin string, dest string, carrier string, dep_time int, dep_delay double, arr_delay double"
)


Value = str | int | float | None


@dataclass(frozen=True, slots=True)
class Table:
    """Aggregated rows under their column names, for the console, Markdown and CSV alike."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Value, ...]]

    def column(self, name: str) -> list[Value]:
        """All values of one column, from the first row to the last."""
        position = self.columns.index(name)
        return [row[position] for row in self.rows]


@dataclass(frozen=True, slots=True)
class Report:
    """The ``tally`` of what Spark read, and the tables made from it. Delays are in minutes."""

    tally: Tally
    carriers: Table
    airports: Table
    destinations: Table
    routes: Table

    @property
    def tables(self) -> tuple[Table, ...]:
        """All tables, in the order they are shown."""
        return (self.carriers, self.airports, self.destinations, self.routes)


def read_stream(
    spark: SparkSession, url: str, stream: str, token_file: Path | None = None
) -> DataFrame:
    """The stream as ``subject`` and ``data``: the two columns the report needs.

    Spark gets the path of a token file, not the token: each executor reads the file itself.
    """
    reader = spark.read.format("contrail")
    if token_file is not None:
        reader = reader.option("tokenFile", str(token_file))
    return (
        reader.option("url", url)
        .option("stream", stream)
        .option("splits", SPLITS)
        .option("columns", "subject,data")
        .load()
    )


def make_report(
    messages: DataFrame, airlines: Mapping[str, str], airports: Mapping[str, str]
) -> Report:
    """Tally and tables of ``messages``, whose ``data`` are flights as JSON.

    The names of airlines and airports are looked up by their code.
    """
    flights = parse_flights(messages).persist()
    try:
        return Report(
            tally=tally_of_flights(flights),
            carriers=_carriers(flights, airlines),
            airports=_airports(flights, airports),
            destinations=_destinations(flights, airports),
            routes=_routes(flights),
        )
    finally:
        flights.unpersist()


def parse_flights(messages: DataFrame) -> DataFrame:
    """The fields that the report uses, and ``crc``: each message's part of the checksum."""
    text = sf.concat(sf.col("subject").cast("binary"), sf.lit(SEPARATOR), sf.col("data"))
    fields = sf.from_json(sf.col("data").cast("string"), _PAYLOAD)
    return messages.select(sf.crc32(text).alias("crc"), fields.alias("flight")).select(
        "crc", "flight.*"
    )


def tally_of_flights(flights: DataFrame) -> Tally:
    """Count and checksum of all flights that were read."""
    row = flights.agg(sf.count("*"), sf.coalesce(sf.sum("crc"), sf.lit(0))).collect()[0]
    return Tally(row[0], row[1])


_DELAY_COLUMNS: Final = ("flights", "cancelled", "mean_delay", "median_delay", "p90_delay")


def _delays(delay: str) -> list[Column]:
    """The columns ``_DELAY_COLUMNS``; a flight that never left counts as cancelled."""
    values = (
        sf.count("*"),
        sf.count_if(sf.col("dep_time").isNull()),
        sf.round(sf.avg(delay), 1),
        sf.round(sf.percentile(delay, 0.5), 1),
        sf.round(sf.percentile(delay, 0.9), 1),
    )
    return [value.alias(name) for value, name in zip(values, _DELAY_COLUMNS, strict=True)]


def _by_mean_delay(grouped: DataFrame, key: str) -> DataFrame:
    return grouped.orderBy(sf.desc_nulls_last("mean_delay"), key)


def _carriers(flights: DataFrame, airlines: Mapping[str, str]) -> Table:
    grouped = flights.groupBy("carrier").agg(*_delays("dep_delay"))
    return Table(
        "carriers",
        "Departure delay by airline (minutes)",
        ("carrier", "name", *_DELAY_COLUMNS),
        _named(_by_mean_delay(grouped, "carrier"), airlines),
    )


def _airports(flights: DataFrame, airports: Mapping[str, str]) -> Table:
    grouped = flights.groupBy("origin").agg(*_delays("dep_delay"))
    return Table(
        "airports",
        "Departure delay by airport of origin (minutes)",
        ("origin", "name", *_DELAY_COLUMNS),
        _named(_by_mean_delay(grouped, "origin"), airports),
    )


def _destinations(flights: DataFrame, airports: Mapping[str, str]) -> Table:
    grouped = flights.groupBy("dest").agg(*_delays("arr_delay"))
    frequent = grouped.filter(sf.col("flights") >= DESTINATION_FLIGHTS_MIN)
    return Table(
        "destinations",
        "Arrival delay by destination, at least one flight a day (minutes)",
        ("dest", "name", *_DELAY_COLUMNS),
        _named(_by_mean_delay(frequent, "dest"), airports),
    )


def _routes(flights: DataFrame) -> Table:
    grouped = flights.groupBy("origin", "dest").agg(*_delays("dep_delay"))
    busiest = grouped.orderBy(sf.desc("flights"), "origin", "dest").limit(ROUTES_SHOWN)
    return Table(
        "routes",
        f"The {ROUTES_SHOWN} busiest routes (departure delay in minutes)",
        ("origin", "dest", *_DELAY_COLUMNS),
        [tuple(row) for row in busiest.collect()],
    )


def _named(frame: DataFrame, names: Mapping[str, str]) -> list[tuple[Value, ...]]:
    """The rows with a name instead of the code in the second column, if there is one."""
    rows: Sequence[tuple[Value, ...]] = [tuple(row) for row in frame.collect()]
    return [(row[0], names.get(str(row[0]), str(row[0])), *row[1:]) for row in rows]
