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


@pytest.mark.cluster
def test_damaged_block_answers_data_lost_and_spares_the_other_stream(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        fill(server)
        server.stop()
        table = max(server.data_dir.glob("store/*.sst"), key=lambda path: path.stat().st_size)
        # The second of the blocks: the first shares its checksum with what a start reads.
        middle = table.stat().st_size // 2
        damage.flip_bit(table, random.Random(SEED), middle - PAYLOAD_BYTES, middle + PAYLOAD_BYTES)
        server.start()
        with Contrail(server.url, retries=Retries(attempts=1)) as client:
            with pytest.raises(ApiProblem) as caught:
                client.get_message(STREAM, MESSAGES + MESSAGES // 2)
            assert (caught.value.status, caught.value.name) == (503, "data_lost")
            assert client.get_message("OTHER", 1).payload == b"sound"
            with pytest.raises(ApiProblem) as caught:
                client.publish("kept.a", b"more")
            assert caught.value.name == "data_lost"
