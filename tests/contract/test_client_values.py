"""What callers give and get, on every way in and out: headers, times, durations, tables."""

from typing import Any

import pytest

from contrail_client import AsyncContrail, Contrail, Message
from tests.contract.client_rig import finish, new_stream
from tests.support.servers import ServerProcess

JSON_HEADER = {"Content-Type": "application/json"}


async def asynchronous(url: str, stream: str, subject: str, payload: Any, headers: Any) -> None:
    """Publish in each way of the asynchronous client."""
    async with AsyncContrail(url) as client:
        await client.publish(subject, payload, headers=headers)
        await client.publish_unacked(subject, payload, headers=headers)
        await client.publish_batch(stream, [Message(subject, payload, headers)])
        async with client.publisher() as publisher:
            await publisher.publish(subject, payload, headers=headers)


def synchronous(url: str, stream: str, subject: str, payload: Any, headers: Any) -> None:
    """Publish in each way of the synchronous client."""
    with Contrail(url) as client:
        client.publish(subject, payload, headers=headers)
        client.publish_unacked(subject, payload, headers=headers)
        client.publish_batch(stream, [Message(subject, payload, headers)])
        with client.publisher() as publisher:
            publisher.publish(subject, payload, headers=headers)


def test_header_given_as_one_text_is_stored_as_one_value_on_every_way(live: ServerProcess) -> None:
    stream = new_stream(live.url)
    with Contrail(live.url) as client, client.ordered(stream) as stored:
        synchronous(live.url, stream, f"{stream}.a", b"{}", JSON_HEADER)
        finish(asynchronous(live.url, stream, f"{stream}.a", b"{}", JSON_HEADER))
        found = [next(stored).headers for _ in range(8)]
    assert found == [{"Content-Type": ["application/json"]}] * 8


@pytest.mark.parametrize(
    ("payload", "headers"), [({"id": 1}, None), (None, None), (b"", {"Count": 1})]
)
def test_what_cannot_be_stored_is_a_type_error_before_anything_is_sent(
    live: ServerProcess, payload: Any, headers: Any
) -> None:
    stream = new_stream(live.url)
    with pytest.raises(TypeError, match="must be"):
        synchronous(live.url, stream, f"{stream}.a", payload, headers)
    with pytest.raises(TypeError, match="must be"):
        finish(asynchronous(live.url, stream, f"{stream}.a", payload, headers))
    with Contrail(live.url) as client:
        assert client.get_stream(stream).state.messages == 0
