"""Publishing over a socket: one answer for each id, in order, stored once."""

import base64
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.contract.conftest import Stream
from tests.contract.talk import JSON, MSGPACK, Talk
from tests.support.each import each
from tests.support.servers import ServerProcess

pytestmark = pytest.mark.split

OUTSTANDING = 1_000


@pytest.mark.parametrize("form", [JSON, MSGPACK])
def test_published_message_is_acknowledged_with_its_place(
    server: ServerProcess, stream: Stream, form: str
) -> None:
    data = b"hello" if form == MSGPACK else "hello"
    with Talk(server.url, form) as talk:
        answer = talk.ask("pub", subject=stream.subject(), data=data, headers={"A": ["1", "2"]})
    assert answer == {
        "op": "ack",
        "id": 1,
        "stream": stream.name,
        "seq": 1,
        "duplicate": False,
        "durability": "fsync",
    }
    stored = stream.client.get(
        f"{stream.path}/messages/1", headers={"accept": "application/json"}
    ).json()
    assert (stored["data"], stored["headers"]) == ("hello", {"A": ["1", "2"]})


def test_payload_comes_as_text_base64_or_json(server: ServerProcess, stream: Stream) -> None:
    with Talk(server.url) as talk:
        raw = base64.b64encode(b"\xff\x00").decode()
        for form in ({"data": "t\u00e9xt"}, {"data_base64": raw}, {"json": {"a": [1, 2.5]}}):
            assert talk.ask("pub", subject=stream.subject(), **form)["op"] == "ack"
    found = [stream.client.get(f"{stream.path}/messages/{seq}").content for seq in (1, 2, 3)]
    assert found == ["t\u00e9xt".encode(), b"\xff\x00", b'{"a":[1,2.5]}']


@each(
    ("fields", "name"),
    [
        ({}, "invalid_field"),
        ({"data": "x", "json": 1}, "invalid_field"),
        ({"data": "x", "subject": "a..b"}, "invalid_subject"),
        ({"data": "x", "subject": "nobody.captures.this"}, "no_stream_for_subject"),
        ({"data": "x", "headers": {"a b": ["c"]}}, "invalid_field"),
        ({"data": "x", "ttl": "1m"}, "ttl_disabled"),
        ({"data": "x", "ttl": "1ms"}, "ttl_invalid"),
        ({"data": "x", "ttl": "1m", "headers": {"Nats-TTL": ["2m"]}}, "invalid_field"),
        ({"data": "x", "expected": {"last_seq": 5}}, "wrong_last_sequence"),
        ({"data": "x" * ((1 << 20) + 1)}, "message_too_large"),
        ({"data_base64": "!"}, "invalid_field"),
        ({"data": "x", "msg_id": "x" * 5_000}, "invalid_field"),
    ],
)
def test_message_that_cannot_be_stored_is_refused_by_its_id(
    server: ServerProcess, stream: Stream, fields: dict[str, object], name: str
) -> None:
    with Talk(server.url) as talk:
        assert talk.refused("pub", **{"subject": stream.subject(), **fields})["name"] == name
        talk.nothing_more()
    assert stream.state()["messages"] == 0


def test_message_without_an_id_is_stored_in_silence_but_refused_aloud(
    server: ServerProcess, stream: Stream
) -> None:
    with Talk(server.url) as talk:
        talk.send({"op": "pub", "subject": stream.subject(), "data": "quiet"})
        assert talk.ask("pub", subject=stream.subject(), data="loud")["seq"] == 2
        talk.send({"op": "pub", "subject": "nobody.captures.this", "data": ""})
        answer = talk.next("error")
        assert "id" not in answer
        assert answer["problem"]["name"] == "no_stream_for_subject"


def test_thousand_outstanding_messages_are_acknowledged_in_order(
    server: ServerProcess, stream: Stream
) -> None:
    with Talk(server.url, MSGPACK) as talk:
        for number in range(OUTSTANDING):
            talk.send({"op": "pub", "id": number, "subject": stream.subject(), "data": b"x"})
        answers = [talk.next("ack") for _ in range(OUTSTANDING)]
    assert [answer["id"] for answer in answers] == list(range(OUTSTANDING))
    assert [answer["seq"] for answer in answers] == list(range(1, OUTSTANDING + 1))


def test_retry_with_the_same_message_ids_stores_nothing_twice(
    server: ServerProcess, stream: Stream
) -> None:
    frames = [
        {
            "op": "pub",
            "id": number,
            "subject": stream.subject(),
            "data": "x",
            "msg_id": f"m{number}",
        }
        for number in range(OUTSTANDING)
    ]
    with Talk(server.url, close_timeout=0.1) as talk:
        talk.send(*frames)
        # The connection is lost with most answers unread: what became of them is not known.
        talk.next("ack")
    with Talk(server.url) as talk:
        for frame in frames:
            talk.send(frame)
        answers = [talk.next("ack") for _ in frames]
        assert [answer["id"] for answer in answers] == list(range(OUTSTANDING))
        assert sorted(answer["seq"] for answer in answers) == list(range(1, OUTSTANDING + 1))
        assert answers[0]["duplicate"] is True
    assert stream.state()["messages"] == OUTSTANDING


def test_more_messages_in_one_frame_than_may_be_outstanding_are_all_stored(
    server: ServerProcess, stream: Stream
) -> None:
    count = 6_000
    with Talk(server.url, MSGPACK) as talk:
        talk.send(
            *(
                {"op": "pub", "id": number, "subject": stream.subject(), "data": b""}
                for number in range(count)
            )
        )
        answers = [talk.next("ack") for _ in range(count)]
        talk.nothing_more()
    assert [answer["id"] for answer in answers] == list(range(count))
    assert stream.state()["messages"] == count


@pytest.mark.parametrize("form", [JSON, MSGPACK])
def test_batch_has_one_answer_with_a_result_for_each_message(
    server: ServerProcess, stream: Stream, form: str
) -> None:
    data = b"x" if form == MSGPACK else "x"
    messages = [
        {"subject": stream.subject(), "data": data, "msg_id": "one"},
        {"subject": "nobody.captures.this", "data": data},
        {"subject": "not..valid", "data": data},
        {"subject": stream.subject(), "data": data, "msg_id": "one"},
        {"subject": stream.subject("b"), "data": data},
    ]
    with Talk(server.url, form) as talk:
        answer = talk.ask("pub_batch", stream=stream.name, messages=messages)
    assert answer["op"] == "acks"
    assert answer["durability"] == "fsync"
    first, foreign, invalid, again, last = answer["results"]
    assert first == {"seq": 1, "duplicate": False}
    assert foreign["problem"]["name"] == "subject_not_captured"
    assert invalid["problem"]["name"] == "invalid_subject"
    assert again == {"seq": 1, "duplicate": True}
    assert last == {"seq": 2, "duplicate": False}


def test_batch_and_single_messages_keep_their_order(server: ServerProcess, stream: Stream) -> None:
    subject = stream.subject()
    with Talk(server.url) as talk:
        for number in range(0, 30, 3):
            talk.send({"op": "pub", "id": number, "subject": subject, "data": str(number)})
            batch = [{"subject": subject, "data": str(number + more)} for more in (1, 2)]
            talk.send({"op": "pub_batch", "id": "b", "stream": stream.name, "messages": batch})
        for _ in range(20):
            assert talk.next()["op"] in ("ack", "acks")
    found = stream.client.get(f"{stream.path}/messages").json()["messages"]
    assert [message["data"] for message in found] == [str(number) for number in range(30)]


def test_batch_that_cannot_be_read_is_refused_whole(server: ServerProcess, stream: Stream) -> None:
    with Talk(server.url) as talk:
        messages = [{"subject": stream.subject(), "data": "x"}, {"subject": stream.subject()}]
        problem = talk.refused("pub_batch", stream=stream.name, messages=messages)
        assert problem["errors"][0]["pointer"] == "/messages/1"
        many = [{"subject": "a", "data": ""}] * 10_001
        problem = talk.refused("pub_batch", stream=stream.name, messages=many)
        assert problem["name"] == "batch_too_large"
        problem = talk.refused("pub_batch", stream="NOT_THERE", messages=messages[:1])
        assert problem["name"] == "stream_not_found"
    assert stream.state()["messages"] == 0


def test_empty_batch_has_no_results(server: ServerProcess, stream: Stream) -> None:
    with Talk(server.url) as talk:
        answer = talk.ask("pub_batch", stream=stream.name, messages=[])
        assert (answer["op"], answer["results"]) == ("acks", [])


def test_batch_without_an_id_reports_only_what_was_refused(
    server: ServerProcess, stream: Stream
) -> None:
    messages = [{"subject": stream.subject(), "data": ""}, {"subject": "elsewhere", "data": ""}]
    with Talk(server.url) as talk:
        talk.send({"op": "pub_batch", "stream": stream.name, "messages": messages})
        assert talk.next("error")["problem"]["name"] == "subject_not_captured"
        talk.nothing_more()
    assert stream.state()["messages"] == 1


@pytest.mark.parametrize("deleted", [True, False])
def test_publish_whose_stream_is_removed_meanwhile_finds_no_stream(
    server: ServerProcess, stream: Stream, deleted: bool
) -> None:
    def over_http() -> str:
        while (answer := stream.publish()).status_code == 201:
            pass
        return str(answer.json()["name"])

    def over_a_socket() -> str:
        with Talk(server.url) as talk:
            while (answer := talk.ask("pub", subject=stream.subject(), data="x"))["op"] == "ack":
                pass
        return str(answer["problem"]["name"])

    with ThreadPoolExecutor() as pool:
        refusals = [pool.submit(publish) for publish in (over_http, over_a_socket) * 3]
        while stream.state()["messages"] < 20:
            pass
        if deleted:
            stream.client.delete(stream.path)
        else:
            stream.client.put(stream.path, json={"subjects": [f"{stream.prefix}_other"]})
        assert {one.result() for one in refusals} == {"no_stream_for_subject"}
