"""The peer port of a node: as which start of the node it connects."""

import asyncio
from pathlib import Path

from msgspec.structs import replace

from contrail_replicator.peers.frames import Channel
from contrail_serve.cluster import Peers
from contrail_serve.cluster_secret import ClusterSecret
from contrail_serve.settings import StorageSettings
from contrail_storage.core.node_table import NodeEntry
from contrail_storage.disk.node_file import Stage, save_identity
from contrail_storage.node import NodeOptions, StorageNode
from tests.support.ports import HOST, free_port
from tests.support.servers import SECRET

NAMES = ("a", "b", "c")


def peers_of(folder: Path, name: str, ports: dict[str, int]) -> tuple[Peers, StorageNode]:
    """A node of a cluster that has formed, with its peer port."""
    addresses = ",".join(f"{one}={HOST}:{port}" for one, port in ports.items())
    given = {"data_dir": folder / name, "node": name, "peers": addresses, "cluster_secret": SECRET}
    settings = StorageSettings.of(given)
    assert settings.cluster is not None
    peers = Peers(settings.cluster, ClusterSecret(settings.cluster_secret))
    options = NodeOptions(folder / name, name, cluster=peers.cluster)
    node = StorageNode.open(options, peers.groups)
    node.identity = replace(node.identity, stage=Stage.FORMED, cluster_id=b"c" * 16, nodes=NAMES)
    save_identity(node.files, folder / name, node.identity)
    return peers, node


def test_start_that_could_be_recorded_late_is_the_one_that_connects(tmp_path: Path) -> None:
    """As of a node whose disk was full at first: the others know the later number of its start."""

    async def scene() -> None:
        ports = {name: free_port() for name in NAMES}
        (a, first), (b, second) = (peers_of(tmp_path, name, ports) for name in ("a", "b"))
        try:
            for peers, node in ((a, first), (b, second)):
                await peers.form(node)
            boots, process = first.identity.boots + 1, a.cluster.process
            b._note_start(NodeEntry("a", 1, 1, boots, process))
            a._note_start(NodeEntry("a", 1, 1, boots, process + 1))  # another process, long ago
            assert a._hub.node.boots == boots - 1
            a._note_start(NodeEntry("a", 1, 1, boots, process))
            async with asyncio.timeout(60):
                await wait_until_connected(a, "b")
        finally:
            for peers, node in ((a, first), (b, second)):
                await peers.close()
                node.close()

    asyncio.run(scene())


async def wait_until_connected(peers: Peers, name: str) -> None:
    while not peers._hub.connected(name, Channel.APPEND):
        await asyncio.sleep(0.01)
