"""Calls that read and delete messages."""

from contrail_client.calls import Answer, conclude
from contrail_client.errors import ApiProblem
from contrail_client.models import StoredMessage
from contrail_client.operations import reading

TEXT = b"""{"stream": "S", "seq": 4, "subject": "a.b", "time": "2026-01-31T08:00:00.500000001Z",
  "headers": {"N": ["v1", "v2"]}, "data": "\xc3\xbc"}"""
BINARY = b"""{"stream": "S", "seq": 5, "subject": "a", "time": "2026-01-31T08:00:00.000000000Z",
  "data_base64": "AP8="}"""


def range_call(**changes: object) -> "reading.Call[reading.Range]":
    fields = dict.fromkeys(("from_seq", "start_time", "subject", "limit", "max_bytes", "wait"))
    return reading.read_range("S", **(fields | changes))  # type: ignore[arg-type]


def test_text_payload_becomes_its_bytes() -> None:
    call = reading.get_message("S", 4)
    assert call.request.path == "/v1/streams/S/messages/4"
    message = conclude(call, Answer(200, {}, TEXT))
    assert (message.stream, message.seq, message.subject) == ("S", 4, "a.b")
    assert message.payload == "ü".encode()
    assert message.headers == {"N": ["v1", "v2"]}
    assert message.time_ns == 1_769_846_400_500_000_001


def test_binary_payload_is_decoded() -> None:
    message = conclude(reading.get_message("S", 5), Answer(200, {}, BINARY))
    assert (message.payload, message.headers) == (b"\x00\xff", {})


def test_many_messages_are_read_with_the_problems_of_some() -> None:
    call = reading.get_messages("S", seqs=range(4, 7), subjects=None, shard=1)
    request = call.request
    assert (request.method, request.path) == ("POST", "/v1/streams/S/messages/get")
    assert (request.query, request.body) == ((("shard", "1"),), b'{"seqs":[4,5,6]}')
    assert call.repeatable
    problem = b'{"problem": {"status": 404, "code": 10037, "name": "message_not_found"}}'
    body = b'{"results": [' + b",".join([TEXT, problem, BINARY]) + b"]}"
    first, missing, last = conclude(call, Answer(200, {}, body))
    assert isinstance(first, StoredMessage)
    assert isinstance(missing, ApiProblem)
    assert isinstance(last, StoredMessage)
    assert (first.seq, missing.name, last.payload) == (4, "message_not_found", b"\x00\xff")
    newest = reading.get_messages("S", seqs=None, subjects=["a", "b"])
    assert newest.request.body == b'{"subjects":["a","b"]}'


def test_range_is_read_with_its_continuation() -> None:
    call = range_call(from_seq=4, subject="a.>", limit=2)
    assert call.request.query == (("from_seq", "4"), ("subject", "a.>"), ("limit", "2"))
    body = b'{"messages": [' + TEXT + b"," + BINARY + b'], "next_seq": 6, "num_pending": 1}'
    found = conclude(call, Answer(200, {}, body))
    assert [message.seq for message in found.messages] == [4, 5]
    assert (found.next_seq, found.num_pending) == (6, 1)


def test_range_that_waited_in_vain_continues_where_it_began() -> None:
    call = range_call(from_seq=9, wait="5s")
    assert call.request.wait_s > 0
    found = conclude(call, Answer(204, {}))
    assert (found.messages, found.next_seq) == ((), 9)


def test_newest_messages_are_asked_for_as_of_a_point() -> None:
    call = reading.last_messages("S", subject="a.>", up_to_seq=7, up_to_time=None, token="t")
    assert call.request.path == "/v1/streams/S/last"
    assert call.request.query == (("subject", "a.>"), ("up_to_seq", "7"), ("page_token", "t"))
    page = conclude(call, Answer(200, {}, b'{"messages": [' + TEXT + b'], "next_page_token": "u"}'))
    assert ([message.seq for message in page.items], page.next_page_token) == ([4], "u")


def test_replica_says_how_old_it_is() -> None:
    call = range_call(consistency="any")
    assert call.request.query == (("consistency", "any"),)
    headers = {"contrail-staleness": "75"}
    body = b'{"messages": [], "next_seq": 6, "num_pending": 0}'
    assert conclude(call, Answer(200, headers, body)).staleness_ms == 75
    assert conclude(call, Answer(204, headers)).staleness_ms == 75
    assert conclude(call, Answer(200, {}, body)).staleness_ms is None


def test_delete_is_not_repeatable() -> None:
    call = reading.delete_message("S", 4, shard=1)
    assert (call.request.method, call.request.query) == ("DELETE", (("shard", "1"),))
    assert not call.repeatable
