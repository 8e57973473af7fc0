"""Budgets and the end of the process: sockets that are not read, drains, bounded memory."""

import concurrent.futures
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from tests.contract.conftest import Stream
from tests.contract.talk import MSGPACK, OP_TEXT, RawSocket, Talk, frame_bytes, seqs, wait_until
from tests.support.servers import ServerProcess

MIB = 1 << 20
WHOLE = {"msgs": 1_000_000}


@pytest.fixture
def own(own_server: ServerProcess) -> Iterator[Stream]:
    """A stream on a server of the test's own."""
    with own_server.client() as client:
        stream = Stream(client, "T", "t")
        assert stream.configure().status_code == 201
        yield stream


def wait_a_moment() -> None:
    """Read slower than the server sends."""
    time.sleep(0.05)


def metric(client: httpx.Client, line: str) -> float:
    """The value of a metric, 0 while it has none."""
    for one in client.get("/metrics").text.splitlines():
        if one.startswith(line + " "):
            return float(one.rpartition(" ")[2])
    return 0.0


def text(**frame: Any) -> bytes:
    return frame_bytes(OP_TEXT, json.dumps(frame).encode())


def fill_with_large(stream: Stream, count: int) -> None:
    for _ in range(count):
        assert stream.publish(b"x" * 1_000_000).status_code == 201


# Slow readers ------------------------------------------------------------------------------------
@pytest.mark.long
def test_socket_that_is_not_read_is_closed_when_its_budget_is_spent(
    own_server: ServerProcess, own: Stream
) -> None:
    fill_with_large(own, 25)
    with RawSocket(own_server.url) as unread:
        unread.opened()
        unread.send(text(op="sub", id=1, sid="s", stream="T", ordered=True, credit=WHOLE))
        wait_until(lambda: metric(own.client, 'contrail_socket_closes_total{code="4008"}') == 1)
        assert metric(own.client, "contrail_subscriptions") == 0
        assert unread.close_code() == 4008


@pytest.mark.long
def test_answers_that_nobody_reads_spend_the_budget_too(
    own_server: ServerProcess, own: Stream
) -> None:
    ping = text(op="ping", id="x" * 200)
    before = own_server.rss_bytes()
    with RawSocket(own_server.url) as unread:
        unread.opened()
        while not metric(own.client, 'contrail_socket_closes_total{code="4008"}'):
            unread.send(ping * 1_000)
    assert own_server.rss_bytes() - before < 64 * MIB


@pytest.mark.long
def test_slow_reader_that_does_read_gets_everything(own_server: ServerProcess, own: Stream) -> None:
    fill_with_large(own, 30)
    with RawSocket(own_server.url) as slow:
        slow.opened()
        slow.send(text(op="sub", id=1, sid="s", stream="T", ordered=True, credit=WHOLE))
        found: list[int] = []
        while len(found) < 30:
            frame = json.loads(slow.frame()[1])
            if frame["op"] == "msgs":
                found += seqs(frame["messages"])
            wait_a_moment()
    assert found == list(range(1, 31))


@pytest.mark.long
def test_unread_sockets_do_not_hold_up_others(own_server: ServerProcess, own: Stream) -> None:
    fill_with_large(own, 20)
    with RawSocket(own_server.url) as unread, Talk(own_server.url) as talk:
        unread.opened()
        unread.send(text(op="sub", id=1, sid="s", stream="T", ordered=True, credit=WHOLE))
        talk.done("sub", sid="s", stream="T", ordered=True, credit=WHOLE)
        assert len(talk.messages(20)) == 20


@pytest.mark.long
def test_sockets_that_never_read_are_bounded_over_all_of_them(
    own_server: ServerProcess, own: Stream
) -> None:
    fill_with_large(own, 12)
    before = own_server.rss_bytes()
    unread = [RawSocket(own_server.url) for _ in range(60)]
    try:
        for raw in unread:
            raw.opened()
            raw.send(text(op="sub", id=1, sid="s", stream="T", ordered=True, credit=WHOLE))
        wait_until(lambda: metric(own.client, "contrail_http_unread_cut_total") > 0)
        assert metric(own.client, "contrail_http_unread_bytes") <= 256 * MIB
        assert own_server.rss_bytes() - before < 600 * MIB
        assert own.publish().status_code == 201
    finally:
        for raw in unread:
            raw.tcp.close()
    wait_until(lambda: metric(own.client, "contrail_http_unread_bytes") == 0)


def test_unfinished_messages_are_bounded_over_all_sockets(
    own_server: ServerProcess, own: Stream
) -> None:
    part = frame_bytes(OP_TEXT, b"x" * 7 * MIB, length=8 * MIB)
    opened = [RawSocket(own_server.url) for _ in range(40)]
    try:
        for raw in opened:
            raw.send(part)
        wait_until(lambda: metric(own.client, 'contrail_socket_closes_total{code="4029"}') > 0)
        assert metric(own.client, "contrail_http_body_bytes_in_flight") <= 256 * MIB
        assert own.publish().status_code == 201
    finally:
        for raw in opened:
            raw.tcp.close()
    wait_until(lambda: metric(own.client, "contrail_http_body_bytes_in_flight") == 0)


# The end of the process --------------------------------------------------------------------------
def stop_in_background(server: ServerProcess) -> "concurrent.futures.Future[int]":
    """Send SIGTERM; the future gives the exit status."""
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    threading.Thread(target=lambda: future.set_result(server.stop())).start()
    return future


def test_idle_socket_is_notified_and_closed_when_the_process_stops(
    own_server: ServerProcess, own: Stream
) -> None:
    with Talk(own_server.url) as talk:
        talk.done("sub", sid="s", stream="T", ordered=True, credit=WHOLE)
        status = stop_in_background(own_server)
        assert talk.next("drain")["grace"] == "5s"
        assert talk.closed() == 4000
        assert status.result(60) == 0


def test_messages_in_hand_can_be_acknowledged_while_the_process_stops(
    own_server: ServerProcess, own: Stream
) -> None:
    own.fill(10)
    own.consumer()
    with Talk(own_server.url) as talk:
        talk.done("sub", sid="s", stream="T", consumer="c", credit={"msgs": 4})
        talk.messages(4)
        status = stop_in_background(own_server)
        talk.next("drain")
        assert talk.refused("sub", sid="new", stream="T")["name"] == "shutting_down"
        talk.done("ack", sid="s", seqs=[1, 2, 3, 4])
        assert talk.closed() == 4000
    assert status.result(60) == 0
    own_server.start()
    with own_server.client() as client:
        again = Stream(client, "T", "t")
        deliveries = again.next(f"{again.path}/consumers/c", batch=10)
        assert seqs(deliveries) == [5, 6, 7, 8, 9, 10]


def test_every_message_acknowledged_before_the_end_is_stored(
    own_server: ServerProcess, own: Stream
) -> None:
    acknowledged = 0
    with Talk(own_server.url, MSGPACK) as talk:
        status = None
        for number in range(3_000):
            if number == 500:
                status = stop_in_background(own_server)
            talk.send({"op": "pub", "id": number, "subject": "t.a", "data": b"x"})
        assert status is not None
        with contextlib.suppress(ConnectionClosed):
            while True:
                acknowledged += talk.next()["op"] == "ack"
        assert talk.closed() == 4000
        assert status.result(60) == 0
    own_server.start()
    with own_server.client() as client:
        assert Stream(client, "T", "t").state()["messages"] >= acknowledged >= 500


def test_long_polls_and_sockets_end_together(own_server: ServerProcess, own: Stream) -> None:
    path = own.consumer()
    with Talk(own_server.url) as talk, own_server.client() as waiting:
        answers: list[httpx.Response] = []
        poll = threading.Thread(
            target=lambda: answers.append(waiting.post(f"{path}/next", json={"expires": "30s"}))
        )
        poll.start()
        wait_until(lambda: metric(own.client, "contrail_http_waiting") == 1)
        own.client.close()
        status = stop_in_background(own_server)
        assert talk.closed() == 4000
        poll.join(60)
        assert answers[0].status_code == 503
        assert status.result(60) == 0


def test_subscriber_comes_back_to_a_restarted_server_without_loss(
    own_server: ServerProcess, own: Stream
) -> None:
    own.fill(5)
    with Talk(own_server.url) as talk:
        talk.done("sub", sid="s", stream="T", ordered=True, credit=WHOLE)
        last = seqs(talk.messages(5))[-1]
        own_server.kill()
    own_server.start()
    with own_server.client() as client:
        Stream(client, "T", "t").fill(2)
    with Talk(own_server.url) as talk:
        resume = {"deliver_policy": "by_start_sequence", "opt_start_seq": last + 1}
        talk.done("sub", sid="s", stream="T", ordered=True, credit=WHOLE, **resume)
        assert seqs(talk.messages(2)) == [6, 7]
