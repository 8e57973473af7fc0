"""Times to live of messages, and the markers that they leave."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest

from contrail_client import Contrail, Message
from tests.contract.conftest import Stream, assert_problem
from tests.contract.talk import JSON, MSGPACK, Talk
from tests.support.each import each
from tests.support.servers import ServerProcess

PATIENCE_S = 60.0
PACKED = "application/vnd.msgpack"
MERGE_PATCH = {"content-type": "application/merge-patch+json"}


def until(stream: Stream, holds: Callable[[], bool]) -> None:
    """Ask again and again; in between a read waits for a message that never comes."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s
        stream.client.get(f"{stream.path}/messages?from_seq=1000000&wait=100ms")


def stored(stream: Stream) -> list[tuple[int, dict[str, list[str]], str]]:
    """Sequence, headers and payload of what the stream holds."""
    messages = stream.client.get(f"{stream.path}/messages").json()["messages"]
    return [(each["seq"], each["headers"], each["data"]) for each in messages]


def post(stream: Stream, *messages: dict[str, Any], form: str = "application/json") -> Any:
    """Publish a batch in one of its forms; answers the results."""
    body = json.dumps({"messages": messages}).encode()
    if form == "application/x-ndjson":
        body = b"".join(json.dumps(each).encode() + b"\n" for each in messages)
    answer = stream.client.post(
        f"{stream.path}/messages", content=body, headers={"content-type": form}
    )
    return answer.json()["results"]


# Publishing --------------------------------------------------------------------------------------
def test_message_leaves_when_its_time_is_over_and_others_stay(stream: Stream) -> None:
    assert stream.configure(allow_msg_ttl=True).status_code == 200
    stream.publish(b"stays")
    begun = time.monotonic()
    assert stream.publish(b"goes", rest="b", Nats_TTL="1s").json()["seq"] == 2
    stream.publish(b"stays", rest="b", Nats_TTL="1h")
    answer = stream.client.get(f"{stream.path}/messages/3")
    assert (answer.content, answer.headers["nats-ttl"]) == (b"stays", "1h")
    until(stream, lambda: stream.state()["messages"] == 2)
    assert time.monotonic() - begun > 0.9
    assert_problem(stream.client.get(f"{stream.path}/messages/2"), 404, 10037)
    state = stream.state()
    assert (state["first_seq"], state["last_seq"], state["num_deleted"]) == (1, 3, 1)


@pytest.mark.parametrize("form", ["application/json", "application/x-ndjson"])
def test_time_to_live_of_an_item_is_stored_as_a_header(stream: Stream, form: str) -> None:
    stream.configure(allow_msg_ttl=True)
    subject = stream.subject()
    results = post(
        stream,
        {"subject": subject, "data": "1", "ttl": 60},
        {"subject": subject, "data": "2", "ttl": "1h30m", "headers": {"A": ["b"]}},
        {"subject": subject, "data": "3", "ttl": "never"},
        {"subject": subject, "data": "4", "ttl": "1h", "headers": {"nats-ttl": ["1h"]}},
        {"subject": subject, "data": "5", "ttl": "1h", "headers": {"Nats-TTL": ["2h"]}},
        {"subject": subject, "data": "6", "ttl": "999ms"},
        {"subject": subject, "data": "7", "ttl": 0},
        {"subject": subject, "data": "8", "ttl": -1},
        form=form,
    )
    assert [each.get("problem", each).get("code", 0) for each in results[:4]] == [0] * 4
    assert results[4]["problem"]["status"] == 422
    assert "differs" in results[4]["problem"]["detail"]
    refused = [each["problem"] for each in results[5:]]
    assert [(each["status"], each["code"]) for each in refused] == [(422, 10165)] * 3
    assert [headers for _, headers, _ in stored(stream)] == [
        {"Nats-TTL": ["60"]},
        {"A": ["b"], "Nats-TTL": ["1h30m"]},
        {"Nats-TTL": ["never"]},
        {"nats-ttl": ["1h"]},
    ]


def test_packed_batch_has_them_in_its_headers(stream: Stream) -> None:
    stream.configure(allow_msg_ttl=True)
    subject = stream.subject()
    items = [
        [subject, {"Nats-TTL": ["1s"]}, b"goes"],
        [subject, {"Nats-TTL": ["1h"]}, b"stays"],
        [subject, {"Nats-TTL": ["soon"]}, b"refused"],
    ]
    answer = stream.client.post(
        f"{stream.path}/messages",
        content=msgspec.msgpack.encode([1, items]),
        headers={"content-type": PACKED},
    )
    assert [each.get("seq") for each in answer.json()["results"]] == [1, 2, None]
    assert answer.json()["results"][2]["problem"]["code"] == 10165
    until(stream, lambda: [seq for seq, _, _ in stored(stream)] == [2])


@pytest.mark.parametrize("form", [JSON, MSGPACK])
def test_socket_takes_them_one_by_one_and_in_batches(
    server: ServerProcess, stream: Stream, form: str
) -> None:
    stream.configure(allow_msg_ttl=True)
    data = b"x" if form == MSGPACK else "x"
    item = {"subject": stream.subject(), "data": data}
    with Talk(server.url, form) as talk:
        assert talk.ask("pub", **item, ttl=1)["seq"] == 1
        assert talk.ask("pub", **item, ttl="1h")["seq"] == 2
        assert talk.refused("pub", **item, ttl="1ms")["name"] == "ttl_invalid"
        batch = talk.ask(
            "pub_batch", stream=stream.name, messages=[{**item, "ttl": 1}, {**item, "ttl": "never"}]
        )
        assert [each["seq"] for each in batch["results"]] == [3, 4]
    until(stream, lambda: [seq for seq, _, _ in stored(stream)] == [2, 4])


def test_batch_stored_as_one_has_them_too(stream: Stream) -> None:
    stream.configure(allow_msg_ttl=True, allow_atomic=True)
    messages = [
        {"subject": stream.subject(), "data": "x", "ttl": ttl} for ttl in ("1s", "1h", "1s")
    ]
    target = f"{stream.path}/messages?atomic=true"
    assert stream.client.post(target, json={"messages": messages}).status_code == 201
    until(stream, lambda: [seq for seq, _, _ in stored(stream)] == [2])


@each("text", ["0", "0s", "-1", "-2", "999ms", "soon", "", "-1s"])
def test_what_is_no_time_to_live_is_422_with_or_without_permission(
    stream: Stream, text: str
) -> None:
    assert_problem(stream.publish(Nats_TTL=text), 422, 10165, "Nats-TTL")
    stream.configure(allow_msg_ttl=True)
    assert_problem(stream.publish(Nats_TTL=text), 422, 10165, "Nats-TTL")
    assert stream.state()["messages"] == 0


def test_stream_that_does_not_allow_them_refuses_and_remembers_no_id(stream: Stream) -> None:
    for ttl in ("5s", "never"):
        refused = assert_problem(stream.publish(Nats_TTL=ttl, Nats_Msg_Id="k"), 422, 10166)
        assert refused["applied"] is False
    assert stream.publish(Nats_Msg_Id="k").json()["duplicate"] is False
    expecting = {"Nats_TTL": "5s", "Nats_Expected_Last_Sequence": "9"}
    assert_problem(stream.publish(**expecting), 412, 10071)
    assert stream.publish(Nats_TTL="5s", Nats_Msg_Id="k").json()["duplicate"] is True


def test_client_and_its_publisher_pass_them_on(server: ServerProcess, stream: Stream) -> None:
    stream.configure(allow_msg_ttl=True)
    with Contrail(server.url) as client:
        assert client.publish(stream.subject(), b"1", ttl="1h").seq == 1
        client.publish_batch(stream.name, [Message(stream.subject(), b"2", ttl="never")])
        with client.publisher() as publisher:
            assert publisher.publish(stream.subject(), b"3", ttl="90").result().seq == 3
    assert [headers["Nats-TTL"] for _, headers, _ in stored(stream)] == [["1h"], ["never"], ["90"]]


# Consumers ---------------------------------------------------------------------------------------
def test_delivered_message_that_expires_is_pending_no_more(
    server: ServerProcess, stream: Stream
) -> None:
    stream.configure(allow_msg_ttl=True)
    consumer = stream.consumer(max_ack_pending=1)
    with Talk(server.url) as talk:
        talk.done("sub", sid="s", stream=stream.name, consumer="c", credit={"msgs": 1})
        # It is pushed: a pull might come after its end.
        stream.publish(b"goes", Nats_TTL="1s")
        stream.publish(b"next")
        assert [each["data"] for each in talk.messages(1)] == ["goes"]
        # There is room for the other as soon as the first one is gone.
        assert [each["data"] for each in stream.next(consumer, expires="30s")] == ["next"]
        info = stream.client.get(consumer).json()
        assert (info["num_ack_pending"], info["num_pending"]) == (1, 0)


# Configuration -----------------------------------------------------------------------------------
def test_permission_cannot_be_taken_back(stream: Stream) -> None:
    assert stream.configure(allow_msg_ttl=True).json()["config"]["allow_msg_ttl"] is True
    assert_problem(stream.configure(), 409, 10052, "/allow_msg_ttl")
    for change, status in (({"allow_msg_ttl": False}, 409), ({"max_msgs": 9}, 200)):
        changed = stream.client.patch(stream.path, content=json.dumps(change), headers=MERGE_PATCH)
        assert changed.status_code == status, changed.text


def test_markers_turn_on_what_they_need(stream: Stream) -> None:
    config = stream.configure(subject_delete_marker_ttl="90s").json()["config"]
    assert (config["allow_msg_ttl"], config["allow_rollup_hdrs"]) == (True, True)
    assert config["subject_delete_marker_ttl"] == "90s"
    assert stream.client.put(stream.path, json=config).status_code == 200
    refused = stream.client.put(
        f"{stream.path}?pedantic=true", json={**config, "allow_rollup_hdrs": False}
    )
    assert_problem(refused, 422, 10157, "/allow_rollup_hdrs")
    for text in ("999ms", "-1s"):
        answer = stream.client.put(stream.path, json={**config, "subject_delete_marker_ttl": text})
        assert_problem(answer, 422, 10052, "/subject_delete_marker_ttl")


# Markers -----------------------------------------------------------------------------------------
@pytest.fixture
def reader(server: ServerProcess, stream: Stream) -> Iterator[Talk]:
    """Gets all messages of the stream pushed, even if they live for a second only."""
    with Talk(server.url) as talk:
        talk.done("sub", sid="s", stream=stream.name, ordered=True, credit={"msgs": 100})
        yield talk


def marker_stream(stream: Stream, **config: Any) -> httpx.Response:
    """Have the stream leave markers that live for a second."""
    return stream.configure(subject_delete_marker_ttl="1s", max_msgs_per_subject=1, **config)


def test_marker_shows_readers_the_end_and_expires_itself(stream: Stream, reader: Talk) -> None:
    assert marker_stream(stream).status_code == 200
    stream.publish(b"goes", Nats_TTL="1s")
    goes, marker = reader.messages(2)
    assert goes["data"] == "goes"
    assert (marker["seq"], marker["subject"], marker["data"]) == (2, stream.subject(), "")
    assert marker["headers"] == {"Nats-Marker-Reason": ["MaxAge"], "Nats-TTL": ["1s"]}
    until(stream, lambda: stream.state()["messages"] == 0)
    assert (stream.state()["first_seq"], stream.state()["last_seq"]) == (3, 2)


def test_age_leaves_markers_too_but_not_for_delete_messages(stream: Stream, reader: Talk) -> None:
    assert marker_stream(stream, max_age="1s", duplicate_window="1s").status_code == 200
    deleted = {"Msg-Header-KV-Operation": "DEL"}
    stream.client.post(f"/v1/subjects/{stream.subject('b')}/messages", headers=deleted)
    stream.publish(b"aged")
    marker = reader.messages(3)[2]
    assert (marker["seq"], marker["subject"]) == (3, stream.subject("a"))
    until(stream, lambda: stream.state()["messages"] == 0)
    assert stream.state()["last_seq"] == 3


def test_shorter_time_to_live_than_that_of_markers_is_raised(stream: Stream) -> None:
    stream.configure(subject_delete_marker_ttl="90s")
    stream.publish(b"x", Nats_TTL="5")
    assert stored(stream) == [(1, {"Nats-TTL": ["1m30s"]}, "x")]
