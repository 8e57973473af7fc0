"""Reading events: however the body is cut into chunks, and whatever breaks between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_client.calls import Retries
from contrail_client.errors import ApiProblem, ContrailError, UnexpectedAnswer, Unreachable
from contrail_client.operations.listening import EventReader
from contrail_client.reconnecting import Reconnecting
from tests.support.each import each

RETRIES = Retries(attempts=3)


def reader(reconnect_s: float = 60.0) -> EventReader:
    return EventReader("S", None, ("nak", "terminated"), Reconnecting(RETRIES, reconnect_s))


def wire(number: int) -> bytes:
    data = b'{"type":"nak","id":"p-%d","timestamp":"t","stream":"S","stream_seq":%d}' % (
        number,
        number,
    )
    return b"event: nak\nid: p-%d\ndata: %b\n\n" % (number, data)


BODY = (
    b"retry: 1000\n\nid: p-0\n: still here\n\n"
    + wire(1)
    + wire(2)
    + b": the storage is away\n\n"
    + b'event: lost\nid: q-9\ndata: {"type":"lost","id":"q-9","timestamp":"t","count":7}\n\n'
    + wire(3)
    + b'event: gone\ndata: {"reason":"shutting_down"}\n\n'
)


@given(st.lists(st.integers(0, len(BODY)), max_size=8))
def test_events_are_the_same_however_the_body_is_chunked(cuts: list[int]) -> None:
    at, found = 0, []
    events = reader()
    events.request()
    for cut in [*sorted(cuts), len(BODY)]:
        found += events.feed(BODY[at:cut], 0.0)
        at = cut
    assert [(each.type, each.stream_seq, each.count) for each in found] == [
        ("nak", 1, None),
        ("nak", 2, None),
        ("lost", 0, 7),
        ("nak", 3, None),
    ]


def test_request_selects_and_asks_for_what_follows_the_last_event() -> None:
    events = reader()
    first = events.request()
    assert (first.path, first.query) == (
        "/v1/events",
        (("stream", "S"), ("types", "nak,terminated")),
    )
    assert first.headers == (("Accept", "text/event-stream"),)
    events.feed(wire(1) + wire(2)[:-9], 0.0)
    assert events.request().headers[1:] == (("Last-Event-ID", "p-1"),)
    assert [each.id for each in events.feed(wire(2), 0.0)] == ["p-2"]


def test_position_without_an_event_is_kept() -> None:
    events = reader()
    events.feed(b"retry: 1000\n\nid: p-5\n: still here\n\n", 0.0)
    assert events.request().headers[1:] == (("Last-Event-ID", "p-5"),)


def test_types_of_a_newer_server_are_read() -> None:
    event = b'{"type":"new","id":"p-1","timestamp":"t","more":{"a":1}}'
    [found] = reader().feed(b"event: new\nid: p-1\ndata: %b\n\n" % event, 0.0)
    assert found.type == "new"


@each("body", [b"data: {\n\n", b'data: {"type":1}\n\n', b"x" * 2_000_000])
def test_body_that_is_no_event_is_unexpected(body: bytes) -> None:
    with pytest.raises(UnexpectedAnswer):
        reader().feed(body, 0.0)


def test_server_that_was_never_there_is_given_up_soon() -> None:
    events = reader()
    lost = Unreachable("refused")
    assert events.interrupted(lost, 0.0, 0.5) > 0
    assert events.interrupted(lost, 1.0, 0.5) > 0
    with pytest.raises(Unreachable):
        events.interrupted(lost, 2.0, 0.5)


def test_server_that_was_there_is_waited_for_until_the_time_is_over() -> None:
    events = reader(reconnect_s=60.0)
    events.feed(b"retry: 1000\n\n", 0.0)
    lost = Unreachable("refused")
    for second in range(100, 160):
        assert events.interrupted(lost, float(second), 0.5) > 0
    with pytest.raises(Unreachable):
        events.interrupted(lost, 160.0, 0.5)


@pytest.mark.parametrize(
    "error", [ApiProblem(422, name="invalid_field"), UnexpectedAnswer("nonsense")]
)
def test_refusal_that_will_not_pass_is_raised(error: ContrailError) -> None:
    events = reader()
    events.feed(b"retry: 1000\n\n", 0.0)
    with pytest.raises(type(error)):
        events.interrupted(error, 1.0, 0.5)


def test_end_of_the_body_is_a_loss() -> None:
    with pytest.raises(Unreachable):
        reader().ended()
