"""The checks of a simulated run find what they are for."""

from pathlib import Path

import pytest

from contrail_client import StoredMessage
from contrail_common.errors import ApiError
from contrail_common.model import StreamConfig
from contrail_link.contract import StorageLink
from contrail_storage.replica.shard import Shard
from tests.sim.checks import early, misordered, misplaced, stale
from tests.sim.cluster import SimCluster, SimNode, simulated
from tests.sim.load import History, Read, Write, until_done
from tests.sim.subject_keys import have_the_same_keys


def stored(*names: str) -> list[StoredMessage]:
    return [
        StoredMessage(stream="S", seq=seq, subject="s", time="", data=name)
        for seq, name in enumerate(names, 1)
    ]


def write(name: str, *, expected: int = 0, at: float = 0.0, seq: int | None = None) -> Write:
    return Write(name, expected, at, at + 1.0, seq)


def test_a_write_is_where_it_was_acknowledged() -> None:
    history = [write("a", seq=1), write("b"), write("c", seq=0), write("d")]
    assert misplaced(history, stored("a", "b")) == []
    assert misplaced(history, stored("b", "a")) == ["a at [2], answered 1"]
    assert misplaced(history, stored("a", "c")) == ["c at [2], answered 0"]
    assert misplaced(history, stored("a", "d", "d")) == ["d at [2, 3], answered None"]
    assert misplaced(history, stored("a", "x")) == ["x, never sent"]


def test_a_change_follows_what_it_expected() -> None:
    history = [write("a", expected=0, seq=1), write("b", expected=1, seq=2)]
    assert misordered(history, stored("a", "b")) == []
    assert misordered(history, stored("b", "a")) == [
        "b at 1 follows 0, not 1",
        "a at 2 follows 1, not 0",
    ]


def test_a_read_sees_what_was_acknowledged_or_read_before() -> None:
    history = [write("a", at=0.0, seq=1), write("b", at=2.0, seq=2)]
    assert stale(history, [Read(0.5, 0.9, 0), Read(2.5, 4.0, 1), Read(3.5, 4.0, 2)]) == []
    assert stale(history, [Read(3.5, 4.0, 1)]) == ["1 at 3.500, after 2"]
    assert stale(history, [Read(2.1, 2.2, 2), Read(2.3, 2.4, 1)]) == ["1 at 2.300, after 2"]


def test_a_read_sees_nothing_from_the_future() -> None:
    history = History(writes=[write("a", at=1.0, seq=1)])
    history.reads = [Read(0.0, 1.5, 1)]
    assert early(history, stored("a")) == []
    history.reads = [Read(0.0, 0.5, 1)]
    assert early(history, stored("a")) == ["1 at 0.500"]


async def create(link: StorageLink) -> None:
    config = StreamConfig(name="S", subjects=("s.>",), num_replicas=3, erasure="subject_key")
    await until_done(lambda: link.put_stream(config, "put", None, False))


def leader_of(cluster: SimCluster, stream: str) -> tuple[SimNode, Shard]:
    found: list[tuple[SimNode, Shard]] = []

    def is_found() -> bool:
        for one in cluster.nodes.values():
            if one.runs and one.node is not None and stream in one.node.meta.streams:
                shard = one.node.applier.shards.get(one.node.meta.streams[stream].shard_id)
                if shard is not None and one.node.groups.leads(shard.group):
                    found.append((one, shard))
        return bool(found)

    cluster.until(is_found)
    return found[0]


def test_keys_that_a_failed_leader_has_left_are_no_difference(tmp_path: Path) -> None:
    with simulated(1, tmp_path) as cluster:
        cluster.start()
        created = cluster.client("admin", create)
        cluster.until(created.done)
        created.result()
        leader, shard = leader_of(cluster, "S")
        assert leader.node is not None
        cuts = [(leader.name, other) for other in cluster.nodes if other != leader.name]
        for source, target in cuts:
            cluster.net.set_cut(source, target, True)
        sharing, wanted = leader.node.key_sharing, [(shard.machine.shard_id, "s.a")]
        made = leader.process.context.copy().run(
            lambda: cluster.loop.create_task(sharing.make(shard.group, wanted))
        )
        cluster.until(made.done)
        with pytest.raises(ApiError):
            made.result()
        leader.crash(power=False)
        for source, target in cuts:
            cluster.net.set_cut(source, target, False)
        leader.start()
        nodes, shard_id = cluster.nodes.values(), shard.machine.shard_id
        cluster.until(lambda: leader.node is not None and shard_id in leader.node.applier.shards)
        cluster.until(lambda: have_the_same_keys(nodes, content=True))
        assert not have_the_same_keys(nodes)
