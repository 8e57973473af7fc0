"""Streams whose subjects have keys, over every form of the server: as others, until one erases."""

import asyncio
import json
from typing import Any

import httpx
import pyarrow as pa
import pytest

from contrail_client import AsyncContrail, Contrail
from tests.contract.conftest import Stream, assert_problem

SNAPSHOT = {"content-type": "application/vnd.contrail.snapshot"}


@pytest.fixture
def keyed(unused: Stream) -> Stream:
    """A stream with subject keys."""
    answer = unused.configure(erasure="subject_key")
    assert answer.status_code == 201, answer.text
    assert answer.json()["config"]["erasure"] == "subject_key"
    return unused


def without_keys(keyed: Stream) -> Stream:
    """Another stream, which has none."""
    plain = Stream(keyed.client, f"{keyed.name}-plain", f"{keyed.prefix}-plain")
    assert plain.configure().status_code == 201
    return plain


def fill(stream: Stream) -> list[bytes]:
    """Messages of two subjects, published in several ways; answers their payloads."""
    assert stream.publish(b"one", "a", Nats_Msg_Id="m1", Msg_Header_Own="v").status_code == 201
    messages = [{"subject": stream.subject(rest), "data": rest * 3} for rest in ("a", "b")]
    stream.client.post(f"{stream.path}/messages", json={"messages": messages})
    message = {"subject": stream.subject("b"), "data_base64": "AP8=", "headers": {"H": ["1"]}}
    answer = stream.client.post(f"{stream.path}/messages", json={"messages": [message]})
    assert answer.status_code == 201, answer.text
    assert stream.publish(b"", "a").status_code == 201
    return [b"one", b"aaa", b"bbb", b"\x00\xff", b""]


def records(answer: httpx.Response) -> list[Any]:
    return [json.loads(one) for one in answer.text.splitlines()]


def test_messages_are_given_out_as_they_were_published(keyed: Stream) -> None:
    payloads = fill(keyed)
    client, path = keyed.client, keyed.path
    first = client.get(f"{path}/messages/1")
    assert first.content == b"one"
    again = keyed.publish(b"one", "a", Nats_Msg_Id="m1")
    assert (again.json()["seq"], again.json()["duplicate"]) == (1, True)
    page = client.get(f"{path}/messages").json()["messages"]
    assert [one["seq"] for one in page] == [1, 2, 3, 4, 5]
    shown = {name.lower(): values for name, values in page[0]["headers"].items()}
    assert shown["own"] == ["v"]
    replayed = client.get(
        f"{path}/replay", headers={"accept": "application/vnd.apache.arrow.stream"}
    )
    with pa.ipc.open_stream(replayed.content) as reader:
        rows = reader.read_all().to_pylist()
    assert [row["data"] for row in rows] == payloads
    lines = records(client.get(f"{path}/replay", headers={"accept": "application/x-ndjson"}))
    assert lines[-1] == {"end": True, "messages": 5}
    for policy in ("explicit", "none"):
        pulled = keyed.next(keyed.consumer(policy, ack_policy=policy), batch=10)
        assert [one["data"] for one in pulled if "data" in one][:3] == ["one", "aaa", "bbb"]
    headers_only = keyed.next(keyed.consumer("h", headers_only=True), batch=1)
    assert headers_only[0]["headers"]["Nats-Msg-Size"] == ["3"]
    size = sum(map(len, payloads))
    assert size < keyed.state()["bytes"] < size + 100


def test_messages_are_pushed_to_sockets(keyed: Stream) -> None:
    payloads = fill(keyed)

    async def work() -> list[bytes]:
        async with AsyncContrail(str(keyed.client.base_url)) as client:
            await client.ensure_consumer(keyed.name, "push")
            async with client.subscribe(keyed.name, "push") as messages:
                return [(await anext(messages)).payload for _ in payloads]

    assert asyncio.run(work()) == payloads


def test_erased_subject_is_shredded_and_the_others_stay(keyed: Stream) -> None:
    fill(keyed)
    answer = keyed.client.post(f"{keyed.path}/erase", json={"subject": keyed.subject("a")})
    assert answer.status_code == 202, answer.text
    receipt = answer.json()
    assert (receipt["shredded"], receipt["messages"]) == (True, 3)
    for seq in (1, 2, 5):
        assert_problem(keyed.client.get(f"{keyed.path}/messages/{seq}"), 404, 10037)
    with Contrail(str(keyed.client.base_url)) as contrail:
        done = contrail.erasure(receipt["id"], wait_s=60.0)
        assert (done.status, done.shredded) == ("done", True)
    page = keyed.client.get(f"{keyed.path}/messages").json()["messages"]
    assert [one["seq"] for one in page] == [3, 4]
    assert keyed.publish(b"again", "a").json()["seq"] == 6
    assert keyed.client.get(f"{keyed.path}/messages/6").content == b"again"


def test_receipt_of_sequences_and_of_streams_without_keys_says_that_none_was_destroyed(
    keyed: Stream,
) -> None:
    fill(keyed)
    plain = without_keys(keyed)
    plain.fill(3)
    for each, body in ((keyed, {"seqs": [1]}), (plain, {"subject": ">"})):
        receipt = each.client.post(f"{each.path}/erase?wait=60s", json=body).json()
        assert (receipt["status"], receipt["shredded"]) == ("done", False)


def test_stream_takes_no_keys_and_loses_none_once_it_is_made(keyed: Stream) -> None:
    assert_problem(keyed.configure(), 409, 10052, "/erasure")
    assert_problem(without_keys(keyed).configure(erasure="subject_key"), 409, 10052, "/erasure")
    assert keyed.configure(erasure="subject_key", max_msgs=9).status_code == 200


def test_restored_stream_is_shredded_apart_from_the_first(keyed: Stream) -> None:
    fill(keyed)
    data = keyed.client.get(f"{keyed.path}/snapshot").content
    keyed.client.delete(keyed.path)
    restored = Stream(keyed.client, f"{keyed.name}-copy", keyed.prefix)
    answer = keyed.client.put(f"{restored.path}/restore", content=data, headers=SNAPSHOT)
    assert answer.status_code == 201, answer.text
    assert answer.json()["config"]["erasure"] == "subject_key"
    page = restored.client.get(f"{restored.path}/messages").json()["messages"]
    assert [one.get("data") for one in page][:3] == ["one", "aaa", "bbb"]
    receipt = restored.client.post(f"{restored.path}/erase?wait=60s", json={"subject": ">"}).json()
    assert (receipt["status"], receipt["shredded"], receipt["messages"]) == ("done", True, 5)
    restored.client.delete(restored.path)


def test_keys_and_shards_go_together(unused: Stream) -> None:
    assert unused.configure(erasure="subject_key", shards=2).status_code == 201
    unused.fill(20)
    receipt = unused.client.post(
        f"{unused.path}/erase?wait=60s", json={"subject": unused.subject("1")}
    ).json()
    assert (receipt["shredded"], receipt["messages"]) == (True, 4)
    page = unused.client.get(f"{unused.path}/messages?limit=50").json()["messages"]
    kept = [str(number) for number in range(1, 21) if number % 5 != 1]
    assert sorted(one["data"] for one in page) == sorted(kept)
