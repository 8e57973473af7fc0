"""A server that is killed during a restore has all of the stream afterwards, or nothing."""

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from contrail_client import Contrail, Message
from contrail_client.errors import ContrailError
from tests.support.servers import ServerProcess

MESSAGES = 2_000
PIECE = 64 * 1024


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A stream of 4 MB."""
    folder = tmp_path_factory.mktemp("source")
    with ServerProcess(folder / "data") as server, Contrail(server.url) as client:
        client.ensure_stream("S", {"subjects": ["s.>"]})
        messages = [
            Message(f"s.{number % 50}", b"%06d" % number * 330, msg_id=f"id-{number}")
            for number in range(MESSAGES)
        ]
        for _ in client.publish_all("S", messages):
            pass
        client.ensure_consumer("S", "c")
        return b"".join(client.snapshot("S"))


def pieces(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), PIECE):
        yield data[at : at + PIECE]


def is_whole(client: Contrail) -> bool:
    """True if the stream is complete, False if nothing of it exists."""
    if not list(client.list_streams()):
        return False
    [info] = client.list_streams()
    assert (info.state.messages, info.state.last_seq) == (MESSAGES, MESSAGES)
    assert info.state.consumer_count == 1
    found = [
        one.payload for split in client.replay_plan("S").splits for one in client.read_split(split)
    ]
    assert found == [b"%06d" % number * 330 for number in range(MESSAGES)]
    return True


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_killed_before_the_end_of_the_archive_has_nothing(
    tmp_path: Path, archive: bytes, part: float
) -> None:
    with ServerProcess(tmp_path / "data") as server:

        def killing() -> Iterator[bytes]:
            for number, piece in enumerate(pieces(archive)):
                if number * PIECE >= part * len(archive):
                    break
                yield piece
            server.kill()
            yield archive[-1:]

        with Contrail(server.url) as client, pytest.raises(ContrailError):
            client.restore("S", killing())
        server.start()
        with Contrail(server.url) as client:
            assert not is_whole(client)
            client.restore("S", pieces(archive))
            assert is_whole(client)


@pytest.mark.parametrize("attempt", range(2))
def test_killed_around_the_end_has_all_or_nothing(
    tmp_path: Path, archive: bytes, attempt: int
) -> None:
    with ServerProcess(tmp_path / "data") as server:
        sent = threading.Event()

        def telling() -> Iterator[bytes]:
            yield from pieces(archive[:-1])
            if attempt:
                sent.set()
            yield archive[-1:]
            sent.set()

        def kill() -> None:
            sent.wait()
            server.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        answered = False
        with httpx.Client(base_url=server.url, timeout=30.0) as client:
            try:
                answer = client.put(
                    "/v1/streams/S/restore",
                    content=telling(),
                    headers={"content-type": "application/vnd.contrail.snapshot"},
                )
                answered = answer.status_code == 201
            except httpx.HTTPError:
                pass
        killer.join()
        server.start()
        with Contrail(server.url) as reader:
            assert is_whole(reader) or not answered


def test_killed_after_the_answer_has_the_stream(tmp_path: Path, archive: bytes) -> None:
    with ServerProcess(tmp_path / "data") as server:
        with Contrail(server.url) as client:
            client.restore("S", pieces(archive))
        server.kill()
        server.start()
        with Contrail(server.url) as client:
            assert is_whole(client)
