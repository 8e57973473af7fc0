"""Many messages in one answer: by sequence, or the newest of each subject."""

from typing import Any

import httpx
import msgspec

from tests.contract.conftest import Stream, assert_problem
from tests.support.each import each

MSGPACK = "application/vnd.msgpack"
MIB = 1 << 20


def ask(stream: Stream, body: Any, query: str = "", **headers: str) -> httpx.Response:
    path = f"{stream.path}/messages/get{query}"
    return stream.client.post(path, json=body, headers=headers)


def results(stream: Stream, **body: Any) -> list[Any]:
    answer = ask(stream, body)
    assert answer.status_code == 200, answer.text
    found: list[Any] = answer.json()["results"]
    return [one["problem"]["name"] if "problem" in one else one["seq"] for one in found]


def test_results_are_in_the_order_of_the_request(stream: Stream) -> None:
    stream.fill(10)
    stream.client.delete(f"{stream.path}/messages/4")
    missing = "message_not_found"
    assert results(stream, seqs=[9, 4, 1, 11, 9, 2**63 - 1]) == [9, missing, 1, missing, 9, missing]
    subjects = [stream.subject(rest) for rest in ("2", "none", "3")]
    assert results(stream, subjects=[*subjects, "elsewhere"]) == [7, missing, 8, missing]
    one = stream.client.get(f"{stream.path}/messages/1/json").json()
    assert ask(stream, {"seqs": [1]}).json() == {"results": [one]}
    stale = ask(stream, {"seqs": [1]}, "?consistency=any")
    assert stale.json() == {"results": [one]}
    assert stale.headers["nats-last-sequence"] == "10"


def test_payloads_and_headers_are_those_of_single_reads(stream: Stream) -> None:
    stream.publish(b"text", Nats_Msg_Id="k")
    stream.publish(b"\x00\xff")
    both = {"seqs": [2, 1, 3]}
    first, second, third = ask(stream, both).json()["results"]
    assert (first["data_base64"], second["data"], second["headers"]) == (
        "AP8=",
        "text",
        {"Nats-Msg-Id": ["k"]},
    )
    plain = ask(stream, both, "?payload=base64").json()["results"]
    assert plain[1]["data_base64"] == "dGV4dA=="
    answer = ask(stream, both, accept=MSGPACK)
    assert answer.headers["content-type"] == MSGPACK
    packed = msgspec.msgpack.decode(answer.content)["results"]
    assert [one.pop("data", None) for one in packed] == [b"\x00\xff", b"text", None]
    del first["data_base64"], second["data"]
    assert packed == [first, second, third]


def test_answer_without_room_says_which_messages_it_leaves_out(stream: Stream) -> None:
    for _ in range(6):
        assert stream.publish(bytes(MIB)).status_code == 201
    stream.publish(b"small")
    left = "message_left_out"
    assert results(stream, seqs=[2, 7, 5, 1, 3, 4]) == [2, 7, 5, 1, left, left]
    assert results(stream, seqs=[3, 9, 4]) == [3, "message_not_found", 4]
    assert results(stream, seqs=[1, 2, 3, 4, 9, 7]) == [1, 2, 3, 4, "message_not_found", left]


def test_thousand_messages_are_the_most(stream: Stream) -> None:
    stream.fill(1)
    assert results(stream, seqs=[1] * 1_000) == [1] * 1_000
    assert_problem(ask(stream, {"seqs": [1] * 1_001}), 422, None, "/seqs")
    assert_problem(ask(stream, {"subjects": ["a"] * 1_001}), 422, None, "/subjects")


@each(
    ("body", "status", "pointer"),
    [
        ({}, 422, ""),
        ({"seqs": [1], "subjects": ["a"]}, 422, ""),
        ({"seqs": []}, 422, "/seqs"),
        ({"seqs": [0]}, 422, "/seqs/0"),
        ({"seqs": [2**63]}, 422, "/seqs/0"),
        ({"seqs": ["1"]}, 422, "/seqs/0"),
        ({"subjects": ["a", "a.*"]}, 422, "/subjects/1"),
        ({"subjects": ["a b"]}, 422, "/subjects/0"),
        ({"subject": "a"}, 422, "/subject"),
    ],
)
def test_request_of_another_shape_is_refused(
    stream: Stream, body: Any, status: int, pointer: str
) -> None:
    assert_problem(ask(stream, body), status, None, pointer)


def test_other_refusals(stream: Stream) -> None:
    neither = ask(stream, {})
    assert neither.json()["detail"] == "must have either seqs or subjects"
    assert_problem(ask(stream, {"seqs": [1]}, accept="text/html"), 406)
    assert_problem(stream.client.post(f"{stream.path}/messages/get", content=b"[]"), 415)
    headers = {"content-type": "application/json"}
    cut = stream.client.post(f"{stream.path}/messages/get", content=b'{"seqs":[', headers=headers)
    assert_problem(cut, 400)
    long = {"subjects": ["a" * 4_000] * 300}
    assert_problem(ask(stream, long), 413)
    absent = stream.client.post("/v1/streams/NONE/messages/get", json={"seqs": [1]})
    assert_problem(absent, 404)
