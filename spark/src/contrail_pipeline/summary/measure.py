"""The figures of the messages of a range, with Spark.

The stream is read once. Spark keeps what the figures need of each message: no payload, but its size
and a hash of it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.window import Window

from contrail_pipeline.summary import bins, patterns
from contrail_pipeline.summary.figures import (
    Content,
    Header,
    Pattern,
    Percentiles,
    Second,
    Shard,
    Slice,
    Spread,
    Subject,
    Timeline,
)

STEPS: Final = 9
"""The number of times that the steps after reading call ``step``."""
_SHARES: Final = [0.5, 0.9, 0.99]
_ACCURACY: Final = 10_000
"""A percentile is off by at most one rank in so many values."""
_DISTINCT_ERROR: Final = 0.01
_HEADERS_MAX: Final = 100
_SEPARATOR: Final = "\n"
"""Between the names of headers, which never have it."""


def read(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
    """The messages of a range, fixed now, with the columns that the figures need."""
    # Retention goes on while the job reads: most streams with limits would never have a summary.
    options = {**options, "failOnDataLoss": "false"}
    stream = spark.read.format("contrail").options(**options).load()
    names = f.array_join(f.array_sort(f.map_keys("headers")), _SEPARATOR)
    return stream.select(
        "shard",
        "seq",
        "subject",
        f.unix_micros("time").alias("at"),
        f.coalesce(f.octet_length("data"), f.lit(0)).cast("long").alias("size"),
        f.xxhash64("data").alias("payload"),
        names.alias("headers"),
    ).persist(StorageLevel.MEMORY_AND_DISK)


def totals_of(facts: DataFrame) -> Row:
    """The totals of all messages; the first action on the frame, which reads the stream."""
    return _one(
        facts,
        f.count("*").alias("messages"),
        f.sum("size").alias("bytes"),
        f.min("at").alias("first"),
        f.max("at").alias("last"),
        f.count("headers").alias("with_headers"),
        f.approx_count_distinct("payload", _DISTINCT_ERROR).alias("payloads"),
        *_spread_columns("size"),
    )


def content_of(facts: DataFrame, totals: Row, top: int, step: Callable[[], None]) -> Content:
    """All figures of the messages; ``step`` is called after each of STEPS steps."""
    if not totals["messages"]:
        return Content()
    subjects = facts.groupBy("subject").agg(*_sums()).persist(StorageLevel.MEMORY_AND_DISK)
    count = subjects.count()
    step()
    timeline = _timeline(facts, totals)
    step()
    gaps = _gaps(facts, timeline)
    step()
    by_messages = _first(subjects, "messages", top)
    step()
    within = _gaps_within(facts, by_messages)
    step()
    by_bytes = _first(subjects, "bytes", top)
    step()
    groups = _patterns(subjects, top) if count > top else ()
    step()
    headers, header_count = _headers(facts)
    step()
    sizes = _sizes(facts, totals)
    shards = _shards(facts)
    step()
    subjects.unpersist()
    return Content(
        messages=totals["messages"],
        bytes=totals["bytes"],
        first_us=totals["first"],
        last_us=totals["last"],
        subject_count=count,
        shards=shards,
        timeline=timeline,
        sizes=sizes,
        gaps_us=gaps,
        subjects=tuple(_subject(row, within.get(row["subject"])) for row in by_messages),
        largest=tuple(_subject(row, None) for row in by_bytes),
        patterns=groups,
        headers=headers,
        header_count=header_count,
        with_headers=totals["with_headers"],
        distinct_payloads=min(totals["payloads"], totals["messages"]),
    )


def _one(frame: DataFrame, *columns: Column) -> Row:
    """The only row of an aggregation of all rows."""
    [row] = frame.agg(*columns).collect()
    return row


def _sums() -> list[Column]:
    return [
        f.count("*").alias("messages"),
        f.sum("size").alias("bytes"),
        f.min("at").alias("first"),
        f.max("at").alias("last"),
    ]


def _timeline(facts: DataFrame, totals: Row) -> Timeline:
    width = bins.slice_width(totals["first"], totals["last"])
    rows = facts.groupBy(_floor("at", width).alias("start")).agg(*_sums()).orderBy("start")
    slices = tuple(
        Slice(row["start"], row["messages"], row["bytes"], row["first"], row["last"])
        for row in rows.collect()
    )
    seconds = facts.groupBy(_floor("at", bins.S).alias("start")).agg(*_sums())
    [busiest] = seconds.orderBy(f.desc("messages"), "start").limit(1).collect()
    return Timeline(width, slices, Second(busiest["start"], busiest["messages"], busiest["bytes"]))


def _gaps(facts: DataFrame, timeline: Timeline) -> Spread | None:
    """The times between messages of the stream.

    Each slice of the timeline is sorted by itself, so that Spark can do it in parallel. The gaps
    between the slices are known from their first and last times.
    """
    slices = timeline.slices
    if sum(each.messages for each in slices) < 2:  # noqa: PLR2004 - a gap is between two
        return None
    in_slice = Window.partitionBy(_floor("at", timeline.width_us)).orderBy("at")
    gaps = facts.select((f.col("at") - f.lag("at").over(in_slice)).alias("gap")).dropna()
    if between := bins.gaps_between([(each.first_us, each.last_us) for each in slices]):
        others = [(gap,) for gap in between]
        gaps = gaps.union(facts.sparkSession.createDataFrame(others, "gap long"))
    gaps.persist(StorageLevel.MEMORY_AND_DISK)
    found = _one(gaps, f.count("*").alias("messages"), *_spread_columns("gap"))
    spread = _spread(gaps, "gap", found, bins.gap_edges(found["most"]))
    gaps.unpersist()
    return spread


def _gaps_within(facts: DataFrame, subjects: Sequence[Row]) -> dict[str, Percentiles]:
    names = facts.sparkSession.createDataFrame(
        [(row["subject"],) for row in subjects], "subject string"
    )
    by_time = Window.partitionBy("subject").orderBy("at")
    gaps = (
        facts.join(f.broadcast(names), "subject")
        .select("subject", (f.col("at") - f.lag("at").over(by_time)).alias("gap"))
        .dropna()
    )
    found = gaps.groupBy("subject").agg(*_spread_columns("gap")).collect()
    return {row["subject"]: _percentiles(row) for row in found}


def _sizes(facts: DataFrame, totals: Row) -> Spread:
    return _spread(facts, "size", totals, bins.size_edges(totals["least"], totals["most"]))


def _first(subjects: DataFrame, column: str, top: int) -> list[Row]:
    return subjects.orderBy(f.desc(column), "subject").limit(top).collect()


def _patterns(subjects: DataFrame, top: int) -> tuple[Pattern, ...]:
    tokens = f.split("subject", r"\.")
    positions = range(patterns.TOKENS_MAX)
    distinct = _one(
        subjects,
        *(f.approx_count_distinct(f.get(tokens, at)).alias(str(at)) for at in positions),
    )
    order = patterns.wildcard_order(list(distinct))
    steps = range(len(order) + 1)
    groups = _one(
        subjects,
        *(f.approx_count_distinct(_pattern(tokens, order[:number])) for number in steps),
    )
    wild = order[: patterns.fewest_wildcards(list(groups), patterns.PATTERNS_MAX)]
    grouped = subjects.groupBy(_pattern(tokens, wild).alias("pattern")).agg(
        f.count("*").alias("subjects"),
        f.sum("messages").alias("messages"),
        f.sum("bytes").alias("bytes"),
    )
    rows = grouped.orderBy(f.desc("messages"), "pattern").limit(top)
    return tuple(Pattern(*row) for row in rows.collect())


def _pattern(tokens: Column, wild: Sequence[int]) -> Column:
    """As `patterns.pattern_of`, for a column."""
    shown = [
        f.when(f.get(tokens, at).isNotNull(), f.lit("*") if at in wild else f.get(tokens, at))
        for at in range(patterns.TOKENS_MAX)
    ]
    rest = f.when(f.size(tokens) > patterns.TOKENS_MAX, f.lit(">"))
    return f.concat_ws(".", *shown, rest)


def _headers(facts: DataFrame) -> tuple[tuple[Header, ...], int]:
    sets = facts.dropna(subset="headers").groupBy("headers").count()
    names = sets.select(f.explode(f.split("headers", _SEPARATOR)).alias("name"), "count")
    by_name = names.groupBy("name").agg(f.sum("count").alias("messages"))
    rows = by_name.withColumn("all", f.count("*").over(Window.partitionBy()))
    found = rows.orderBy(f.desc("messages"), "name").limit(_HEADERS_MAX).collect()
    headers = tuple(Header(row["name"], row["messages"]) for row in found)
    return headers, found[0]["all"] if found else 0


def _shards(facts: DataFrame) -> tuple[Shard, ...]:
    rows = facts.groupBy("shard").agg(f.count("*"), f.sum("size"), f.min("seq"), f.max("seq"))
    return tuple(Shard(*row) for row in rows.orderBy("shard").collect())


def _floor(column: str, width: int) -> Column:
    """The start of the part of a range to which a value belongs; also right before 1970."""
    return f.col(column) - f.pmod(f.col(column), f.lit(width))


def _spread_columns(column: str) -> list[Column]:
    return [
        f.percentile_approx(column, _SHARES, _ACCURACY).alias("shares"),
        f.min(column).alias("least"),
        f.max(column).alias("most"),
        f.avg(column).alias("mean"),
    ]


def _spread(frame: DataFrame, column: str, found: Row, edges: Sequence[int]) -> Spread:
    # The number of edges that are not above a value, less one.
    at = f.lit(-1)
    for edge in edges:
        at = at + (f.col(column) >= edge).cast("int")
    counts: dict[int, Any] = dict(frame.groupBy(at).count().collect())
    return Spread(
        found["messages"],
        found["least"],
        found["mean"],
        _percentiles(found),
        bins.filled_bins(counts, edges),
    )


def _percentiles(row: Row) -> Percentiles:
    p50, p90, p99 = row["shares"]
    return Percentiles(p50, p90, p99, row["most"])


def _subject(row: Row, gaps: Percentiles | None) -> Subject:
    return Subject(row["subject"], row["messages"], row["bytes"], row["first"], row["last"], gaps)
