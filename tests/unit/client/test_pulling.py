"""An endless pull: what is asked for, and when it ends."""

from typing import Any

import msgspec
import pytest

from contrail_client.calls import Retries
from contrail_client.errors import ContrailError, NotFound, OutcomeUnknown, Unreachable
from contrail_client.models import Delivery, Pull
from contrail_client.operations.pulling import Pulls
from contrail_client.reconnecting import Reconnecting

DELIVERY = Delivery(
    stream="S",
    seq=1,
    subject="a",
    time="",
    consumer_seq=1,
    num_delivered=1,
    num_pending=0,
    ack_token="t",
)


def pulls(timeout_s: float | None) -> Pulls[Delivery]:
    reconnecting = Reconnecting(Retries(attempts=2), 60.0)
    return Pulls(
        "S",
        "c",
        reconnecting,
        batch=10,
        expires="30s",
        max_bytes=None,
        timeout_s=timeout_s,
        kind=Delivery,
    )


def asked(of: Pulls[Delivery], now_s: float) -> dict[str, Any] | None:
    call = of.call(now_s)
    return None if call is None else msgspec.json.decode(call.request.body)


def test_without_a_timeout_it_asks_for_ever() -> None:
    endless = pulls(None)
    for now_s in range(0, 100_000, 1_000):
        assert asked(endless, now_s) == {"batch": 10, "expires": "30000ms"}
        endless.came(Pull(), now_s + 30)


def test_it_ends_when_nothing_came_for_the_time_given() -> None:
    ending = pulls(40.0)
    assert asked(ending, 0.0) == {"batch": 10, "expires": "30000ms"}
    ending.came(Pull(), 30.0)
    assert asked(ending, 30.0) == {"batch": 10, "expires": "10000ms"}
    ending.came(Pull((DELIVERY,)), 35.0)
    # How long a message takes to be handled is not silence.
    assert asked(ending, 1_000.0) == {"batch": 10, "expires": "30000ms"}
    ending.came(Pull(), 1_030.0)
    ending.call(1_030.0)
    ending.came(Pull(), 1_040.0)
    assert asked(ending, 1_040.0) is None


def test_without_patience_it_takes_what_is_there() -> None:
    taking = pulls(0.0)
    assert asked(taking, 0.0) == {"batch": 10, "no_wait": True}
    taking.came(Pull((DELIVERY,)), 0.0)
    assert asked(taking, 5.0) == {"batch": 10, "no_wait": True}
    taking.came(Pull(), 5.0)
    assert asked(taking, 5.0) is None


@pytest.mark.parametrize("error", [Unreachable("away"), OutcomeUnknown("cut")])
def test_a_server_that_was_there_is_asked_again(error: ContrailError) -> None:
    asking = pulls(None)
    asking.came(Pull(), 0.0)
    assert asking.failed(error, 0.0, 0.0) > 0
    assert asking.failed(error, 59.0, 0.0) > 0
    with pytest.raises(type(error)):
        asking.failed(error, 61.0, 0.0)
    with pytest.raises(NotFound):
        asking.failed(NotFound(404), 1.0, 0.0)
