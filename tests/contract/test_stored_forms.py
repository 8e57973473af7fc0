"""What a stream's configuration says of the form in which its messages are stored."""

import pytest

from tests.contract.conftest import Stream, assert_problem


@pytest.mark.parametrize("given", ["none", "lz4", "zstd", "s2"])
def test_compression_is_shown_as_it_was_asked_for(unused: Stream, given: str) -> None:
    answer = unused.configure(compression=given)
    assert answer.status_code == 201
    assert answer.json()["config"]["compression"] == given
    again = unused.configure(compression=given)
    assert (again.status_code, again.headers["etag"]) == (200, answer.headers["etag"])


def test_compression_of_a_stream_may_change_and_its_messages_stay(stream: Stream) -> None:
    for compression in ("zstd", "lz4", "s2", "none"):
        assert stream.configure(compression=compression).status_code == 200
        for _ in range(3):
            stream.publish(compression.encode() * 4_000)
    found = stream.client.get(f"{stream.path}/messages", params={"limit": 20}).json()["messages"]
    texts = [message["data"] for message in found]
    assert texts == [name * 4_000 for name in ("zstd", "lz4", "s2", "none") for _ in range(3)]


def test_unknown_compression_is_422_at_its_field(unused: Stream) -> None:
    assert_problem(unused.configure(compression="gzip"), 422, None, "/compression")


def test_stream_that_must_be_encrypted_is_refused_by_a_server_without_a_key(stream: Stream) -> None:
    assert_problem(stream.configure(encrypted=True), 422, 10052, "/encrypted")
    assert stream.client.get(stream.path).json()["config"]["encrypted"] is False
