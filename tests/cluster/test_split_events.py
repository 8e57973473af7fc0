"""Events in the split form, when storage dies."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.contract.test_events import EVENTS, Listener, listen
from tests.support.servers import SplitServers

pytestmark = pytest.mark.cluster
SUBJECTS: dict[str, Any] = {"subjects": ["s.>"]}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SplitServers]:
    with SplitServers(tmp_path_factory.mktemp("split")) as running:
        yield running


@pytest.fixture
def split(servers: SplitServers) -> SplitServers:
    """All processes, restarted if the previous test ended them, without streams."""
    servers.start()
    with servers.client() as client:
        client.delete("/v1/streams/S")
    return servers


def until_lost(events: Listener) -> list[str]:
    """The actions up to the event `lost`."""
    actions: list[str] = []
    while (event := events.next())["type"] != "lost":
        actions.append(event["action"])
    assert "count" not in event
    return actions


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_listeners_learn_that_storage_is_away_and_continue_after_it(
    split: SplitServers, end: str
) -> None:
    with ExitStack() as opened, split.client() as client:
        everywhere = [
            opened.enter_context(listen(opened.enter_context(edge.client())))
            for edge in split.edges
        ]
        assert client.put("/v1/streams/S", json=SUBJECTS).status_code == 201
        for events in everywhere:
            assert events.next()["action"] == "create"
        getattr(split.storage, end)()
        for events in everywhere:
            assert events.block() == {"": "the storage is away"}
        split.storage.start()
        split.wait_until_ready(split.edges)
        for events in everywhere:
            assert until_lost(events) == []
        assert client.delete("/v1/streams/S").status_code == 204
        for events in everywhere:
            assert events.next()["action"] == "delete"


def test_nobody_can_listen_while_storage_is_away(split: SplitServers) -> None:
    split.storage.kill()
    for edge in split.edges:
        answer = httpx.get(f"{edge.url}{EVENTS}", timeout=60)
        assert (answer.status_code, answer.json()["retryable"]) == (503, True)


def test_api_that_stops_ends_its_events_and_those_of_the_gateways_that_asked_it(
    split: SplitServers,
) -> None:
    split.apis[1].stop()
    with (
        split.apis[0].client() as direct,
        split.gateways[0].client() as through,
        listen(direct) as one,
        listen(through) as other,
    ):
        assert split.apis[0].stop() == 0
        for events in (one, other):
            ended = [events.block(), events.block(), events.block()]
            assert {"event": "gone", "data": '{"reason":"shutting_down"}'} in ended
            assert ended[-1] is None


def test_gateway_that_stops_ends_the_events_it_passes_on(split: SplitServers) -> None:
    # Without an Accept header, only the answer says that it is endless.
    with split.gateways[0].client() as client:
        del client.headers["accept"]
        with client.stream("GET", EVENTS) as response:
            events = Listener(response)
            assert events.block() == {"retry": "1000"}
            assert split.gateways[0].stop() == 0
            while events.block() is not None:
                pass
