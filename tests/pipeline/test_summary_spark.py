"""All figures of a summary, compared with those computed from the same messages in Python."""

import json
import subprocess
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession

from contrail_client import Contrail, Message, StoredMessage
from contrail_pipeline.summary import bins, measure
from contrail_pipeline.summary.backlog import consumers_of
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
    Summary,
    Timeline,
)
from contrail_pipeline.summary.patterns import pattern_of
from tests.pipeline.commands import COMMAND
from tests.support.command import run_contrail
from tests.support.servers import ServerProcess

pytestmark = pytest.mark.spark

TOP = 5
BATCHES = 12
HOSTILE = "s.<b>'&quot;.x.new"


@pytest.fixture(scope="module")
def stored(client: Contrail) -> list[StoredMessage]:
    """Stream S in three shards: several batches, each of one time, with gaps between them."""
    client.create_stream("S", {"subjects": ["s.>"], "shards": 3})
    for batch in range(BATCHES):
        messages = [_message(batch * 100 + at) for at in range(100)]
        client.publish_batch("S", messages).raise_refused()
    client.publish_batch("S", [Message(HOSTILE, b"", {"X&'s": "1"})]).raise_refused()
    found = list(client.replay("S"))
    assert len(found) == BATCHES * 100 + 1
    return found


def _message(number: int) -> Message:
    headers = {"Trace": str(number), "Content-Type": "text/plain"} if number % 4 == 0 else None
    kind = ("new", "paid")[number % 3 == 0]
    return Message(f"s.{number % 47}.{number % 2}.{kind}", bytes(number % 700), headers)


def content(spark: SparkSession, server: ServerProcess, stream: str, **options: str) -> Content:
    steps: list[None] = []
    facts = measure.read(spark, {"url": server.url, "stream": stream, **options})
    try:
        totals = measure.totals_of(facts)
        found = measure.content_of(facts, totals, TOP, lambda: steps.append(None))
    finally:
        facts.unpersist()
    assert len(steps) == (measure.STEPS if found.messages else 0)
    return found


def at_us(message: StoredMessage) -> int:
    return message.time_ns // 1_000


def percentiles(values: Iterable[int]) -> Percentiles:
    ordered = sorted(values)
    p50, p90, p99 = (ordered[-(-len(ordered) * share // 100) - 1] for share in (50, 90, 99))
    return Percentiles(p50, p90, p99, ordered[-1])


def spread(values: Sequence[int], edges: Sequence[int]) -> Spread:
    counts = Counter(bisect_right(edges, value) - 1 for value in values)
    return Spread(
        len(values),
        min(values),
        sum(values) / len(values),
        percentiles(values),
        bins.filled_bins(counts, edges),
    )


def grouped(
    messages: Iterable[StoredMessage], key: Callable[[StoredMessage], object]
) -> dict[object, list[StoredMessage]]:
    groups = defaultdict(list)
    for message in messages:
        groups[key(message)].append(message)
    return groups


def gaps(messages: Iterable[StoredMessage]) -> list[int]:
    return [after - before for before, after in pairwise(sorted(map(at_us, messages)))]


def size(messages: Iterable[StoredMessage]) -> int:
    return sum(len(message.payload) for message in messages)


def subject(name: str, messages: list[StoredMessage], *, with_gaps: bool) -> Subject:
    times = [at_us(message) for message in messages]
    between = gaps(messages) if with_gaps else []
    return Subject(
        name,
        len(messages),
        size(messages),
        min(times),
        max(times),
        percentiles(between) if between else None,
    )


def timeline(messages: list[StoredMessage]) -> Timeline:
    times = [at_us(message) for message in messages]
    width = bins.slice_width(min(times), max(times))
    slices = grouped(messages, lambda message: at_us(message) // width * width)
    seconds = grouped(messages, lambda message: at_us(message) // bins.S * bins.S)
    start, busiest = min(seconds.items(), key=lambda each: (-len(each[1]), each[0]))
    return Timeline(
        width,
        tuple(
            Slice(at, len(each), size(each), min(map(at_us, each)), max(map(at_us, each)))
            for at, each in sorted(slices.items())
        ),
        Second(start, len(busiest), size(busiest)),
    )


def expected(messages: list[StoredMessage], wild: Sequence[int]) -> Content:
    """What a summary of the messages should be, but for the estimate of different payloads."""
    times = [at_us(message) for message in messages]
    sizes = [len(message.payload) for message in messages]
    between = gaps(messages)
    subjects = grouped(messages, lambda message: message.subject)
    by_count = sorted(subjects, key=lambda name: (-len(subjects[name]), name))[:TOP]
    by_bytes = sorted(subjects, key=lambda name: (-size(subjects[name]), name))[:TOP]
    patterns = grouped(messages, lambda message: pattern_of(message.subject, wild))
    headers = Counter(name for message in messages for name in message.headers)
    return Content(
        messages=len(messages),
        bytes=sum(sizes),
        first_us=min(times),
        last_us=max(times),
        subject_count=len(subjects),
        shards=tuple(
            Shard(at, len(each), size(each), min(m.seq for m in each), max(m.seq for m in each))
            for at, each in sorted(grouped(messages, lambda message: message.shard or 0).items())
        ),
        timeline=timeline(messages),
        sizes=spread(sizes, bins.size_edges(min(sizes), max(sizes))),
        gaps_us=spread(between, bins.gap_edges(max(between))),
        subjects=tuple(subject(name, subjects[name], with_gaps=True) for name in by_count),
        largest=tuple(subject(name, subjects[name], with_gaps=False) for name in by_bytes),
        patterns=tuple(
            Pattern(name, len({m.subject for m in each}), len(each), size(each))
            for name, each in sorted(patterns.items(), key=lambda each: (-len(each[1]), each[0]))
        )[:TOP],
        headers=tuple(
            Header(name, number)
            for name, number in sorted(headers.items(), key=lambda each: (-each[1], each[0]))
        ),
        header_count=len(headers),
        with_headers=sum(bool(message.headers) for message in messages),
    )


def without_estimate(found: Content) -> Content:
    return msgspec.structs.replace(found, distinct_payloads=0)


def test_all_figures_are_those_of_the_messages(
    spark: SparkSession, running: ServerProcess, stored: list[StoredMessage]
) -> None:
    found = content(spark, running, "S")
    # The second token has 48 values, so it becomes a wildcard; the others stay.
    assert without_estimate(found) == expected(stored, wild=[1])
    assert found.distinct_payloads == pytest.approx(700, rel=0.02)


def test_only_the_range_is_summarised(
    spark: SparkSession, running: ServerProcess, stored: list[StoredMessage]
) -> None:
    found = content(spark, running, "S", subject="s.*.1.paid s.7.>")
    messages = [
        message
        for message in stored
        if message.subject.endswith(".1.paid") or message.subject.startswith("s.7.")
    ]
    assert found.messages == len(messages)
    assert without_estimate(found) == expected(messages, wild=[1])


def test_nothing_in_the_range(
    spark: SparkSession, running: ServerProcess, stored: list[StoredMessage]
) -> None:
    assert content(spark, running, "S", subject="s.none") == Content()


def test_one_message(
    spark: SparkSession, running: ServerProcess, stored: list[StoredMessage]
) -> None:
    found = content(spark, running, "S", subject=HOSTILE)
    at = max(map(at_us, stored))
    only = Subject(HOSTILE, 1, 0, at, at)
    assert (found.messages, found.bytes, found.gaps_us) == (1, 0, None)
    assert (found.subjects, found.largest, found.patterns) == ((only,), (only,), ())
    assert found.headers == (Header("X&'s", 1),)
    assert found.timeline == Timeline(
        bins.MS,
        (Slice(at // bins.MS * bins.MS, 1, 0, at, at),),
        Second(at // bins.S * bins.S, 1, 0),
    )


def test_a_hundred_thousand_subjects(
    spark: SparkSession, running: ServerProcess, client: Contrail
) -> None:
    client.create_stream("MANY", {"subjects": ["many.>"]})
    for start in range(0, 100_000, 5_000):
        names = (f"many.{start + at}.x" for at in range(5_000))
        client.publish_batch("MANY", [Message(name, b"1") for name in names]).raise_refused()
    found = content(spark, running, "MANY")
    assert found.subject_count == 100_000
    assert found.patterns == (Pattern("many.*.x", 100_000, 100_000, 100_000),)
    assert [each.subject for each in found.subjects[:2]] == ["many.0.x", "many.1.x"]
    assert found.distinct_payloads == 1


def test_the_backlog_of_consumers(client: Contrail, stored: list[StoredMessage]) -> None:
    client.put_consumer("S", "billing", {"filter_subjects": ["s.*.1.paid", "s.7.>"]})
    client.put_consumer("S", "idle", {"deliver_policy": "new"})
    [first, *_] = client.consumer("S", "billing").next(batch=5)
    client.consumer("S", "billing").ack(first, sync=True)
    now_us = at_us(stored[-1]) + 5_000_000
    found, count = consumers_of(client, "S", 1, now_us)
    matching = [
        message
        for message in stored
        if message.subject.endswith(".1.paid") or message.subject.startswith("s.7.")
    ]
    [billing] = found
    assert count == 2
    assert (billing.name, billing.filters) == ("billing", ("s.*.1.paid", "s.7.>"))
    assert (billing.pending, billing.ack_pending) == (len(matching) - 5, 4)
    left = [m for m in matching if (m.shard, m.seq) != (first.shard, first.seq)]
    assert billing.oldest_us == min(map(at_us, left))
    assert billing.oldest_age_us == now_us - billing.oldest_us
    nobody, _ = consumers_of(client, "S", 2, now_us)
    assert (nobody[1].name, nobody[1].behind, nobody[1].oldest_us) == ("idle", 0, None)


def test_the_command_writes_the_report_and_prints_the_document(
    running: ServerProcess, stored: list[StoredMessage], tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    ended = subprocess.run(
        [
            *COMMAND,
            "summary",
            "S",
            "--server",
            running.url,
            "--json",
            "--top",
            str(TOP),
            "--out",
            str(out),
        ],
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    [line] = ended.stdout.splitlines()
    document = json.loads(line)
    assert document.pop("report") == str(out)
    summary = msgspec.convert(document, Summary)
    assert without_estimate(summary.content) == expected(stored, wild=[1])
    assert summary.state["messages"] == len(stored)
    text = out.read_text(encoding="utf-8")
    assert "<h1>Stream S</h1>" in text
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def test_a_report_that_cannot_be_written_at_the_end_loses_no_figures(
    running: ServerProcess,
    stored: list[StoredMessage],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "reports"
    folder.mkdir()
    content_of = measure.content_of

    def then_the_folder_is_gone(*arguments: Any) -> Content:
        found = content_of(*arguments)
        folder.rmdir()
        return found

    monkeypatch.setattr(measure, "content_of", then_the_folder_is_gone)
    out = folder / "report.html"
    given = ["summary", "S", "--server", running.url, "--json", "--top", str(TOP)]
    done = run_contrail("pipeline", *given, "--out", str(out), env={})
    assert done.exit_code == 1
    said = f"the report {out} cannot be written: No such file or directory"
    assert json.loads(done.stderr.splitlines()[-1])["message"] == said
    document = json.loads(done.stdout)
    assert "report" not in document
    assert without_estimate(msgspec.convert(document, Summary).content) == expected(
        stored, wild=[1]
    )


def test_messages_that_are_removed_meanwhile_are_left_out(
    spark: SparkSession, running: ServerProcess, client: Contrail
) -> None:
    client.create_stream("SHRINKS", {"subjects": ["shrinks.>"]})
    messages = [Message("shrinks.a", "x") for _ in range(10)]
    client.publish_batch("SHRINKS", messages).raise_refused()
    facts = measure.read(spark, {"url": running.url, "stream": "SHRINKS"})
    try:
        client.purge_stream("SHRINKS", up_to_seq=5)
        kept = client.get_stream("SHRINKS").state.messages
        assert 0 < kept < 10
        assert measure.totals_of(facts)["messages"] == kept
    finally:
        facts.unpersist()
