"""The report: complete, well-formed, and harmless whatever the names are."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

import msgspec
import pytest
from msgspec.structs import replace

from contrail_pipeline.bounds import Bounds
from contrail_pipeline.summary.bins import filled_bins, gap_edges, size_edges
from contrail_pipeline.summary.figures import (
    Consumer,
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
from contrail_pipeline.summary.page import page

START = 1_369_000_000_000_000
HOSTILE = "a.<script>alert(1)</script>.\"'&amp;\u202eevil\x1b[31m"
VOID = {"meta", "br"}


def summary(**content: object) -> Summary:
    """The summary of a stream with ten messages of 100 to 109 bytes, one a second."""
    gaps = Percentiles(1_000_000, 1_000_000, 1_000_000, 1_000_000)
    subject = Subject("a.b", 10, 1_045, START, START + 9_000_000, gaps)
    figures = Content(
        messages=10,
        bytes=1_045,
        first_us=START,
        last_us=START + 9_000_000,
        subject_count=1,
        shards=(Shard(0, 10, 1_045, 1, 10),),
        timeline=Timeline(
            1_000_000,
            tuple(
                Slice(START + at * 1_000_000, 1, 100 + at, START + at * 1_000_000, START)
                for at in range(10)
            ),
            Second(START, 1, 100),
        ),
        sizes=Spread(
            10,
            100,
            104.5,
            Percentiles(104, 108, 109, 109),
            filled_bins(dict.fromkeys(range(10), 1), size_edges(100, 109)),
        ),
        gaps_us=Spread(9, 1_000_000, 1e6, gaps, filled_bins({13: 9}, gap_edges(1_000_000))),
        subjects=(subject,),
        largest=(subject,),
        distinct_payloads=10,
    )
    return Summary(
        stream="S",
        made_us=START + 60_000_000,
        bounds=Bounds(),
        config={"name": "S", "subjects": ["a.>"], "max_msgs": -1, "retention": "limits"},
        state={"messages": 10, "bytes": 1_045},
        content=msgspec.structs.replace(figures, **content),
        consumers=(),
        consumer_count=0,
    )


def consumer(**changes: object) -> Consumer:
    found = Consumer(
        name="billing",
        filters=("a.*",),
        pending=7,
        ack_pending=3,
        redelivered=1,
        floor_distance=4,
        oldest_us=START,
        oldest_age_us=60_000_000,
        last_us=START,
        ack_policy="explicit",
        max_deliver=5,
    )
    return replace(found, **changes)


@dataclass
class Seen(HTMLParser):
    """The tags and texts of a page; an assertion fails if they are not nested."""

    open: list[str] = field(default_factory=list)
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def named(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attributes for name, attributes in self.tags if name == tag)

    @property
    def text(self) -> str:
        return "".join(self.texts).replace("\N{NO-BREAK SPACE}", " ")


def seen(found: Summary) -> Seen:
    parser = Seen()
    parser.feed(page(found))
    parser.close()
    assert parser.open == []
    return parser


def test_the_report_has_the_figures() -> None:
    text = seen(summary()).text
    assert "10 messages with 1 KiB of payload, stored in 9 s: 1.11/s on average." in text
    assert "All messages have one subject: a.b." in text
    assert "The longest pause is 1 s." in text
    assert "The stream has no consumers." in text
    assert "No message has a header." in text


def test_the_report_loads_and_runs_nothing() -> None:
    page_ = seen(summary())
    names = {name for name, _ in page_.tags}
    assert names.isdisjoint({"script", "img", "link", "iframe", "object", "form"})
    attributes = {name for _, given in page_.tags for name in given}
    assert not any(name.startswith("on") for name in attributes)
    assert attributes.isdisjoint({"src", "xlink:href"})
    assert {link["href"][:1] for link in page_.named("a") if link["href"]} == {"#"}
    [policy] = [meta for meta in page_.named("meta") if "http-equiv" in meta]
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


def test_every_link_leads_to_a_section() -> None:
    found = seen(summary())
    sections = {each["id"] for each in found.named("section")}
    assert {each["href"] for each in found.named("a")} == {f"#{name}" for name in sections}


def test_every_chart_says_what_it_shows() -> None:
    charts = list(seen(summary()).named("svg"))
    assert len(charts) == 2 * 4, "each of them for wide and for narrow screens"
    assert {chart["role"] for chart in charts} == {"img"}
    assert {chart["aria-label"] for chart in charts} == {
        "Messages over time: messages per second, by time of storage (UTC), 19 May 2013",
        "Bytes over time: payload per second, by time of storage (UTC), 19 May 2013",
        "Time between messages: messages, by time since the message before",
        "Sizes: messages, by size of the payload",
    }


def test_hostile_names_stay_names() -> None:
    subject = Subject(HOSTILE, 10, 1_045, START, START)
    found = summary(
        subject_count=2,
        subjects=(subject,),
        largest=(replace(subject, subject=HOSTILE + "2"),),
        patterns=(Pattern(HOSTILE, 2, 10, 1_045),),
        headers=(Header(HOSTILE, 10),),
        header_count=1,
    )
    found = replace(
        found,
        stream=HOSTILE,
        bounds=Bounds((HOSTILE,), start_time=HOSTILE),
        config={HOSTILE: HOSTILE},
        state={HOSTILE: HOSTILE},
        consumers=(consumer(name=HOSTILE, filters=(HOSTILE,)),),
        consumer_count=1,
    )
    shown = seen(found)
    assert "script" not in {name for name, _ in shown.tags}
    assert "a.<script>alert(1)</script>.\"'&amp;\\u202eevil\\x1b[31m" in shown.text
    assert "\x1b" not in shown.text
    assert "\u202e" not in shown.text


def test_nothing_to_summarise() -> None:
    shown = seen(replace(summary(), content=Content()))
    assert "There are no messages in this range." in shown.text
    assert list(shown.named("svg")) == []
    assert {each["id"] for each in shown.named("section")} == {"stream"}


def test_one_message() -> None:
    shown = seen(
        summary(
            messages=1,
            bytes=0,
            last_us=START,
            timeline=Timeline(1_000, (Slice(START, 1, 0, START, START),), Second(START, 1, 0)),
            sizes=Spread(1, 0, 0.0, Percentiles(0, 0, 0, 0), filled_bins({0: 1}, [0])),
            gaps_us=None,
        )
    )
    assert "1 message with 0 B of payload, stored at 19 May 2013, 21:46:40 UTC." in shown.text
    assert "All payloads have 0 B." in shown.text
    assert "Time between messages" not in shown.text


def test_messages_of_the_same_time_have_no_chart_of_times() -> None:
    gaps = Spread(9, 0, 0.0, Percentiles(0, 0, 0, 0), filled_bins({0: 9}, [0]))
    shown = seen(summary(gaps_us=gaps))
    assert "100 % of the messages have the same time as the one before" in shown.text
    assert len(list(shown.named("svg"))) == 2 * 3


@pytest.mark.parametrize(("age_us", "late"), [(3_599_999_999, False), (3_600_000_000, True)])
def test_a_message_that_waits_for_an_hour_is_highlighted(age_us: int, late: bool) -> None:
    found = replace(summary(), consumers=(consumer(oldest_age_us=age_us),), consumer_count=1)
    shown = seen(found)
    assert any(each.get("class") == "late" for each in shown.named("span")) is late
    assert "Consumer billing is most behind: 10 messages to deliver or acknowledge" in shown.text
    assert "1m ago" in shown.text


def test_consumers_that_are_left_out_are_counted() -> None:
    found = replace(summary(), consumers=(consumer(),), consumer_count=1_234)
    assert "The 1 of 1,234 that are most behind" in seen(found).text


def test_the_document_can_be_read_again() -> None:
    found = replace(summary(), consumers=(consumer(),), consumer_count=1)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Summary) == found
