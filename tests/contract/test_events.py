"""Advisories as server-sent events: each kind provoked, filters, positions, bounds, the end."""

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from contrail_api.reading.events import LISTENERS_MAX
from contrail_storage.replica.advisories import KEPT_MAX
from tests.contract.conftest import Stream, assert_problem
from tests.contract.test_service import validator
from tests.support.each import each
from tests.support.servers import ServerProcess

pytestmark = pytest.mark.split

EVENTS = "/v1/events"
ACCEPT = {"accept": "text/event-stream"}
LONG = "n" * 250


class Listener:
    """The events of one open response; ``last_id`` is the position behind what was read."""

    def __init__(self, response: httpx.Response) -> None:
        self.last_id = ""
        self._lines = response.iter_lines()

    def block(self) -> dict[str, str] | None:
        """The fields up to the next empty line; None when the response has ended."""
        fields: dict[str, str] = {}
        for line in self._lines:
            if not line:
                return fields
            name, _, value = line.partition(": ")
            fields[name] = value
        return None

    def next(self) -> dict[str, Any]:
        """The next event, checked against its own fields."""
        while True:
            fields = self.block()
            assert fields is not None, "the events have ended"
            self.last_id = fields.get("id", self.last_id)
            if "data" in fields:
                event: dict[str, Any] = json.loads(fields["data"])
                assert (event["type"], event["id"]) == (fields["event"], fields["id"])
                assert event["timestamp"].endswith("Z")
                return event

    def facts(self) -> dict[str, Any]:
        """The next event without what differs each time."""
        return {k: v for k, v in self.next().items() if k not in ("id", "timestamp")}


@contextlib.contextmanager
def listen(client: httpx.Client, last_event_id: str = "", **query: str) -> Iterator[Listener]:
    """Listen; what happens within is heard."""
    headers = {**ACCEPT, **({"last-event-id": last_event_id} if last_event_id else {})}
    with client.stream("GET", EVENTS, params=query, headers=headers) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers["cache-control"] == "no-store"
        listener = Listener(response)
        assert listener.block() == {"retry": "1000"}
        yield listener


# What is told ------------------------------------------------------------------------------------
def test_creation_change_and_removal_of_a_stream_are_reported(unused: Stream) -> None:
    with listen(unused.client, stream=unused.name) as events:
        assert unused.configure().status_code == 201
        assert unused.configure().status_code == 200  # nothing changes: nothing is told
        assert unused.configure(max_msgs=7).status_code == 200
        assert unused.client.delete(unused.path).status_code == 204
        for action in ("create", "modify", "delete"):
            assert events.facts() == {
                "type": "stream_action",
                "stream": unused.name,
                "action": action,
            }


def test_creation_change_and_removal_of_a_consumer_are_reported(stream: Stream) -> None:
    with listen(stream.client, stream=stream.name) as events:
        path = stream.consumer("worker")
        stream.client.put(path, json={})
        stream.client.put(path, json={"max_deliver": 3})
        stream.client.delete(path)
        for action in ("create", "modify", "delete"):
            assert events.facts() == {
                "type": "consumer_action",
                "stream": stream.name,
                "consumer": "worker",
                "action": action,
            }


def test_removal_of_an_unused_consumer_is_reported(stream: Stream) -> None:
    with listen(stream.client, stream=stream.name) as events:
        config = {"inactive_threshold": "100ms"}
        made = stream.client.post(f"{stream.path}/consumers", json=config).json()
        for action in ("create", "delete"):
            event = events.facts()
            assert (event["consumer"], event["action"]) == (made["name"], action)


def test_nak_and_term_are_reported_with_their_delivery_and_acks_are_not(stream: Stream) -> None:
    stream.fill(3)
    path = stream.consumer("worker")
    with listen(stream.client, stream=stream.name) as events:
        tokens = [delivery["ack_token"] for delivery in stream.next(path, batch=3)]
        stream.ack(path, tokens[0])
        stream.ack(path, tokens[0], kind="nak")  # it is done already
        stream.ack(path, tokens[1], kind="in_progress")
        stream.ack(path, tokens[1], kind="nak")
        again = stream.next(path)[0]["ack_token"]
        stream.ack(path, again, kind="term", reason="cannot be read")
        stream.ack(path, tokens[2], kind="term")
        delivery = {"stream": stream.name, "consumer": "worker"}
        second = {**delivery, "stream_seq": 2, "consumer_seq": 2}
        assert events.facts() == {"type": "nak", **second, "deliveries": 1}
        assert events.facts() == {
            "type": "terminated",
            **second,
            "deliveries": 2,
            "reason": "cannot be read",
        }
        third = {**delivery, "stream_seq": 3, "consumer_seq": 3}
        assert events.facts() == {"type": "terminated", **third, "deliveries": 1}


def test_last_delivery_that_runs_out_is_reported_once_although_nobody_pulls(stream: Stream) -> None:
    stream.fill(1)
    path = stream.consumer("worker", max_deliver=1, ack_wait="100ms")
    with listen(stream.client, stream=stream.name) as events:
        stream.next(path)
        assert events.facts() == {
            "type": "max_deliver",
            "stream": stream.name,
            "consumer": "worker",
            "stream_seq": 1,
            "consumer_seq": 1,
            "deliveries": 1,
        }
        stream.client.delete(path)
        assert events.next()["action"] == "delete"


def test_long_reason_is_cut(stream: Stream) -> None:
    stream.fill(1)
    path = stream.consumer("worker")
    with listen(stream.client, stream=stream.name, types="terminated") as events:
        stream.ack(path, stream.next(path)[0]["ack_token"], kind="term", reason="é" * 300)
        assert events.next()["reason"] == "é" * 256


def test_events_fit_their_schema(stream: Stream) -> None:
    document = stream.client.get("/openapi.json").json()
    content = document["paths"][EVENTS]["get"]["responses"]["200"]["content"]
    schema = validator(document, content["text/event-stream"]["schema"])
    stream.fill(1)
    path = stream.consumer("worker")
    with listen(stream.client, "00000000-7", stream=stream.name) as events:
        stream.ack(path, stream.next(path)[0]["ack_token"], kind="term", reason="broken")
        kinds: set[str] = set()
        while "terminated" not in kinds:
            event = events.next()
            schema.validate(event)
            kinds.add(event["type"])
    assert "lost" in kinds


# Selection ---------------------------------------------------------------------------------------
def test_only_requested_events_are_sent(stream: Stream) -> None:
    stream.fill(2)
    one, other = stream.consumer("one"), stream.consumer("other")
    kinds = {"stream": stream.name, "types": "nak,consumer_action"}
    with (
        listen(stream.client, **kinds, consumer="one") as events,
        listen(stream.client, consumer="other", types="terminated", stream=stream.name) as rest,
    ):
        for path in (other, one):
            for kind in ("nak", "term"):
                stream.ack(path, stream.next(path)[0]["ack_token"], kind=kind)
            stream.client.delete(path)
        reported = [(event["type"], event["consumer"]) for event in (events.next(), events.next())]
        assert reported == [("nak", "one"), ("consumer_action", "one")]
        assert rest.next()["consumer"] == "other"


@each(
    ("query", "pointer"),
    [
        ("types=explosion", "types"),
        ("types=nak,", "types"),
        ("types=lost", "types"),
        ("stream=a.b", "stream"),
        ("stream=a%20b", "stream"),
        ("consumer=%2A", "consumer"),
        (f"consumer={'n' * 256}", "consumer"),
        ("stream=A&stream=B", "stream"),
    ],
)
def test_selection_that_can_match_nothing_is_422(
    client: httpx.Client, query: str, pointer: str
) -> None:
    assert_problem(client.get(f"{EVENTS}?{query}", headers=ACCEPT), 422, None, pointer)


@each("seen", ["1", "x-1", "abcdef01-", "abcdef01-x", "abcdef01-" + "1" * 20])
def test_last_event_id_that_is_none_is_422(client: httpx.Client, seen: str) -> None:
    answer = client.get(EVENTS, headers={**ACCEPT, "last-event-id": seen})
    assert_problem(answer, 422, None, "Last-Event-ID")


@each("accept", ["application/json", "text/event-stream;q=0, */*;q=0"])
def test_client_that_takes_no_events_is_406(client: httpx.Client, accept: str) -> None:
    assert_problem(client.get(EVENTS, headers={"accept": accept}), 406)


def test_other_methods_are_405_and_head_is_the_head(client: httpx.Client) -> None:
    assert_problem(client.post(EVENTS), 405)
    head = client.head(EVENTS)
    assert (head.status_code, head.headers["content-type"]) == (200, "text/event-stream")


@pytest.mark.parametrize("accept", ["*/*", "text/*", "application/json, text/event-stream"])
def test_events_are_what_there_is(unused: Stream, accept: str) -> None:
    headers = {"accept": accept}
    with unused.client.stream("GET", EVENTS, headers=headers) as response:
        assert response.headers["content-type"] == "text/event-stream"
        unused.configure()
        events = Listener(response)
        while events.next().get("stream") != unused.name:
            pass
        unused.client.delete(unused.path)


# Positions ---------------------------------------------------------------------------------------
def nak(stream: Stream, path: str, count: int) -> None:
    """Give back ``count`` deliveries, a thousand at a time."""
    for _ in range(0, count, 1_000):
        deliveries = stream.next(path, batch=1_000)
        assert len(deliveries) == 1_000
        stream.ack(path, *(delivery["ack_token"] for delivery in deliveries), kind="nak")


def test_client_that_comes_back_continues_after_what_it_saw(stream: Stream) -> None:
    path = stream.consumer("worker")
    with listen(stream.client, stream=stream.name) as events:
        stream.client.delete(path)
        events.next()
    stream.consumer("second")
    stream.consumer("third")
    with listen(stream.client, events.last_id, stream=stream.name) as again:
        assert [again.next()["consumer"] for _ in range(2)] == ["second", "third"]


def test_client_that_saw_no_event_comes_back_to_all_that_followed(stream: Stream) -> None:
    with listen(stream.client, stream=stream.name) as events:
        begin = events.block()
        assert begin is not None
        assert begin.keys() == {"id", ""}
    stream.consumer("worker")
    with listen(stream.client, begin["id"], stream=stream.name) as again:
        assert again.next()["consumer"] == "worker"


def test_client_away_for_too_long_learns_how_much_it_lost(stream: Stream) -> None:
    stream.fill(1_000)
    path = stream.consumer("worker", max_ack_pending=-1)
    with listen(stream.client, stream=stream.name) as events:
        nak(stream, path, 1_000)
        assert events.next()["type"] == "nak"
    nak(stream, path, 5_000)
    with listen(stream.client, events.last_id, types="stream_action") as again:
        event = again.facts()
        # The first thousand of it was there to be seen, all but one.
        assert event == {"type": "lost", "count": 999 + 5_000 - KEPT_MAX}
        stream.configure(max_msgs=2_000)
        assert again.next()["action"] == "modify"


def test_position_of_another_period_is_a_loss_of_unknown_extent(stream: Stream) -> None:
    with listen(stream.client, "00000000-7", types="stream_action") as events:
        assert events.facts() == {"type": "lost"}
        stream.configure(max_msgs=2_000)
        while (event := events.next())["stream"] != stream.name:
            pass
        assert event["action"] in ("create", "modify")


# Bounds and end ----------------------------------------------------------------------------------
@pytest.mark.long
def test_listener_over_the_limit_is_429_until_another_leaves(own_server: ServerProcess) -> None:
    limits = httpx.Limits(max_connections=None)
    with contextlib.ExitStack() as opened, own_server.client(limits=limits) as client:
        last = None
        for _ in range(LISTENERS_MAX):
            last = opened.enter_context(contextlib.ExitStack())
            last.enter_context(listen(client))
        assert_problem(client.get(EVENTS, headers=ACCEPT), 429, 20022)
        assert client.put("/v1/streams/S", json={"subjects": ["s"]}).status_code == 201
        assert last is not None
        last.close()
        while client.head(EVENTS).status_code != 200:
            pass
        with listen(client) as events:
            client.delete("/v1/streams/S")
            assert events.next()["action"] == "delete"


@pytest.mark.long
def test_listener_that_does_not_read_costs_nothing_and_learns_what_it_lost(
    own_server: ServerProcess,
) -> None:
    parts = urlsplit(own_server.url)
    with own_server.client() as client, socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        raw.connect((parts.hostname, parts.port))
        raw.settimeout(30)
        raw.sendall(f"GET {EVENTS} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        received = raw.recv(65_536)
        stream = Stream(client, LONG, "s")
        assert stream.configure().status_code == 201
        stream.fill(1_000)
        path = stream.consumer(LONG, max_ack_pending=-1)
        nak(stream, path, 1_000)
        before = own_server.rss_bytes()
        rounds = 24  # 15 MB of events: more than the buffers of a connection and what is kept
        for _ in range(rounds):
            nak(stream, path, 1_000)
        assert own_server.rss_bytes() - before < 64 << 20
        while b"event: lost" not in received:
            received = received[-32:] + raw.recv(1 << 20)


@pytest.mark.long
def test_shutdown_ends_the_events_with_a_word(own_server: ServerProcess) -> None:
    with own_server.client() as client, listen(client) as events:
        client.put("/v1/streams/S", json={"subjects": ["s"]})
        events.next()
        assert own_server.stop() == 0
        assert events.block() == {"event": "gone", "data": '{"reason":"shutting_down"}'}
        assert events.block() is None
