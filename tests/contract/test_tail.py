"""The tail of a stream as server-sent events."""

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.contract.conftest import Stream, assert_problem
from tests.support.each import each

pytestmark = pytest.mark.split

EVENTS = {"accept": "text/event-stream"}


class Events:
    """The events of one open response, one after the other."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.iter_lines()

    def next(self) -> dict[str, str] | None:
        """The fields of the next event; None when the response has ended."""
        fields: dict[str, str] = {}
        for line in self._lines:
            if line.startswith(":"):
                continue
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif fields.keys() - {"retry"}:
                return fields
        return None

    def message(self) -> dict[str, Any]:
        """The message of the next event, whose id must be its sequence."""
        event = self.next()
        assert event is not None
        message: dict[str, Any] = json.loads(event["data"])
        assert event["id"] == str(message["seq"])
        return message


@contextlib.contextmanager
def tail(stream: Stream, query: str = "", **headers: str) -> Iterator[Events]:
    """Open the tail of ``stream``; underscores in header names stand for hyphens."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    target = f"{stream.path}/messages?{query}"
    with stream.client.stream("GET", target, headers={**EVENTS, **given}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers["cache-control"] == "no-store"
        yield Events(response)


def test_tail_sends_what_is_stored_and_then_what_comes(stream: Stream) -> None:
    stream.fill(3)
    with tail(stream) as events:
        assert [events.message()["seq"] for _ in range(3)] == [1, 2, 3]
        stream.publish(b"new", Msg_Header_A="1")
        message = events.message()
        assert (message["seq"], message["data"], message["headers"]) == (4, "new", {"A": ["1"]})


def test_client_that_comes_back_continues_after_what_it_saw(stream: Stream) -> None:
    stream.fill(5)
    with tail(stream, Last_Event_ID="3") as events:
        assert [events.message()["seq"] for _ in range(2)] == [4, 5]
    with tail(stream, "from_seq=1", Last_Event_ID="4") as events:
        assert events.message()["seq"] == 5
    with tail(stream, Last_Event_ID="5") as events:
        stream.publish()
        assert events.message()["seq"] == 6


def test_tail_begins_where_its_options_say_and_skips_other_subjects(stream: Stream) -> None:
    stream.fill(10)  # subjects 1 2 3 4 0 1 2 3 4 0
    with tail(stream, f"from_seq=3&subject={stream.subject('2')}") as events:
        assert events.message()["seq"] == 7
        stream.publish(rest="1")
        stream.publish(rest="2")
        assert events.message()["seq"] == 12


def test_tail_of_many_messages_misses_none(stream: Stream) -> None:
    stream.fill(1_000)
    with tail(stream) as events:
        assert [events.message()["seq"] for _ in range(1_000)] == list(range(1, 1_001))


def test_payload_form_holds_for_events(stream: Stream) -> None:
    stream.publish(b"hi")
    with tail(stream, "payload=base64") as events:
        assert events.message()["data_base64"] == "aGk="


def test_deleted_stream_ends_its_tails_with_a_word(stream: Stream) -> None:
    stream.publish()
    with tail(stream) as events:
        events.message()
        deletion = threading.Thread(target=stream.client.delete, args=(stream.path,))
        deletion.start()
        event = events.next()
        deletion.join()
        assert event == {"event": "gone", "data": '{"reason":"stream_not_found"}'}
        assert events.next() is None


@each("seen", ["x", "-1", "1.5", "9" * 19, "9" * 30])
def test_last_event_id_that_is_no_sequence_is_422(stream: Stream, seen: str) -> None:
    answer = stream.client.get(f"{stream.path}/messages", headers={**EVENTS, "last-event-id": seen})
    assert_problem(answer, 422, None, "Last-Event-ID")


def test_tail_of_no_stream_is_404(stream: Stream) -> None:
    assert_problem(stream.client.get("/v1/streams/NONE/messages", headers=EVENTS), 404, 10059)
