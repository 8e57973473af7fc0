"""Three nodes that are restarted one after the other under load, as an operator does it."""

from pathlib import Path
from typing import Final

import pytest

from contrail_client import Contrail
from tests.cluster.load import ALL, STREAM, Load
from tests.cluster.test_kill_under_load import read_all
from tests.cluster.test_replicas import leader, until_acknowledged
from tests.cluster.verdict import problems
from tests.support.servers import SplitServers

SEED: Final = 9_713
NODES: Final = 3

pytestmark = pytest.mark.cluster


def test_rolling_restart_loses_nothing_and_leaves_no_outcome_unknown(tmp_path: Path) -> None:
    with SplitServers(tmp_path, NODES) as servers:
        load = Load([edge.url for edge in servers.edges], SEED, NODES)
        load.prepare()
        load.start()
        try:
            until_acknowledged(load, 20)
            led = leader(servers)
            # The leader first, so that the stream has to move, and then on again.
            for node in (led, *(one for one in servers.storages if one is not led)):
                servers.wait_until_ready([node])
                assert node.stop() == 0
                until_acknowledged(load, 20)
                node.start()
            servers.wait_until_ready([node])
            until_acknowledged(load, 20)
            load.finish()
        finally:
            load.abandon()
        assert load.errors == []
        with Contrail(servers.url) as client:
            stored, replayed = read_all(client), list(client.replay(STREAM))
    assert load.journal.unknown == 0
    assert problems(load.journal, stored, replayed, eager_consumer=ALL) == []
