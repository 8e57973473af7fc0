"""Publishing one message."""

from typing import Any

import httpx
import pytest

from tests.contract.conftest import Stream, assert_problem
from tests.support.each import each


def test_message_is_stored_and_acked(stream: Stream) -> None:
    answer = stream.publish(b"hello")
    assert (answer.status_code, answer.headers["durability"]) == (201, "fsync")
    assert answer.json() == {"stream": stream.name, "seq": 1, "duplicate": False}
    assert stream.client.get(f"{stream.path}/messages/1").content == b"hello"


@pytest.mark.parametrize("payload", [b"", b"\x00\xff" * 50, b"x" * (1 << 20)])
def test_any_payload_comes_back_as_it_was(stream: Stream, payload: bytes) -> None:
    seq = stream.publish(payload).json()["seq"]
    assert stream.client.get(f"{stream.path}/messages/{seq}").content == payload


def test_content_type_does_not_matter(stream: Stream) -> None:
    for kind in ("application/json", "text/plain; charset=latin-1", "nonsense"):
        assert stream.publish(b"{", content_type=kind).status_code == 201


def test_subject_without_a_stream_is_404(client: httpx.Client) -> None:
    answer = client.post("/v1/subjects/nobody.listens/messages", content=b"x")
    problem = assert_problem(answer, 404, 20001)
    assert problem["name"] == "no_stream_for_subject"


@each("subject", ["a.*", "a.%3E", "%3E", "*", "a..b", ".a", "a.", "a%20b", "a%09b", "x" * 4097])
def test_invalid_subject_is_refused(client: httpx.Client, subject: str) -> None:
    answer = client.post(f"/v1/subjects/{subject}/messages", content=b"x")
    assert answer.status_code in (400, 422)
    assert_problem(answer, answer.status_code)


def test_subject_is_decoded_once_from_the_path(stream: Stream) -> None:
    for escaped, subject in (("x%2Fy", "x/y"), ("%2541", "%41"), ("st%C3%A4dte", "städte")):
        target = f"/v1/subjects/{stream.prefix}.{escaped}/messages"
        seq = stream.client.post(target, content=b"x").json()["seq"]
        stored = stream.client.get(
            f"{stream.path}/messages/{seq}", headers={"accept": "application/json"}
        )
        assert stored.json()["subject"] == f"{stream.prefix}.{subject}"


@each("escaped", ["%", "%2", "%zz", "%FF", "%C3", "%00", "%0D%0A"])
def test_broken_escape_is_400(stream: Stream, escaped: str) -> None:
    target = f"/v1/subjects/{stream.prefix}.{escaped}/messages"
    # The raw target: httpx would repair the escape.
    request = stream.client.build_request("POST", "/", content=b"x")
    request.url = request.url.copy_with(raw_path=target.encode())
    assert_problem(stream.client.send(request), 400)


# Ids and expectations ----------------------------------------------------------------------------
def test_second_publish_of_an_id_is_answered_with_the_first(stream: Stream) -> None:
    first = stream.publish(b"one", Idempotency_Key="k")
    for headers in ({"Idempotency_Key": "k"}, {"Nats_Msg_Id": "k"}):
        again = stream.publish(b"two", rest="other", **headers)
        assert (again.status_code, again.json()) == (200, {**first.json(), "duplicate": True})
    assert stream.state()["messages"] == 1


def test_id_is_remembered_beyond_delete_and_purge(stream: Stream) -> None:
    stream.publish(Idempotency_Key="k")
    stream.client.delete(f"{stream.path}/messages/1")
    stream.client.post(f"{stream.path}/purge")
    assert stream.publish(Idempotency_Key="k").json()["duplicate"] is True


def test_ids_that_disagree_are_422(stream: Stream) -> None:
    assert_problem(stream.publish(Idempotency_Key="a", Nats_Msg_Id="b"), 422)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Nats_Expected_Stream": "OTHER"}, 10060),
        ({"Nats_Expected_Last_Sequence": "1"}, 10071),
        ({"Nats_Expected_Last_Subject_Sequence": "1"}, 10071),
        ({"Nats_Expected_Last_Msg_Id": "other"}, 10070),
    ],
)
def test_failed_expectation_is_412_and_stores_nothing(
    stream: Stream, headers: dict[str, str], code: int
) -> None:
    stream.publish(rest="a", Idempotency_Key="first")
    stream.publish(rest="b", Idempotency_Key="second")
    assert_problem(stream.publish(rest="b", Idempotency_Key="third", **headers), 412, code)
    assert stream.state()["last_seq"] == 2
    # What was refused is not remembered as a duplicate either.
    assert stream.publish(Idempotency_Key="third").json() == {
        "stream": stream.name,
        "seq": 3,
        "duplicate": False,
    }


def test_kept_expectations_store(stream: Stream) -> None:
    stream.publish(rest="a", Idempotency_Key="k")
    answer = stream.publish(
        rest="a",
        Nats_Expected_Stream=stream.name,
        Nats_Expected_Last_Sequence="1",
        Nats_Expected_Last_Subject_Sequence="1",
        Nats_Expected_Last_Msg_Id="k",
    )
    assert answer.json()["seq"] == 2
    zero = stream.publish(rest="new", Nats_Expected_Last_Subject_Sequence="0")
    assert zero.json()["seq"] == 3


def test_subject_sequence_may_be_expected_of_another_subject(stream: Stream) -> None:
    stream.publish(rest="a")
    expected: dict[str, str] = {
        "Nats_Expected_Last_Subject_Sequence": "1",
        "Nats_Expected_Last_Subject_Sequence_Subject": stream.subject("*"),
    }
    assert stream.publish(rest="b", **expected).status_code == 201
    assert_problem(stream.publish(rest="c", **expected), 412, 10071)


@each(
    ("headers", "code", "pointer"),
    [
        ({"Nats_Expected_Last_Sequence": "x"}, 20030, "Nats-Expected-Last-Sequence"),
        ({"Nats_Expected_Last_Sequence": "-1"}, 20030, "Nats-Expected-Last-Sequence"),
        (
            {"Nats_Expected_Last_Subject_Sequence_Subject": "a.b"},
            10193,
            "Nats-Expected-Last-Subject-Sequence-Subject",
        ),
        ({"Nats_Rollup": "sub"}, 10111, None),
        ({"Nats_Rollup": "some"}, 10111, "Nats-Rollup"),
        ({"Nats_TTL": "5s"}, 10166, None),
        ({"Nats_TTL": "5ms"}, 10165, "Nats-TTL"),
        ({"Nats_Msg_Id": "k" * 5000}, 20030, "Nats-Msg-Id"),
        ({"Nats_Batch_Id": "b"}, 20004, "Nats-Batch-Id"),
        ({"Msg_Header_": "x"}, 20030, "msg-header-"),
    ],
)
def test_header_that_cannot_be_honoured_is_422(
    stream: Stream, headers: dict[str, str], code: int, pointer: str | None
) -> None:
    assert_problem(stream.publish(**headers), 422, code, pointer)
    assert stream.state()["messages"] == 0


def test_body_with_a_content_coding_is_415_and_not_stored(stream: Stream) -> None:
    target = f"/v1/subjects/{stream.subject()}/messages"
    coded, plain = {"content-encoding": "gzip"}, {"content-encoding": "Identity"}
    as_json = {**coded, "content-type": "application/json"}
    refused = [
        stream.client.post(target, content=b"x", headers=coded),
        stream.client.post(target, content=iter([b"x"]), headers=coded),
        stream.client.post(f"{stream.path}/messages", content=b"x", headers=as_json),
        stream.client.put(stream.path, content=b"x", headers=as_json),
    ]
    for answer in refused:
        assert assert_problem(answer, 415, 20033)["applied"] is False
    assert stream.client.post(target, content=b"x", headers=plain).json()["seq"] == 1
    assert stream.client.post(target, headers=coded).json()["seq"] == 2


# Message headers ---------------------------------------------------------------------------------
def test_message_headers_travel_both_ways(stream: Stream) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sent: list[tuple[str, str]] = [
        ("msg-header-order-ID", "7"),
        ("Msg-Header-Tag", "a"),
        ("Msg-Header-Tag", "b"),
        ("Msg-Header-City*", "UTF-8''Z%C3%BCrich"),
        ("traceparent", trace),
        ("Idempotency-Key", "k"),
        ("X-Other", "not stored"),
    ]
    target = f"/v1/subjects/{stream.subject()}/messages"
    assert stream.client.post(target, content=b"x", headers=sent).status_code == 201
    as_json = stream.client.get(f"{stream.path}/messages/1", headers={"accept": "application/json"})
    assert as_json.json()["headers"] == {
        "Order-Id": ["7"],
        "Tag": ["a", "b"],
        "City": ["Zürich"],
        "traceparent": [trace],
        "Nats-Msg-Id": ["k"],
    }
    raw = stream.client.get(f"{stream.path}/messages/1").headers
    assert raw["msg-header-order-id"] == "7"
    assert raw.get_list("msg-header-tag") == ["a", "b"]
    assert raw["msg-header-city*"] == "UTF-8''Z%C3%BCrich"
    assert raw["nats-msg-id"] == "k"


def test_headers_of_a_message_beyond_the_limit_are_431(stream: Stream) -> None:
    headers = {f"Msg-Header-N{number}": "x" * 600 for number in range(100)}
    target = f"/v1/subjects/{stream.subject()}/messages"
    assert stream.client.post(target, content=b"x", headers=headers).status_code == 201
    headers = {f"Msg-Header-N{number}": "x" * 700 for number in range(100)}
    assert stream.client.post(target, content=b"x", headers=headers).status_code == 431


# Limits ------------------------------------------------------------------------------------------
def test_payload_over_the_limit_is_413(stream: Stream) -> None:
    assert_problem(stream.publish(b"x" * ((1 << 20) + 1)), 413, 10054)
    assert stream.publish().json()["seq"] == 1


def test_message_over_max_msg_size_is_413(stream: Stream) -> None:
    stream.configure(max_msg_size=20)
    assert stream.publish(b"x" * 20).status_code == 201
    assert_problem(stream.publish(b"x" * 21), 413, 10054)
    # A header value counts its name, itself and four bytes.
    assert stream.publish(b"x" * 10, Msg_Header_A="12345").status_code == 201
    assert_problem(stream.publish(b"x" * 10, Msg_Header_A="123456"), 413, 10054)


def test_old_messages_give_way_to_max_msgs(stream: Stream) -> None:
    stream.configure(max_msgs=3)
    stream.fill(5)
    state = stream.state()
    assert (state["messages"], state["first_seq"], state["last_seq"]) == (3, 3, 5)


# Without an ack ----------------------------------------------------------------------------------
def test_publish_without_ack_is_202_and_stored(stream: Stream) -> None:
    target = f"/v1/subjects/{stream.subject()}/messages?ack=none"
    answer = stream.client.post(target, content=b"x")
    assert (answer.status_code, answer.content) == (202, b"")
    read = stream.client.get(f"{stream.path}/messages?from_seq=1&wait=10s")
    assert read.json()["messages"][0]["data"] == "x"


@each(("query", "status"), [("ack=all", 422), ("ack=none&ack=none", 422), ("other=1", 201)])
def test_other_parameters_of_a_publish(stream: Stream, query: str, status: int) -> None:
    target = f"/v1/subjects/{stream.subject()}/messages?{query}"
    assert stream.client.post(target, content=b"x").status_code == status


def test_publish_without_ack_is_still_refused_when_it_cannot_be_stored(
    client: httpx.Client,
) -> None:
    assert_problem(client.post("/v1/subjects/nobody.x/messages?ack=none", content=b"x"), 404, 20001)


def test_expect_continue_is_honoured(stream: Stream) -> None:
    headers: dict[str, Any] = {"Expect": "100-continue"}
    assert stream.publish(b"x", **headers).status_code == 201
