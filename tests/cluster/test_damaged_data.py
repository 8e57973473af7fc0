"""Damaged files under a real server: a sentence instead of a start, a 503 instead of a message."""

import random
from pathlib import Path
from typing import Final

import pytest

from contrail_client import ApiProblem, Contrail, Message, Retries
from tests.crash import damage
from tests.support.servers import ServerProcess

STREAM: Final = "KEPT"
MESSAGES: Final = 20
BLOCKS: Final = 3
PAYLOAD_BYTES: Final = 8_000
SEED: Final = 12


def fill(server: ServerProcess) -> None:
    chance = random.Random(SEED)
    payloads = [chance.randbytes(PAYLOAD_BYTES // 2).hex() for _ in range(MESSAGES)]
    with Contrail(server.url) as client:
        client.ensure_stream(STREAM, {"subjects": ["kept.>"]})
        client.ensure_stream("OTHER", {"subjects": ["other"]})
        for _ in range(BLOCKS):
            client.publish_batch(STREAM, [Message("kept.a", payload) for payload in payloads])
        client.publish("other", b"sound")


@pytest.mark.cluster
def test_rotten_log_refuses_the_start_with_a_sentence(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        fill(server)
        server.kill()
        segment = damage.newest_file(server.data_dir, "wal/*.wal")
        damage.flip_bit(segment, random.Random(SEED), PAYLOAD_BYTES, 2 * PAYLOAD_BYTES)
        with pytest.raises(AssertionError, match="no server") as caught:
            server.start()
    assert "status 1" in str(caught.value)
    assert "the write-ahead log is damaged" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert "--accept-data-loss" in str(caught.value)
    with (
        ServerProcess(tmp_path / "data", accept_data_loss="true") as server,
        server.client() as http,
    ):
        shown = http.get(f"/v1/streams/{STREAM}").json()
        assert shown["data_loss"]["newest_may_be_missing"]
        assert "write-ahead log is damaged" in shown["data_loss"]["reason"]
        server.stop()
    with ServerProcess(tmp_path / "data") as server, Contrail(server.url) as client:
        assert client.publish("kept.a", b"more").seq == shown["state"]["last_seq"] + 1
    assert list((tmp_path / "data/damaged/1/wal").glob("*.wal"))


@pytest.mark.cluster
def test_damaged_ack_key_refuses_the_start_and_is_created_again_on_request(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        server.stop()
        damage.flip_bit(server.data_dir / "ack.key", random.Random(SEED))
        with pytest.raises(AssertionError, match=r"ack\.key does not match") as caught:
            server.start()
        assert "Traceback" not in str(caught.value)
    with ServerProcess(tmp_path / "data", accept_data_loss="true") as server:
        assert server.alive


@pytest.mark.cluster
def test_damaged_block_answers_data_lost_and_spares_the_other_stream(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        fill(server)
        server.stop()
        blocks = max(server.data_dir.glob("store/*.blob"), key=lambda path: path.stat().st_size)
        # The second of the blocks.
        middle = blocks.stat().st_size // 2
        damage.flip_bit(blocks, random.Random(SEED), middle - PAYLOAD_BYTES, middle + PAYLOAD_BYTES)
        server.start()
        with Contrail(server.url, retries=Retries(attempts=1)) as client:
            with pytest.raises(ApiProblem) as caught:
                client.get_message(STREAM, MESSAGES + MESSAGES // 2)
            assert (caught.value.status, caught.value.name) == (503, "data_lost")
            assert client.get_message("OTHER", 1).payload == b"sound"
            with pytest.raises(ApiProblem) as caught:
                client.publish("kept.a", b"more")
            assert caught.value.name == "data_lost"
        server.kill()
    again = ServerProcess(tmp_path / "data", accept_data_loss="true")
    with again as server, Contrail(server.url) as client:
        shown = client.get_stream(STREAM)
        ((first, last),) = shown.data_loss["ranges"]
        assert MESSAGES < first <= MESSAGES + MESSAGES // 2 <= last <= 2 * MESSAGES
        assert shown.data_loss["messages"] == last - first + 1
        assert shown.state.messages == BLOCKS * MESSAGES - shown.data_loss["messages"]
        assert client.get_stream("OTHER").data_loss == {}
        assert client.publish("kept.a", b"more").seq == BLOCKS * MESSAGES + 1
