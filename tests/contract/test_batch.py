"""Publishing many messages at once."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.contract.conftest import Stream, assert_problem
from tests.support.each import each

NDJSON = {"content-type": "application/x-ndjson"}
MSGPACK_TYPE = "application/vnd.msgpack"
MSGPACK = {"content-type": MSGPACK_TYPE}


def post(stream: Stream, messages: Any, **more: Any) -> httpx.Response:
    return stream.client.post(f"{stream.path}/messages", json={"messages": messages, **more})


def pack(stream: Stream, value: Any) -> httpx.Response:
    body = msgspec.msgpack.encode(value)
    return stream.client.post(f"{stream.path}/messages", content=body, headers=MSGPACK)


def lines(stream: Stream, content: Any, **headers: str) -> httpx.Response:
    return stream.client.post(
        f"{stream.path}/messages", content=content, headers={**NDJSON, **headers}
    )


def item(stream: Stream, data: str = "x", **more: Any) -> dict[str, Any]:
    return {"subject": stream.subject(), "data": data, **more}


def payloads(stream: Stream) -> list[bytes]:
    found = stream.client.get(f"{stream.path}/messages?limit=1000").json()["messages"]
    return [one["data"].encode() for one in found]


# JSON --------------------------------------------------------------------------------------------
@pytest.mark.long
def test_every_form_of_payload_is_stored(stream: Stream) -> None:
    answer = post(
        stream,
        [
            item(stream, "text"),
            {"subject": stream.subject(), "data_base64": "aGk="},
            {"subject": stream.subject(), "json": {"b": [1, 2], "a": None}},
        ],
    )
    assert (answer.status_code, answer.headers["durability"]) == (201, "fsync")
    assert answer.json() == {"results": [{"seq": n, "duplicate": False} for n in (1, 2, 3)]}
    assert payloads(stream) == [b"text", b"hi", b'{"b":[1,2],"a":null}']


def test_refused_items_leave_the_others(stream: Stream) -> None:
    answer = post(
        stream,
        [
            item(stream, "1", msg_id="k"),
            {"subject": "elsewhere.x", "data": "2"},
            item(stream, "3", expected={"last_seq": 99}),
            item(stream, "4", msg_id="k"),
            {"subject": f"{stream.prefix}.*", "data": "5"},
            item(stream, "6", ttl="5s"),
            item(stream, "7", expected={"last_seq": 1}),
        ],
    )
    assert answer.status_code == 207
    results = answer.json()["results"]
    assert results[0] == {"seq": 1, "duplicate": False}
    assert results[3] == {"seq": 1, "duplicate": True}
    assert results[6] == {"seq": 2, "duplicate": False}
    refused = [
        (one["problem"]["status"], one["problem"]["code"]) for one in results if "problem" in one
    ]
    assert refused == [(409, 20002), (412, 10071), (422, 20003), (422, 10166)]
    assert payloads(stream) == [b"1", b"7"]


def test_headers_are_stored_as_given(stream: Stream) -> None:
    post(stream, [item(stream, headers={"x-lower": ["a", "b"], "Ümlaut-free": ["é"]})])
    assert stream.state()["messages"] == 0
    post(stream, [item(stream, headers={"x-lower": ["a", "b"], "Other": ["é"]})])
    found = stream.client.get(f"{stream.path}/messages").json()["messages"][0]
    assert found["headers"] == {"x-lower": ["a", "b"], "Other": ["é"]}


@each(
    ("messages", "pointer"),
    [
        ([{"data": "x"}], "/messages/0/subject"),
        ([{"subject": "a.b"}], "/messages/0"),
        ([{"subject": "a.b", "data": "x", "json": 1}], "/messages/0"),
        ([{"subject": "a.b", "data": 1}], "/messages/0/data"),
        ([{"subject": "a.b", "data_base64": "%"}], "/messages/0/data_base64"),
        ([{"subject": "a.b", "data": "x", "more": 1}], "/messages/0/more"),
        ([{"subject": "a.b", "data": "x", "headers": {"A": "b"}}], "/messages/0/headers"),
        ([{"subject": "a.b", "data": "x", "expected": {"seq": 1}}], "/messages/0/expected/seq"),
        ([1], "/messages/0"),
        ({}, "/messages"),
    ],
)
def test_batch_of_the_wrong_form_stores_nothing(
    stream: Stream, messages: Any, pointer: str
) -> None:
    good = [item(stream)] if isinstance(messages, list) else []
    if good:
        messages = [*messages, *good]
    assert_problem(post(stream, messages), 422, None, pointer)
    assert stream.state()["messages"] == 0


@each(
    "body",
    [
        b"",
        b"{",
        b'{"messages":[}',
        b'{"messages":[{"subject":"a","data":"\xff"}]}',
        b'{"messages":[{"subject":"a","json":' + b"[" * 100 + b"]" * 100 + b"}]}",
        b"[" * 100_000,
        b'{"messages":' + b"9" * 100_000 + b"}",
    ],
)
def test_malformed_batch_is_400(stream: Stream, body: bytes) -> None:
    answer = stream.client.post(
        f"{stream.path}/messages", content=body, headers={"content-type": "application/json"}
    )
    assert_problem(answer, 400, 10025)


@each("body", [{"messages": []}, [], {"more": 1, "messages": []}, {}])
def test_only_an_object_with_messages_is_a_batch(stream: Stream, body: Any) -> None:
    answer = stream.client.post(f"{stream.path}/messages", json=body)
    assert answer.status_code == (201 if body == {"messages": []} else 422)


def test_ten_thousand_messages_are_taken_and_one_more_is_not(stream: Stream) -> None:
    one = item(stream)
    assert_problem(post(stream, [one] * 10_001), 413)
    assert stream.state()["messages"] == 0
    answer = post(stream, [one] * 10_000)
    assert answer.status_code == 201
    assert [result["seq"] for result in answer.json()["results"]] == list(range(1, 10_001))


def test_body_over_sixteen_mib_is_413(stream: Stream) -> None:
    assert_problem(post(stream, [item(stream, "x" * 1_000_000)] * 17), 413)
    assert stream.state()["messages"] == 0


def test_oversized_message_is_refused_for_itself(stream: Stream) -> None:
    answer = post(stream, [item(stream, "x" * (1 << 20) + "x"), item(stream)])
    assert answer.status_code == 207
    assert answer.json()["results"][0]["problem"]["code"] == 10054


def test_unknown_stream_is_404(unused: Stream) -> None:
    for answer in (post(unused, [item(unused)]), pack(unused, [1, []]), lines(unused, b"")):
        assert_problem(answer, 404, 10059)


def test_atomic_is_refused_where_it_is_not_enabled(stream: Stream, unused: Stream) -> None:
    body = {"messages": [item(stream)]}
    answer = stream.client.post(f"{stream.path}/messages?atomic=true", json=body)
    assert_problem(answer, 422, 10174)


@each("kind", ["text/plain", "application/xml", None, "application/json; charset=latin-1"])
def test_other_content_type_is_415(stream: Stream, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = stream.client.post(f"{stream.path}/messages", content=b"{}", headers=headers)
    assert_problem(answer, 415)


def test_answer_in_another_form_is_406(stream: Stream) -> None:
    answer = stream.client.post(
        f"{stream.path}/messages", json={"messages": []}, headers={"accept": "text/html"}
    )
    assert_problem(answer, 406)


# msgpack -----------------------------------------------------------------------------------------
def test_msgpack_batch_is_stored(stream: Stream) -> None:
    answer = pack(
        stream,
        [
            1,
            [
                [stream.subject("x"), None, b"\x00\xff"],
                [stream.subject("y"), {"Nats-Msg-Id": ["k"]}, b""],
            ],
        ],
    )
    assert answer.json() == {
        "results": [{"seq": 1, "duplicate": False}, {"seq": 2, "duplicate": False}]
    }
    again = pack(stream, [1, [[stream.subject("y"), {"Nats-Msg-Id": ["k"]}, b""]]])
    assert (again.status_code, again.json()["results"][0]["duplicate"]) == (201, True)
    assert stream.client.get(f"{stream.path}/messages/1").content == b"\x00\xff"


def test_columns_are_stored_and_answered_in_runs(stream: Stream) -> None:
    stream.configure(allow_atomic=True)
    index, offsets = b"\0\0\0\0\1\0\0\0\0\0\0\0", b"\0\0\0\0\2\0\0\0\2\0\0\0\3\0\0\0"
    ids = [b"\0\0\0\0\1\0\0\0\1\0\0\0\2\0\0\0", b"kl"]
    subjects = [stream.subject("x"), stream.subject("y")]
    columns = [2, [subjects, index, offsets, b"\x00\xff\x01", ids]]
    answer = pack(stream, columns)
    assert answer.json() == {"results": [{"seq": seq, "duplicate": False} for seq in (1, 2, 3)]}
    assert stream.client.get(f"{stream.path}/messages/1").content == b"\x00\xff"
    second = stream.client.get(f"{stream.path}/messages/2/json").json()
    assert (second["subject"], second["headers"], second["data"]) == (subjects[1], {}, "")
    third = stream.client.get(f"{stream.path}/messages/3/json").json()
    assert (third["subject"], third["headers"]) == (subjects[0], {"Nats-Msg-Id": ["l"]})

    def runs(path: str, value: Any) -> tuple[int, str, Any]:
        body, headers = msgspec.msgpack.encode(value), MSGPACK | {"accept": MSGPACK_TYPE}
        answer = stream.client.post(path, content=body, headers=headers)
        kind = answer.headers["content-type"]
        return answer.status_code, kind, msgspec.msgpack.decode(answer.content)

    path = f"{stream.path}/messages"
    again = [
        {"count": 1, "first_seq": 1, "duplicate": True},
        {"count": 1, "first_seq": 4},
        {"count": 1, "first_seq": 3, "duplicate": True},
    ]
    assert runs(path, columns) == (201, MSGPACK_TYPE, {"runs": again})
    columns[1] = [["elsewhere", subjects[0]], index, offsets, b"abc", None]
    status, _, found = runs(path, columns)
    codes = [(run["count"], run.get("problem", {}).get("code")) for run in found["runs"]]
    assert (status, codes) == (207, [(1, 20002), (1, None), (1, 20002)])
    columns[1] = [subjects, index, offsets, b"abc", None]
    assert runs(f"{path}?atomic=true", columns) == (
        201,
        MSGPACK_TYPE,
        {"stream": stream.name, "first_seq": 6, "last_seq": 8, "count": 3},
    )


def test_refused_msgpack_items_leave_the_others(stream: Stream) -> None:
    answer = pack(
        stream,
        [1, [["elsewhere", None, b""], [stream.subject(), None, b""], ["a b", None, b""]]],
    )
    assert answer.status_code == 207
    codes = [one.get("problem", {}).get("code") for one in answer.json()["results"]]
    assert codes == [20002, None, 20003]


@each(
    ("message", "place"),
    [
        ({"subject": "a b"}, "/subject"),
        ({"headers": {"A b": ["c"]}}, "/headers"),
        ({"headers": {"nats-ttl": ["5ms"]}}, "/headers/nats-ttl"),
        ({"headers": {"Nats-Batch-~/": ["1"]}}, "/headers"),
        ({"headers": {"Nats-Batch-~": ["1"]}}, "/headers/Nats-Batch-~0"),
        ({"ttl": "5ms"}, "/ttl"),
        ({"ttl": "5s", "headers": {"Nats-TTL": ["6s"]}}, "/ttl"),
        ({"msg_id": "i" * 5_000}, "/msg_id"),
        ({"msg_id": "i", "headers": {"Nats-Msg-Id": ["j"]}}, "/msg_id"),
        ({"expected": {"last_subject_seq_subject": "a.b"}}, "/expected"),
    ],
)
def test_refusal_of_an_item_points_into_the_body(
    stream: Stream, message: dict[str, Any], place: str
) -> None:
    """In all forms of a batch; a line of NDJSON is a body of its own."""
    message = {**item(stream), **message}
    good = item(stream)
    answers = [
        (post(stream, [good, message]), f"/messages/1{place}"),
        (lines(stream, "\n".join(map(json.dumps, (good, message)))), place),
    ]
    if not message.keys() & {"ttl", "msg_id", "expected"}:
        rows = [[one["subject"], one.get("headers"), b"x"] for one in (good, message)]
        answers.append((pack(stream, [1, rows]), f"/messages/1{place}"))
    if place == "/subject":
        index, ends = bytes([0, 0, 0, 0, 1, 0, 0, 0]), bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0])
        columns = [[good["subject"], message["subject"]], index, ends, b"xx", None]
        answers.append((pack(stream, [2, columns]), "/messages/1/subject"))
    for answer, pointer in answers:
        assert answer.status_code == 207
        [error] = answer.json()["results"][1]["problem"]["errors"]
        assert error["pointer"] == pointer


@each(
    ("value", "pointer"),
    [
        ([2, []], "/1"),
        ([3, []], "/0"),
        (["1", []], "/0"),
        ([1], ""),
        ([1, [], 3], ""),
        ([1, {}], "/1"),
        ({"messages": []}, ""),
        ([1, [["a", None]]], "/1/0"),
        ([1, [["a", None, "text"]]], "/1/0/2"),
        ([1, [["a", None, b"", "id"]]], "/1/0/3"),
        ([1, [["a", [], b""]]], "/1/0/1"),
    ],
)
def test_msgpack_of_another_shape_is_422(stream: Stream, value: Any, pointer: str) -> None:
    assert_problem(pack(stream, value), 422, None, pointer)


@each(
    "body",
    [
        b"",
        b"\xc1",
        b"\x92\x01",
        b"\x92\x01\xdd\xff\xff\xff\xff",
        b"\x92\x01\x91\x93\xa1\xff\xc0\xc4\x00",
    ],
)
def test_malformed_msgpack_is_refused(stream: Stream, body: bytes) -> None:
    answer = stream.client.post(f"{stream.path}/messages", content=body, headers=MSGPACK)
    assert answer.status_code in (400, 413)
    assert_problem(answer, answer.status_code)


def test_too_many_msgpack_items_are_413(stream: Stream) -> None:
    assert_problem(pack(stream, [1, [["a", None, b""]] * 10_001]), 413)


# NDJSON ------------------------------------------------------------------------------------------
def test_ndjson_lines_are_stored_in_order(stream: Stream) -> None:
    body = b"\n".join(json.dumps(item(stream, str(n))).encode() for n in range(5))
    answer = lines(stream, body)
    assert answer.status_code == 201
    assert [one["seq"] for one in answer.json()["results"]] == [1, 2, 3, 4, 5]
    assert payloads(stream) == [b"0", b"1", b"2", b"3", b"4"]


def test_ndjson_acks_come_as_ndjson_when_asked(stream: Stream) -> None:
    body = b"".join(json.dumps(item(stream)).encode() + b"\n" for _ in range(3))
    answer = lines(stream, body, accept="application/x-ndjson")
    assert (answer.status_code, answer.headers["content-type"]) == (201, "application/x-ndjson")
    assert [json.loads(one)["seq"] for one in answer.text.splitlines()] == [1, 2, 3]


def test_chunked_ndjson_is_taken_as_it_comes(stream: Stream) -> None:
    def chunks() -> Iterator[bytes]:
        for number in range(50):
            text = json.dumps(item(stream, str(number))).encode() + b"\n"
            yield text[:10]
            yield text[10:]

    answer = lines(stream, chunks(), accept="application/x-ndjson")
    assert answer.status_code in (200, 201)
    assert [json.loads(one)["seq"] for one in answer.text.splitlines()] == list(range(1, 51))
    assert len(payloads(stream)) == 50


def test_bad_ndjson_line_is_refused_for_itself(stream: Stream) -> None:
    good = json.dumps(item(stream))
    answer = lines(stream, f'{good}\n{{"subject":\n\n{{"subject":"a","x":1}}\n{good}'.encode())
    assert answer.status_code == 207
    statuses = [one.get("problem", {}).get("status") for one in answer.json()["results"]]
    assert statuses == [None, 400, 422, None]


def test_body_that_is_no_ndjson_is_400(stream: Stream) -> None:
    assert_problem(lines(stream, b"hello\nworld\n"), 400, 10025)


def test_too_many_ndjson_lines_are_413(stream: Stream) -> None:
    body = (json.dumps(item(stream)).encode() + b"\n") * 10_001
    assert_problem(lines(stream, body), 413)
    assert stream.state()["messages"] == 0
