"""Limits that a stream sets for its consumers: defaults, caps, and changes of them."""

from typing import Any

import httpx
import pytest

from tests.contract.conftest import Stream, assert_problem
from tests.contract.talk import Talk
from tests.support.servers import ServerProcess

LIMITS = {"inactive_threshold": "5m", "max_ack_pending": 10}


def put(stream: Stream, name: str = "c", **config: Any) -> httpx.Response:
    return stream.client.put(f"{stream.path}/consumers/{name}", json=config)


@pytest.fixture
def limited(unused: Stream) -> Stream:
    """A stream with limits for consumers."""
    assert unused.configure(consumer_limits=LIMITS).status_code == 201
    return unused


def test_limits_are_shown_and_none_by_default(limited: Stream) -> None:
    shown = limited.client.get(limited.path).json()["config"]
    assert shown["consumer_limits"] == LIMITS
    again = limited.client.put(limited.path, json=shown)
    assert (again.status_code, again.json()["config"]) == (200, shown)
    assert limited.configure().json()["config"]["consumer_limits"] == {}


def test_consumer_takes_the_limits_as_defaults(limited: Stream) -> None:
    config = put(limited).json()["config"]
    assert config["max_ack_pending"] == 10
    assert config["inactive_threshold"] == "5m"
    ephemeral = limited.client.post(f"{limited.path}/consumers", json={}).json()["config"]
    assert ephemeral["inactive_threshold"] == "5m"
    assert put(limited).status_code == 200


def test_consumer_without_limits_has_the_defaults_of_the_server(stream: Stream) -> None:
    config = put(stream).json()["config"]
    assert (config["max_ack_pending"], config["inactive_threshold"]) == (1000, "0s")
    ephemeral = stream.client.post(f"{stream.path}/consumers", json={}).json()["config"]
    assert ephemeral["inactive_threshold"] == "5s"


def test_consumer_at_the_limits_is_made(limited: Stream) -> None:
    assert put(limited, max_ack_pending=10, inactive_threshold="5m").status_code == 201
    assert put(limited, "less", max_ack_pending=9, inactive_threshold="1s").status_code == 201


@pytest.mark.parametrize("value", [11, -1])
def test_max_ack_pending_over_the_limit_is_422(limited: Stream, value: int) -> None:
    assert_problem(put(limited, max_ack_pending=value), 422, 10121)
    assert put(limited).status_code == 201
    assert_problem(put(limited, max_ack_pending=value), 422, 10121)


def test_inactive_threshold_over_the_limit_is_422(limited: Stream) -> None:
    over = {"inactive_threshold": 300_000_000_001}
    assert_problem(put(limited, **over), 422, 10153)
    assert put(limited).status_code == 201
    assert_problem(put(limited, **over), 422, 10153)


def test_consumer_without_acks_has_no_cap_of_pending_ones(limited: Stream) -> None:
    assert put(limited, ack_policy="none").status_code == 201


def test_limits_below_an_existing_consumer_are_409(stream: Stream) -> None:
    assert put(stream, max_ack_pending=10, inactive_threshold="5m").status_code == 201
    for limits in ({"max_ack_pending": 9}, {"inactive_threshold": "4m59s"}):
        refused = stream.configure(consumer_limits=limits)
        assert_problem(refused, 409, 10052, "/consumer_limits")
    assert stream.client.get(stream.path).json()["config"]["consumer_limits"] == {}
    assert stream.configure(consumer_limits=LIMITS).status_code == 200
    assert stream.configure(consumer_limits={}).status_code == 200


def test_threshold_limit_is_refused_while_a_consumer_stays_for_ever(stream: Stream) -> None:
    assert put(stream).status_code == 201
    assert_problem(stream.configure(consumer_limits=LIMITS), 409, 10052, "/consumer_limits")


@pytest.mark.parametrize("ordered", [True, False])
def test_subscription_of_its_own_keeps_to_the_threshold_and_outlives_it(
    stream: Stream, server: ServerProcess, ordered: bool
) -> None:
    assert stream.configure(consumer_limits={"inactive_threshold": "300ms"}).status_code == 200
    with Talk(server.url) as talk:
        talk.done("connect", heartbeat="200ms")
        talk.done("sub", sid="s", stream=stream.name, ordered=ordered, credit={"msgs": 0})
        for _ in range(5):
            talk.next("hb")  # a second without credit, nobody pulls
        stream.publish(b"later")
        talk.send({"op": "credit", "sid": "s", "msgs": 1})
        found = next(frame for frame in iter(talk.next, None) if frame["op"] != "hb")
        assert [message["data"] for message in found["messages"]] == ["later"]
        assert found["messages"][0]["consumer_seq"] == 1


@pytest.mark.parametrize("limits", [{"max_ack_pending": -1}, {"inactive_threshold": -1}])
def test_negative_limit_is_422(stream: Stream, limits: dict[str, int]) -> None:
    refused = stream.configure(consumer_limits=limits)
    assert_problem(refused, 422, 10052, f"/consumer_limits/{next(iter(limits))}")


def test_limits_hold_after_a_patch_of_another_field(limited: Stream) -> None:
    answer = limited.client.patch(
        limited.path,
        json={"description": "d"},
        headers={"content-type": "application/merge-patch+json"},
    )
    assert answer.json()["config"]["consumer_limits"] == LIMITS
