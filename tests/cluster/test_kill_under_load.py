"""`kill -9` under load: each acknowledged message exists once, at its acknowledged sequence."""

import os
import random
from pathlib import Path
from typing import Final

import pytest

from contrail_client import Contrail, StoredMessage
from tests.cluster.load import ALL, STREAM, Load
from tests.cluster.verdict import problems
from tests.support.servers import ServerProcess

ACKS_BETWEEN_KILLS: Final = (150, 900)
PROGRESS_S: Final = 180.0
PAGE: Final = 1_000
SEED: Final = 4_711


def kill_and_restart(server: ServerProcess, load: Load, kills: int, chance: random.Random) -> None:
    """Kill the server `kills` times, each after some more acknowledged publishes."""
    for _ in range(kills):
        wanted = load.journal.acknowledged + chance.randint(*ACKS_BETWEEN_KILLS)
        assert load.journal.wait_for_acknowledged(wanted, PROGRESS_S), "publishing stands still"
        load.end_of_server()
        server.kill()
        server.start()
        load.server_is_up()
    wanted = load.journal.acknowledged + ACKS_BETWEEN_KILLS[0]
    assert load.journal.wait_for_acknowledged(wanted, PROGRESS_S), "publishing stands still"


def read_all(client: Contrail) -> list[StoredMessage]:
    messages: list[StoredMessage] = []
    while True:
        page = client.read_range(STREAM, from_seq=len(messages) + 1, limit=PAGE)
        messages += page.messages
        if not page.messages:
            return messages


def run(data_dir: Path, seed: int, kills: int) -> list[str]:
    """Load a server and kill it `kills` times; returns the broken promises."""
    chance = random.Random(seed)
    with ServerProcess(data_dir) as server:
        load = Load([server.url], seed)
        load.prepare()
        load.start()
        try:
            kill_and_restart(server, load, kills, chance)
            load.finish()
        finally:
            load.abandon()
        assert load.errors == []
        assert load.journal.unknown > 0, "no kill was noticed"
        with Contrail(server.url) as client:
            stored, replayed = read_all(client), list(client.replay(STREAM))
    return problems(load.journal, stored, replayed, eager_consumer=ALL)


@pytest.mark.cluster
def test_server_killed_under_load_keeps_its_promises(tmp_path: Path) -> None:
    assert run(tmp_path / "data", SEED, kills=2) == [], f"seed {SEED}"


@pytest.mark.cluster
@pytest.mark.slow
def test_server_killed_many_times_keeps_its_promises(tmp_path: Path) -> None:
    seed = int(os.environ.get("CONTRAIL_SOAK_SEED", SEED))
    kills = int(os.environ.get("CONTRAIL_SOAK_KILLS", "30"))
    assert run(tmp_path / "data", seed, kills) == [], f"seed {seed}"
