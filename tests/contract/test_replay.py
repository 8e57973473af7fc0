"""Bulk replay: plan, then stream, in each form."""

import collections
import itertools
import json
import socket
from typing import Any

import httpx
import msgspec
import pyarrow as pa
import pytest

from tests.contract.conftest import Stream, assert_problem
from tests.support.each import each
from tests.support.servers import TIMEOUT_S, ServerProcess

pytestmark = pytest.mark.split

NDJSON = {"accept": "application/x-ndjson"}
MSGPACK = {"accept": "application/vnd.msgpack"}


def records(answer: httpx.Response) -> list[Any]:
    return [json.loads(one) for one in answer.text.splitlines()]


def table(answer: httpx.Response) -> pa.Table:
    with pa.ipc.open_stream(answer.content) as reader:
        return reader.read_all()


def test_plan_covers_the_stream_without_gaps(stream: Stream) -> None:
    stream.fill(1000)
    plan = stream.client.get(f"{stream.path}/replay/plan?splits=4").json()
    assert plan.keys() == {"stream", "incarnation", "splits", "shards"}
    assert plan["stream"] == stream.name
    splits = plan["splits"]
    assert splits[0]["from_seq"] == 1
    assert splits[-1]["to_seq"] == 1000
    assert all(one["to_seq"] + 1 == other["from_seq"] for one, other in itertools.pairwise(splits))
    assert {one["shard"] for one in splits} == {0}
    assert sum(one["messages"] for one in splits) == 1000
    assert splits[0].keys() == {"shard", "from_seq", "to_seq", "messages", "bytes"}


def test_plan_is_clipped_to_the_range(stream: Stream) -> None:
    stream.fill(20)
    plan = stream.client.get(f"{stream.path}/replay/plan?from_seq=5&to_seq=9").json()
    assert (plan["splits"][0]["from_seq"], plan["splits"][-1]["to_seq"]) == (5, 9)


def test_plan_is_clipped_to_what_is_kept_and_says_where_that_begins(stream: Stream) -> None:
    stream.configure(max_msgs=5)
    stream.fill(20)
    plan = stream.client.get(f"{stream.path}/replay/plan?from_seq=3&to_seq=99").json()
    assert (plan["splits"][0]["from_seq"], plan["splits"][-1]["to_seq"]) == (16, 20)


def test_a_large_range_has_more_splits_than_asked_for(stream: Stream) -> None:
    for _ in range(4):
        stream.fill(1000)
    plan = stream.client.get(f"{stream.path}/replay/plan?split_bytes=1").json()
    sizes = [one["bytes"] for one in plan["splits"]]
    assert len(sizes) > 1
    assert (plan["splits"][0]["from_seq"], plan["splits"][-1]["to_seq"]) == (1, 4000)
    for query, splits in ((f"split_bytes={sum(sizes)}", 1), (f"split_bytes={sum(sizes) - 1}", 2)):
        plan = stream.client.get(f"{stream.path}/replay/plan?{query}").json()
        assert len(plan["splits"]) == splits


def test_plan_of_an_empty_stream_has_no_splits(stream: Stream) -> None:
    assert stream.client.get(f"{stream.path}/replay/plan").json()["splits"] == []


def test_plan_has_the_bounds_of_the_stream_whatever_the_range(stream: Stream) -> None:
    def bounds(query: str) -> Any:
        return stream.client.get(f"{stream.path}/replay/plan?{query}").json()["shards"]

    assert bounds("") == [{"shard": 0, "first_seq": 1, "last_seq": 0}]
    stream.fill(20)
    stream.client.post(f"{stream.path}/purge", json={"up_to_seq": 6})
    for query in ("", "from_seq=9&to_seq=11", "from_seq=21", "end_time=1970-01-02T00:00:00Z"):
        assert bounds(query) == [{"shard": 0, "first_seq": 6, "last_seq": 20}]
    stream.client.post(f"{stream.path}/purge")
    assert bounds("") == [{"shard": 0, "first_seq": 21, "last_seq": 20}]


@each(
    "query",
    [
        "splits=0",
        "splits=1025",
        "splits=x",
        "split_bytes=-1",
        "split_bytes=9223372036854775808",
        "from_seq=-1",
        "start_time=now",
        "end_time=x",
        "subject=a..b",
        "subject=a.b%20c..d",
        "subject=%20",
        f"subject={'+'.join(['a'] * 257)}",
    ],
)
def test_bad_plan_parameter_is_422(stream: Stream, query: str) -> None:
    answer = stream.client.get(f"{stream.path}/replay/plan?{query}")
    assert_problem(answer, 422, None, query.partition("=")[0])


def test_arrow_is_the_default_and_has_the_documented_schema(stream: Stream) -> None:
    stream.publish(b"\x00\xff", rest="x", Msg_Header_A="1")
    stream.publish(b"", rest="y")
    answer = stream.client.get(f"{stream.path}/replay")
    assert answer.headers["content-type"] == "application/vnd.apache.arrow.stream"
    found = table(answer)
    assert {field.name: str(field.type) for field in found.schema} == {
        "shard": "int32",
        "seq": "int64",
        "time": "timestamp[ns, tz=UTC]",
        "subject": "string",
        "headers": "map<string, list<item: string>>",
        "data": "binary",
    }
    rows = found.drop_columns(["time"]).to_pylist()
    assert rows == [
        {
            "shard": 0,
            "seq": 1,
            "subject": stream.subject("x"),
            "headers": [("A", ["1"])],
            "data": b"\x00\xff",
        },
        {"shard": 0, "seq": 2, "subject": stream.subject("y"), "headers": [], "data": b""},
    ]


def test_ndjson_ends_with_its_count(stream: Stream) -> None:
    stream.fill(5)
    found = records(stream.client.get(f"{stream.path}/replay", headers=NDJSON))
    assert [one["seq"] for one in found[:-1]] == [1, 2, 3, 4, 5]
    assert found[-1] == {"end": True, "messages": 5}


def test_msgpack_ends_with_its_count(stream: Stream) -> None:
    stream.fill(3)
    answer = stream.client.get(f"{stream.path}/replay", headers=MSGPACK)
    assert answer.headers["content-type"] == "application/vnd.msgpack"
    end = msgspec.msgpack.encode({"end": True, "messages": 3})
    assert answer.content.endswith(end)
    assert b"\xc4\x01" in answer.content  # payloads are bytes


def test_range_is_clipped_exactly(stream: Stream) -> None:
    stream.fill(1000)
    for low, high in ((1, 1), (17, 423), (1000, 1000), (1, 1000)):
        answer = stream.client.get(f"{stream.path}/replay?from_seq={low}&to_seq={high}")
        assert table(answer).column("seq").to_pylist() == list(range(low, high + 1))


def test_splits_of_a_plan_together_are_the_stream(stream: Stream) -> None:
    stream.fill(3000)
    stream.client.delete(f"{stream.path}/messages/1500")
    plan = stream.client.get(f"{stream.path}/replay/plan?splits=3").json()
    seen: list[int] = []
    for split in plan["splits"]:
        query = {
            "shard": split["shard"],
            "from_seq": split["from_seq"],
            "to_seq": split["to_seq"],
            "incarnation": plan["incarnation"],
        }
        seen += (
            table(stream.client.get(f"{stream.path}/replay", params=query))
            .column("seq")
            .to_pylist()
        )
    assert seen == [seq for seq in range(1, 3001) if seq != 1500]


def test_subject_and_columns_are_selected(stream: Stream) -> None:
    stream.fill(20)
    query = {"subject": stream.subject("3"), "columns": "seq,data"}
    found = table(stream.client.get(f"{stream.path}/replay", params=query))
    assert found.column_names == ["seq", "data"]
    assert found.column("seq").to_pylist() == [3, 8, 13, 18]


@pytest.mark.parametrize("repeats", [1, 127])
def test_a_message_must_match_one_of_several_filters(stream: Stream, repeats: int) -> None:
    stream.fill(20)
    filters = [stream.subject("3"), stream.subject("1")] * repeats
    query = {"subject": " ".join([*filters, "none.>", "none.*"]), "columns": "seq"}
    found = table(stream.client.get(f"{stream.path}/replay", params=query))
    assert found.column("seq").to_pylist() == [1, 3, 6, 8, 11, 13, 16, 18]


def test_schema_for_spark_has_microseconds(stream: Stream) -> None:
    stream.fill(2)
    found = table(stream.client.get(f"{stream.path}/replay?schema=spark"))
    assert str(found.schema.field("time").type) == "timestamp[us, tz=UTC]"


def test_empty_stream_replays_as_empty(stream: Stream) -> None:
    assert table(stream.client.get(f"{stream.path}/replay")).num_rows == 0
    assert records(stream.client.get(f"{stream.path}/replay", headers=NDJSON)) == [
        {"end": True, "messages": 0}
    ]


def test_range_below_what_is_kept_is_410_unless_clamped(stream: Stream) -> None:
    stream.configure(max_msgs=5)
    stream.fill(20)
    problem = assert_problem(stream.client.get(f"{stream.path}/replay?from_seq=3"), 410)
    assert "16" in problem["detail"]
    clamped = stream.client.get(f"{stream.path}/replay?from_seq=3&clamp=true")
    assert table(clamped).column("seq").to_pylist() == [16, 17, 18, 19, 20]


@pytest.mark.long
@pytest.mark.parametrize("accept", ["*/*", NDJSON["accept"], MSGPACK["accept"]])
def test_replay_overtaken_by_a_purge_is_cut_and_asking_again_is_410(
    server: ServerProcess, stream: Stream, accept: str
) -> None:
    for _ in range(36):
        stream.publish(bytes(1_000_000))
    target = f"{stream.path}/replay?from_seq=1&to_seq=36"
    # What this side has room for is far less than the body, so the server waits in its midst.
    little = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)])
    with (
        httpx.Client(
            base_url=server.url, timeout=TIMEOUT_S, transport=little, headers={"accept": accept}
        ) as reader,
        reader.stream("GET", target) as answer,
    ):
        pieces = answer.iter_raw()
        next(pieces)
        assert stream.client.post(f"{stream.path}/purge").json() == {"purged": 36}
        with pytest.raises(httpx.RemoteProtocolError):
            collections.deque(pieces, maxlen=0)
    assert_problem(stream.client.get(target), 410)


def test_range_above_what_is_stored_is_503(stream: Stream) -> None:
    stream.fill(3)
    refused = assert_problem(stream.client.get(f"{stream.path}/replay?to_seq=4"), 503, 20007)
    assert refused["applied"] is False


def test_another_incarnation_is_409(stream: Stream) -> None:
    stream.fill(3)
    incarnation = stream.client.get(f"{stream.path}/replay/plan").json()["incarnation"]
    stream.client.delete(stream.path)
    stream.configure()
    stream.fill(3)
    answer = stream.client.get(f"{stream.path}/replay?incarnation={incarnation}")
    assert_problem(answer, 409)


@each(
    "query",
    [
        "shard=1",
        "columns=seq,nope",
        "columns=seq,seq",
        "schema=other",
        "subject=a..b",
        "subject=+",
        "clamp=maybe",
    ],
)
def test_bad_replay_parameter_is_422(stream: Stream, query: str) -> None:
    answer = stream.client.get(f"{stream.path}/replay?{query}")
    assert_problem(answer, 422, None, query.partition("=")[0])


def test_spark_schema_is_of_arrow_only(stream: Stream) -> None:
    answer = stream.client.get(f"{stream.path}/replay?schema=spark", headers=NDJSON)
    assert_problem(answer, 422, None, "schema")


def test_other_form_is_406(stream: Stream) -> None:
    answer = stream.client.get(f"{stream.path}/replay", headers={"accept": "text/csv"})
    assert_problem(answer, 406)
