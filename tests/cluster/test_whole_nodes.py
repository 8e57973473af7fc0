"""Three nodes, each of which serves everything in one process (`contrail serve --peers`)."""

from pathlib import Path

import pytest

from contrail_client import Contrail
from tests.cluster.test_encryption import wait_until
from tests.support.ports import HOST, free_port
from tests.support.servers import SECRET, Process, WholeServers

pytestmark = pytest.mark.cluster

NAMES = ("n1", "n2", "n3")


def leader(node: Process, stream: str) -> str:
    with node.client() as client:
        return str(client.get(f"/v1/streams/{stream}").json()["cluster"]["leader"])


def wait_until_listed(client: Contrail, streams: list[str]) -> None:
    """A node lists the streams it knows, and may hear of one a moment after another did."""
    wait_until(lambda: [each.name for each in client.list_streams()] == streams)


def test_each_node_serves_all_streams_and_two_go_on_without_the_third(tmp_path: Path) -> None:
    streams = [f"S{number}" for number in range(3)]
    with WholeServers(tmp_path) as servers:
        nodes = dict(zip(NAMES, servers.storages, strict=True))
        with Contrail(nodes["n1"].url) as client:
            for name in streams:
                client.ensure_stream(name, {"subjects": [f"{name}.>"], "num_replicas": 3})
                client.publish(f"{name}.a", b"one", msg_id="1")
            client.ensure_stream("ALONE", {"subjects": ["alone"]})
        for node in nodes.values():
            with Contrail(node.url) as client:
                wait_until_listed(client, ["ALONE", *streams])
                client.publish("alone", b"by any node")
                client.ensure_consumer("S0", "durable", {})
                assert client.get_message("S0", 1).payload == b"one"
        lost = leader(nodes["n1"], "S0")
        nodes[lost].kill()
        rest = [nodes[name] for name in NAMES if name != lost]
        for node in rest:
            with Contrail(node.url) as client:
                for name in streams:
                    again = client.publish(f"{name}.a", b"one", msg_id="1")
                    assert (again.seq, again.duplicate) == (1, True)
                    client.publish(f"{name}.a", b"two", msg_id="2")
                    assert client.get_stream(name).state.last_seq == 2
        with Contrail(rest[0].url) as one, Contrail(rest[1].url) as other:
            pulled = one.consumer("S0", "durable").next(2, expires="10s")
            assert [each.payload for each in pulled] == [b"one", b"two"]
            # Each gateway accepts the tokens of the others.
            other.consumer("S0", "durable").ack(*pulled, sync=True)
            assert one.consumer("S0", "durable").info().num_ack_pending == 0
        nodes[lost].start()
        with Contrail(nodes[lost].url) as client:
            assert client.get_stream("S0").state.last_seq == 2
        assert [nodes[name].stop() for name in NAMES] == [0, 0, 0]


def test_node_that_cannot_take_part_ends_with_a_sentence(tmp_path: Path) -> None:
    ports = [free_port() for _ in NAMES]
    peers = ",".join(f"{name}={HOST}:{port}" for name, port in zip(NAMES, ports, strict=True))
    common = {"peers": peers, "cluster_secret": SECRET}

    def status_of(**settings: object) -> tuple[int, str]:
        process = Process("serve", tmp_path / "refused.log", **{**common, **settings})
        process.spawn()
        return process.wait(), process.log.read_text().splitlines()[-1]

    one = Process("serve", tmp_path / "n1.log", node="n1", data_dir=tmp_path / "n1", **common)
    one.spawn()
    try:
        wait_until((tmp_path / "n1" / "identity").exists)
        certificates = {f"peer_{name}": tmp_path / name for name in ("cert", "key", "ca")}
        for settings, expected, complaint in (
            ({"node": "n1"}, 1, f"cannot listen on {HOST}:{ports[0]}: Address already in use"),
            ({"node": "n2", "data_dir": tmp_path / "n1"}, 1, "another process is using it"),
            ({"node": "n2", **certificates}, 1, f"the certificate in {tmp_path}/cert"),
            ({"node": "n4"}, 2, "peers must name this node too, and n4"),
            ({"node": "n1", "peers": ""}, 2, "cluster_secret is for a node of a cluster"),
        ):
            status, sentence = status_of(**{"data_dir": tmp_path / "other", **settings})
            assert (status, complaint in sentence) == (expected, True), sentence
    finally:
        one.kill()
