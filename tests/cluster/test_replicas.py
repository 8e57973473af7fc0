"""A stream on three nodes under load: what it keeps when its leader is killed or stands still."""

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Final

import pytest

from contrail_client import Contrail
from tests.cluster.load import ALL, STREAM, Load
from tests.cluster.test_kill_under_load import ACKS_BETWEEN_KILLS, PROGRESS_S, read_all
from tests.cluster.verdict import problems
from tests.support.servers import Process, SplitServers

SEED: Final = 5_281
NODES: Final = 3
REPLICATED: Final = 7
"""Groups of three nodes with several members, the meta group among them."""

pytestmark = pytest.mark.cluster


def leader(servers: SplitServers) -> Process:
    """The node that leads the stream."""
    with servers.client() as client:
        name = client.get(f"/v1/streams/{STREAM}").json()["cluster"]["leader"]
    return next(one for one in servers.storages if one.settings["node"] == name)


def until_acknowledged(load: Load, more: int) -> None:
    wanted = load.journal.acknowledged + more
    assert load.journal.wait_for_acknowledged(wanted, PROGRESS_S), "publishing stands still"


def kill(node: Process, load: Load, more: int) -> None:
    """Kill a node, and start it again once the others have gone on."""
    node.kill()
    until_acknowledged(load, more)
    node.start()


def hold_still(node: Process, load: Load, more: int) -> None:
    """Stop a node, and let it continue once the others have gone on."""
    os.kill(node.pid, signal.SIGSTOP)
    try:
        until_acknowledged(load, more)
    finally:
        os.kill(node.pid, signal.SIGCONT)


def wait_until_logged(node: Process, event: str, count: int) -> None:
    """Wait until a node's log has so many lines of an event."""
    deadline = time.monotonic() + PROGRESS_S
    while node.log.read_text().count(event) < count:
        assert time.monotonic() < deadline, node.log.read_text()[-4_000:]
        time.sleep(0.05)


def run(folder: Path, seed: int, rounds: int) -> list[str]:
    """Load three nodes and take the leader from them in turn; returns the broken promises."""
    chance = random.Random(seed)
    with SplitServers(folder, NODES) as servers:
        load = Load([edge.url for edge in servers.edges], seed, NODES)
        load.prepare()
        load.start()
        try:
            for number in range(rounds):
                until_acknowledged(load, chance.randint(*ACKS_BETWEEN_KILLS))
                take = hold_still if number % 2 else kill
                take(leader(servers), load, chance.randint(*ACKS_BETWEEN_KILLS))
            until_acknowledged(load, ACKS_BETWEEN_KILLS[0])
            load.finish()
        finally:
            load.abandon()
        assert load.errors == []
        with Contrail(servers.url) as client:
            stored, replayed = read_all(client), list(client.replay(STREAM))
    return problems(load.journal, stored, replayed, eager_consumer=ALL)


def test_stream_goes_on_without_its_leader_and_keeps_its_promises(tmp_path: Path) -> None:
    assert run(tmp_path, SEED, rounds=2) == [], f"seed {SEED}"


@pytest.mark.slow
def test_stream_that_loses_its_leader_many_times_keeps_its_promises(tmp_path: Path) -> None:
    seed = int(os.environ.get("CONTRAIL_SOAK_SEED", SEED))
    rounds = int(os.environ.get("CONTRAIL_SOAK_KILLS", "30"))
    assert run(tmp_path, seed, rounds) == [], f"seed {seed}"


def test_lost_folder_is_filled_again_before_its_node_counts(tmp_path: Path) -> None:
    """The folder of a node that does not lead is deleted; once it is back, the leader is killed."""
    with SplitServers(tmp_path, NODES) as servers:
        load = Load([edge.url for edge in servers.edges], SEED, NODES)
        load.prepare()
        load.start()
        try:
            until_acknowledged(load, ACKS_BETWEEN_KILLS[0])
            first = leader(servers)
            lost = next(one for one in servers.storages if one is not first)
            lost.kill()
            shutil.rmtree(lost.settings["data_dir"])
            until_acknowledged(load, ACKS_BETWEEN_KILLS[0])
            lost.start()
            wait_until_logged(lost, "member_whole", REPLICATED)
            assert lost.log.read_text().count("member_restoring") == REPLICATED
            first.kill()
            until_acknowledged(load, ACKS_BETWEEN_KILLS[0])
            first.start()
            load.finish()
        finally:
            load.abandon()
        assert load.errors == []
        with Contrail(servers.url) as client:
            stored, replayed = read_all(client), list(client.replay(STREAM))
    assert problems(load.journal, stored, replayed, eager_consumer=ALL) == []
