"""What the contract tests send is answered alike in the short ways and by declared routes.

The fixture ``client`` sends the requests of each test again to two servers and compares. Here is
what shows that this covers every operation, and that it finds differences.
"""

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.contract.conftest import Stream
from tests.contract.exchanges import Ask, Conversation, conversation
from tests.contract.plants import PLANTS
from tests.contract.replays import Exchange, Recorder, Twins
from tests.contract.talk import wait_until
from tests.contract.test_forms import BAD, IN_CLUSTERS, OPERATIONS
from tests.support.servers import ServerProcess

pytestmark = pytest.mark.other_form

LEFT_OUT = {
    "/v1/subjects/s.a/messages?ack=none", "/v1/subjects/nobody.listens/messages?ack=none",
}  # fmt: skip
"""Targets in the conversation that are not asked again."""


def recorded(server: ServerProcess, asks: list[Ask]) -> list[Exchange]:
    """What is sent for ``asks`` to a server that has no streams."""
    recorder = Recorder()
    with server.client(transport=recorder) as client:
        conversing = Conversation(client, headers={}, strict=False)
        for ask in asks:
            conversing.ask(ask)
    return recorder.exchanges


def origin(server: ServerProcess) -> str:
    return server.url.removeprefix("http://")


def test_every_operation_is_compared_once_well_and_once_badly(twins: Twins, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        exchanges = recorded(server, conversation())
    found = twins.differences(exchanges, origin(server))
    assert not found, "\n".join(found)
    replayed = [one for one in exchanges if not one.is_left_out]
    assert {one.target for one in exchanges if one.is_left_out} == LEFT_OUT
    asked = {
        (name, one.status < BAD)
        for one in replayed
        for name, form in OPERATIONS.items()
        if form.fullmatch(f"{one.method} {one.target}")
    }
    wanted = {(name, well) for name in OPERATIONS for well in (True, False)}
    assert wanted - asked == {(name, True) for name in IN_CLUSTERS}


def test_client_of_a_contract_test_is_recorded(stream: Stream) -> None:
    stream.publish(b"text")
    recorder = stream.client._transport
    assert isinstance(recorder, Recorder)
    assert [one.method for one in recorder.exchanges] == ["PUT", "POST"]
    assert recorder.exchanges[1].pieces == [b"text"]


def test_consumer_with_a_random_name_is_created_once(fast: ServerProcess) -> None:
    path = "/v1/streams/ONCE"
    asks = [
        Ask("PUT", path, 201, json={"subjects": ["once"]}),
        Ask("POST", f"{path}/consumers", 201, json={}),
        Ask("POST", f"{path}/consumers", 201, json={"name": "named"}),
        Ask("POST", f"{path}/consumers", 422, json={"max_waiting": -1}),
        Ask("GET", f"{path}/consumers", 200),
        Ask("DELETE", path, 204),
    ]
    twice = [one.comes_twice for one in recorded(fast, asks)]
    assert twice == [False, False, True, True, True, False]


def test_nothing_ends_by_time_in_a_replay(fast: ServerProcess, twins: Twins) -> None:
    path = "/v1/streams/TIMED"
    lasting = {f"{path}/messages/1", f"{path}/consumers/c"}
    with ExitStack() as stack:
        servers = (twins.fast, twins.declared, fast)
        *slow, usual = [stack.enter_context(server.client()) for server in servers]
        for client in (*slow, usual):
            client.put(path, json={"subjects": ["timed"], "allow_msg_ttl": True})
            client.post("/v1/subjects/timed/messages", headers={"nats-ttl": "1s"})
            config = {"name": "c", "durable_name": None, "inactive_threshold": "100ms"}
            client.post(f"{path}/consumers", json=config)
        wait_until(lambda: all(usual.get(target).status_code == 404 for target in lasting))
        for client in slow:
            assert {client.get(target).status_code for target in lasting} == {200}
        for client in (*slow, usual):
            assert client.delete(path).status_code == 204


# Planted differences -----------------------------------------------------------------------------
P = "/v1/streams/P"
SHORT = [
    Ask("PUT", P, 201, json={"subjects": ["planted.>"]}),
    Ask("POST", "/v1/subjects/planted.a/messages", 201, content=b"first"),
    Ask("POST", "/v1/subjects/planted.a/messages", 201, content=b"other"),
    Ask("POST", "/v1/subjects/planted.*/messages", 422, content=b"x"),
    Ask("GET", f"{P}/messages/1", 200),
    Ask("GET", f"{P}/messages/2", 200),
    Ask("GET", f"{P}/last?subject=planted.a", 200),
    Ask("GET", f"{P}/last?subject=planted.b", 200),
    Ask("GET", f"{P}/last?limit=0", 422),
    Ask("PUT", f"{P}/consumers/c", 201, json={}),
    Ask("POST", f"{P}/consumers/c/next", 200, json={"batch": 9}),
    Ask("DELETE", P, 204),
    Ask("GET", f"{P}/messages/1", 404),
]


@pytest.fixture(scope="module")
def short(twins: Twins) -> list[Exchange]:
    """A record whose replay shows no difference yet."""
    exchanges = recorded(twins.fast, SHORT)
    assert twins.differences(exchanges, origin(twins.fast)) == []
    return exchanges


SHOWN_BY = {
    "another status": "POST /v1/subjects/planted.a/messages",
    "a lost header": "POST /v1/subjects/planted.a/messages",
    "a lost field": f"POST {P}/consumers/c/next",
    "a subject that is not checked": "POST /v1/subjects/planted.*/messages",
    "a limit that is not checked": f"GET {P}/last?limit=0",
    "a cache of a deleted stream": f"GET {P}/messages/1",
    "the body of another request": f"GET {P}/",  # which one depends on the body that came first
    "the query of another request": f"GET {P}/last?subject=planted.b",
}
"""A request whose answers show the planted difference."""


@pytest.mark.parametrize("name", PLANTS)
def test_planted_difference_of_the_short_ways_is_found(
    name: str, short: list[Exchange], twins: Twins, tmp_path: Path
) -> None:
    server = ServerProcess(tmp_path / "data")
    server.program = (sys.executable, "-m", "tests.contract.plants", name)
    with server:
        found = Twins(server, twins.declared).differences(short, origin(twins.fast))
    assert any(text.startswith(SHOWN_BY[name]) for text in found), found
