"""Ordered subscriptions in columns: messages, credit, budgets, gaps and ends as one by one.

The columns are read here as a client's author would read them from the description alone.
"""

import base64
import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.contract.conftest import Stream
from tests.contract.talk import (
    JSON,
    MSGPACK,
    OP_BINARY,
    Frame,
    RawSocket,
    Talk,
    frame_bytes,
    wait_until,
)
from tests.support.each import each
from tests.support.servers import ServerProcess

pytestmark = pytest.mark.split

DOCUMENT: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parents[2] / "openapi" / "asyncapi.yaml").read_text(encoding="utf-8")
)
SCHEMA = {
    "$ref": "#/components/schemas/ColumnMessages",
    "components": DOCUMENT["components"],
}
WHOLE = {"msgs": 10_000, "bytes": 1 << 24}
COLUMNS = {"sid": "s", "ordered": True, "cols": True}


@pytest.fixture
def talk(server: ServerProcess) -> Iterator[Talk]:
    with Talk(server.url, MSGPACK) as opened:
        yield opened


def numbers(form: str, data: bytes) -> tuple[int, ...]:
    size = struct.calcsize(form)
    return struct.unpack(f"<{len(data) // size}{form}", data)


def parts(data: bytes, offsets: bytes) -> list[bytes]:
    return [data[start:stop] for start, stop in pairwise(numbers("I", offsets))]


def headers_of(cols: Frame) -> list[dict[str, list[str]]]:
    if "headers" not in cols:
        return [{} for _ in range(cols["count"])]
    found = cols["headers"]
    texts = [one.decode() for one in parts(found["texts"], found["text_offsets"])]
    values = [texts[a:b] for a, b in pairwise(numbers("I", found["value_offsets"]))]
    names = [one.decode() for one in parts(found["names"], found["name_offsets"])]
    entries = list(zip(names, values, strict=True))
    return [dict(entries[a:b]) for a, b in pairwise(numbers("I", found["entry_offsets"]))]


def time_text(time_ns: int) -> str:
    second = datetime.fromtimestamp(time_ns // 10**9, UTC)
    return f"{second:%Y-%m-%dT%H:%M:%S}.{time_ns % 10**9:09d}Z"


def rows(cols: Frame) -> list[Frame]:
    """The messages of columns in the form that frames have them one by one."""
    count = cols["count"]
    subjects = [cols["subjects"][at] for at in numbers("I", cols["subject_index"])]
    columns = zip(
        numbers("q", cols["seqs"]),
        subjects,
        numbers("q", cols["times_ns"]),
        headers_of(cols),
        parts(cols["data"], cols["offsets"]),
        strict=True,
    )
    return [
        {
            "stream": cols["stream"],
            "seq": seq,
            "subject": subject,
            "time": time_text(time_ns),
            "headers": headers,
            "consumer_seq": cols["first_consumer_seq"] + at,
            "num_delivered": 1,
            "num_pending": cols["num_pending"] + count - 1 - at,
            "data": data,
        }
        for at, (seq, subject, time_ns, headers, data) in enumerate(columns)
    ]


def received(talk: Talk, count: int) -> list[Frame]:
    """The next ``count`` messages, and exactly as many."""
    found: list[Frame] = []
    while len(found) < count:
        frame = talk.next("msgs")
        assert "messages" not in frame
        found += rows(frame["cols"])
    assert len(found) == count
    return found


def in_base64(value: Any) -> Any:
    """Bytes as the document, which speaks of JSON, describes them."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return (
        {name: in_base64(one) for name, one in value.items()} if isinstance(value, dict) else value
    )


def publish_many(stream: Stream, count: int, size: int = 0) -> None:
    """Messages of several batches, subjects and kinds of headers."""
    for first in range(0, count, 100):
        items = [
            {
                "subject": stream.subject(str(number % 3)),
                "data": f"{number}" + "x" * size,
                **({} if number % 2 else {"headers": {"N": [str(number), "ü"]}}),
            }
            for number in range(first, min(first + 100, count))
        ]
        answer = stream.client.post(f"{stream.path}/messages", json={"messages": items})
        assert answer.status_code == 201


# What is sent ------------------------------------------------------------------------------------
@pytest.mark.parametrize("filtered", [False, True])
def test_columns_say_what_messages_would(talk: Talk, stream: Stream, filtered: bool) -> None:
    publish_many(stream, 250)
    filters = {"filter_subjects": [stream.subject("0"), stream.subject("2")]} if filtered else {}
    fields = {"stream": stream.name, "ordered": True, "credit": WHOLE, **filters}
    answer = talk.done("sub", sid="o", **fields)
    one_by_one = talk.messages(answer["num_pending"])
    talk.done("sub", sid="s", cols=True, **fields)
    assert received(talk, len(one_by_one)) == one_by_one
    talk.nothing_more()


def test_frames_are_as_described(talk: Talk, stream: Stream) -> None:
    publish_many(stream, 2)
    talk.done("sub", stream=stream.name, credit={"msgs": 1}, **COLUMNS)
    validator = Draft202012Validator(SCHEMA)
    with_headers = in_base64(talk.next("msgs"))
    validator.validate(with_headers)
    assert "headers" in with_headers["cols"]
    talk.done("credit", sid="s", msgs=1)
    without = in_base64(talk.next("msgs"))
    validator.validate(without)
    assert "headers" not in without["cols"]


@each(
    ("form", "fields"),
    [
        (JSON, {"ordered": True}),
        (MSGPACK, {"ordered": False}),
        (MSGPACK, {"consumer": "c"}),
    ],
)
def test_columns_are_refused_where_there_are_none(
    server: ServerProcess, stream: Stream, form: str, fields: dict[str, Any]
) -> None:
    stream.consumer(ack_policy="none")
    with Talk(server.url, form) as talk:
        refused = talk.refused("sub", sid="s", stream=stream.name, cols=True, **fields)
        assert (refused["name"], refused["status"]) == ("invalid_field", 422)
        assert refused["errors"][0]["pointer"] == "/cols"


# Credit ------------------------------------------------------------------------------------------
def test_no_message_is_sent_beyond_the_credit_in_messages(talk: Talk, stream: Stream) -> None:
    publish_many(stream, 250)
    talk.done("sub", stream=stream.name, **COLUMNS)
    talk.nothing_more()
    first = 1
    for more in (1, 7, 150):
        talk.send({"op": "credit", "sid": "s", "msgs": more})
        assert [one["seq"] for one in received(talk, more)] == list(range(first, first + more))
        talk.nothing_more()
        first += more


def test_credit_in_bytes_counts_subject_headers_and_payload_and_ends_with_a_whole_message(
    talk: Talk, stream: Stream
) -> None:
    publish_many(stream, 20)
    talk.done("sub", sid="o", stream=stream.name, ordered=True, credit=WHOLE)
    sizes = [
        len(one["subject"]) + len(one["data"]) + (2 + 4 * 2 + len(f"{at}ü".encode())) * (1 - at % 2)
        for at, one in enumerate(talk.messages(20))
    ]
    for limit in (1, sizes[0], sizes[0] + 1, sum(sizes[:9]), sum(sizes[:9]) + 1):
        begun = sum(1 for at in range(20) if sum(sizes[:at]) < limit)
        sid = f"s{limit}"
        credit = {"msgs": 100, "bytes": limit}
        talk.done("sub", **{**COLUMNS, "sid": sid}, stream=stream.name, credit=credit)
        assert len(received(talk, begun)) == begun
        talk.nothing_more()
        owed = sum(sizes[:begun]) - limit
        talk.done("credit", sid=sid, bytes=owed)
        talk.nothing_more()
        talk.send({"op": "credit", "sid": sid, "bytes": 1})
        [another] = received(talk, 1)
        assert another["seq"] == begun + 1
        talk.done("unsub", sid=sid)


# Order, silence and ends -------------------------------------------------------------------------
def test_heartbeat_reports_the_progress_of_columns(talk: Talk, stream: Stream) -> None:
    publish_many(stream, 7)
    talk.done("connect", heartbeat="100ms")
    talk.done("sub", stream=stream.name, credit={"msgs": 5}, **COLUMNS)
    received(talk, 5)
    beat = talk.next("hb")
    assert (beat["sid"], beat["last_consumer_seq"], beat["last_stream_seq"]) == ("s", 5, 5)


def test_gap_reports_messages_that_were_removed_before_they_were_sent(
    talk: Talk, stream: Stream
) -> None:
    publish_many(stream, 20)
    talk.done("sub", stream=stream.name, credit={"msgs": 2}, **COLUMNS)
    received(talk, 2)
    stream.client.post(f"{stream.path}/purge", json={"up_to_seq": 11})
    talk.send({"op": "credit", "sid": "s", "msgs": 50})
    gap = talk.next("gap")
    assert (gap["first"], gap["last"]) == (3, 10)
    assert [one["seq"] for one in received(talk, 10)] == list(range(11, 21))


def test_message_that_comes_later_is_pushed_as_it_comes(talk: Talk, stream: Stream) -> None:
    talk.done("sub", stream=stream.name, credit=WHOLE, **COLUMNS)
    for number in range(1, 4):
        stream.publish(b"x")
        [message] = received(talk, 1)
        assert (message["seq"], message["consumer_seq"], message["num_pending"]) == (
            number,
            number,
            0,
        )


def test_consumer_lost_under_the_columns_is_created_again_after_what_was_sent(
    talk: Talk, stream: Stream
) -> None:
    publish_many(stream, 5)
    answer = talk.done("sub", stream=stream.name, credit=WHOLE, **COLUMNS)
    received(talk, 5)
    stream.client.delete(f"{stream.path}/consumers/{answer['consumer']}")
    publish_many(stream, 3)
    assert [one["seq"] for one in received(talk, 3)] == [6, 7, 8]


@pytest.mark.long
def test_columns_that_nobody_reads_spend_the_budget(own_server: ServerProcess) -> None:
    with own_server.client() as client:
        stream = Stream(client, "T", "t")
        assert stream.configure().status_code == 201
        for _ in range(25):
            assert stream.publish(b"x" * 1_000_000).status_code == 201
        with RawSocket(own_server.url, form=MSGPACK) as unread:
            unread.head()
            frame = {"op": "sub", "stream": "T", "credit": WHOLE | {"bytes": 1 << 30}, **COLUMNS}
            unread.send(frame_bytes(OP_BINARY, msgspec.msgpack.encode(frame)))
            closes = 'contrail_socket_closes_total{code="4008"} 1'
            wait_until(lambda: closes in client.get("/metrics").text)
            assert unread.close_code() == 4008


@pytest.mark.long
def test_socket_with_columns_is_notified_of_the_end_of_the_process(
    own_server: ServerProcess,
) -> None:
    with own_server.client() as client:
        stream = Stream(client, "T", "t")
        assert stream.configure().status_code == 201
        publish_many(stream, 5)
    with Talk(own_server.url, MSGPACK) as talk:
        talk.done("sub", stream="T", credit=WHOLE, **COLUMNS)
        received(talk, 5)
        assert own_server.stop() == 0
        assert talk.next("drain")["grace"] == "5s"
        assert talk.closed() == 4000
