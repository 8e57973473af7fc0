"""Publishing, consuming and the child process, against a real server and without Spark."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from contrail_client import Consumer, Contrail
from contrail_common.subjects import matches
from contrail_flights.dataset import Flight, load_dataset
from contrail_flights.route import (
    PULLED,
    PUSHED,
    PulledRoute,
    PushedRoute,
    Route,
    RouteError,
    RouteReceiver,
    new_consumer,
)
from contrail_flights.server import serving
from contrail_flights.stream import (
    STREAM,
    Found,
    create,
    judge,
    publish_all,
    stream_info,
)
from contrail_flights.tally import Tally, tally_of

LIMIT = 3_500


def unheard(count: int) -> None:
    """Progress that nobody follows."""


@pytest.fixture(scope="module")
def flights() -> list[Flight]:
    """The first flights of the year; the last batch of them is not full."""
    return load_dataset(LIMIT).flights


@pytest.fixture(scope="module")
def whole(flights: list[Flight]) -> Tally:
    return tally_of((flight.subject, flight.payload) for flight in flights)


def tally_on(route: Route, flights: list[Flight]) -> Tally:
    """What the CSV has of a route."""
    return tally_of(
        (flight.subject, flight.payload)
        for flight in flights
        if matches(route.subjects, flight.subject)
    )


def receiver(client: Contrail, route: Route, consumer: Consumer, expected: int) -> RouteReceiver:
    """The receiver of a route, as the run has it."""
    if route is PULLED:
        return PulledRoute(consumer, expected, unheard)
    return PushedRoute(client, consumer, expected, unheard)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of its own on a free port."""
    with serving(0, tmp_path_factory.mktemp("data")) as server:
        yield server.url


@pytest.fixture
def client(url: str) -> Iterator[Contrail]:
    """A client of that server, which has no stream FLIGHTS yet."""
    with Contrail(url) as client:
        if stream_info(client):
            client.delete_stream(STREAM)
        yield client


def test_flights_are_stored_in_time_order_and_tallied(
    client: Contrail, flights: list[Flight], whole: Tally
) -> None:
    create(client, whole)
    heard: list[int] = []
    published = publish_all(client, flights, heard.append)
    assert published.tally == whole
    assert (sum(heard), published.rate > 0) == (LIMIT, True)
    stored = list(client.replay(STREAM))
    assert [message.payload for message in stored] == [flight.payload for flight in flights]


def test_flights_published_twice_are_stored_once(
    client: Contrail, flights: list[Flight], whole: Tally
) -> None:
    create(client, whole)
    publish_all(client, flights, unheard)
    assert publish_all(client, flights, unheard).tally == whole
    assert client.get_stream(STREAM).state.messages == LIMIT


def test_what_a_run_leaves_is_recognised_by_the_next(
    client: Contrail, flights: list[Flight], whole: Tally
) -> None:
    assert judge(stream_info(client), whole) is Found.NOTHING
    create(client, whole)
    assert judge(stream_info(client), whole) is Found.INCOMPLETE
    publish_all(client, flights, unheard)
    assert judge(stream_info(client), whole) is Found.COMPLETE
    client.publish("flights.A.B.C", b"by hand")
    assert judge(stream_info(client), whole) is Found.FOREIGN


@pytest.mark.parametrize("route", [PULLED, PUSHED], ids=lambda route: route.name)
def test_the_route_is_delivered_in_full_while_it_is_published(
    client: Contrail, flights: list[Flight], whole: Tally, route: Route
) -> None:
    create(client, whole)
    expected = tally_on(route, flights)
    consumer = new_consumer(client, route)
    with receiver(client, route, consumer, expected.count) as at_work:
        publish_all(client, flights, unheard)
        assert at_work.finish() == expected
    info = consumer.info()
    assert expected.count > 0
    assert (info.num_pending, info.num_ack_pending) == (0, 0)


@pytest.mark.parametrize("route", [PULLED, PUSHED], ids=lambda route: route.name)
def test_a_consumer_created_again_delivers_the_route_again(
    client: Contrail, flights: list[Flight], whole: Tally, route: Route
) -> None:
    create(client, whole)
    publish_all(client, flights, unheard)
    expected = tally_on(route, flights)
    for _ in range(2):
        consumer = new_consumer(client, route)
        with receiver(client, route, consumer, expected.count) as at_work:
            assert at_work.finish() == expected


@pytest.mark.parametrize("route", [PULLED, PUSHED], ids=lambda route: route.name)
def test_a_consumer_that_fails_in_its_thread_fails_the_run(
    client: Contrail, whole: Tally, route: Route
) -> None:
    create(client, whole)
    consumer = new_consumer(client, route)
    consumer.delete()
    with (
        receiver(client, route, consumer, 1) as at_work,
        pytest.raises(RouteError, match=f"consumer {route.consumer} failed"),
    ):
        at_work.finish()


def test_the_server_takes_no_settings_of_the_environment_and_ends_with_its_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTRAIL_TOKEN", "of-another-server")
    with serving(0, tmp_path) as server, Contrail(server.url) as client:
        assert list(client.list_streams()) == []
        assert server.ended() is None
    assert server.process.returncode == 0


def test_the_server_ends_when_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), serving(0, tmp_path) as server:
        raise KeyboardInterrupt
    assert server.process.returncode == 0


def test_a_server_that_is_killed_is_reported_with_its_last_output(tmp_path: Path) -> None:
    with serving(0, tmp_path) as server:
        os.kill(server.process.pid, signal.SIGKILL)
        told = str(server.wait())
    assert "ended with signal SIGKILL" in told
    assert f"{tmp_path / 'serve.log'} ends:" in told
    assert "serving" in told
