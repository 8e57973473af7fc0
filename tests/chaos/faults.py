"""Kinds of faults: each begins, lasts for a while, and is repaired."""

import errno
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tests.chaos.cluster import ChaosCluster
from tests.chaos.strangers import Strangers

Fault = Callable[[ChaosCluster, str], Iterator[str]]
"""Disturbs the cluster with a node in the middle; yields what it did, and repairs it afterwards."""


def _kill(cluster: ChaosCluster, name: str) -> Iterator[str]:
    cluster.kill(name)
    yield f"kill {name}"
    cluster.start(name)


def _wipe(cluster: ChaosCluster, name: str) -> Iterator[str]:
    cluster.kill(name)
    shutil.rmtree(str(cluster.nodes[name].settings["data_dir"]))
    yield f"take the disk of {name}"
    cluster.start(name)
    # The others have the only copies until it is whole again: none of them may fail before.
    cluster.wait_until_ready(name)


def _kill_all(cluster: ChaosCluster, _name: str) -> Iterator[str]:
    for name in cluster.nodes:
        cluster.kill(name)
    yield "kill all nodes"
    cluster.start(*cluster.nodes)


def _cut_power(cluster: ChaosCluster, name: str) -> Iterator[str]:
    yield f"cut the power of {name}: {cluster.cut_power(name)} bytes lost"
    cluster.start(name)


def _cut_all_power(cluster: ChaosCluster, _name: str) -> Iterator[str]:
    yield f"cut the power of all nodes: {cluster.cut_power(*cluster.nodes)} bytes lost"
    cluster.start(*cluster.nodes)


def _pause(cluster: ChaosCluster, name: str) -> Iterator[str]:
    cluster.pause(name)
    yield f"stop {name} (SIGSTOP)"
    cluster.resume(name)


def _isolate(cluster: ChaosCluster, name: str) -> Iterator[str]:
    cluster.network.isolate(name)
    yield f"cut {name} off"
    cluster.network.heal(reset=cluster.chance.random() < 0.5)


def _cut_pair(cluster: ChaosCluster, name: str) -> Iterator[str]:
    other = cluster.other_node(name)
    cluster.network.cut([(name, other), (other, name)])
    yield f"cut between {name} and {other}"
    cluster.network.heal(reset=cluster.chance.random() < 0.5)


def _deafen(cluster: ChaosCluster, name: str) -> Iterator[str]:
    cluster.network.cut((other, name) for other in cluster.nodes if other != name)
    yield f"let {name} hear nothing"
    cluster.network.heal(reset=cluster.chance.random() < 0.5)


def _mute(cluster: ChaosCluster, name: str) -> Iterator[str]:
    cluster.network.cut((name, other) for other in cluster.nodes if other != name)
    yield f"let nobody hear {name}"
    cluster.network.heal(reset=cluster.chance.random() < 0.5)


def _split(cluster: ChaosCluster, _name: str) -> Iterator[str]:
    names = sorted(cluster.nodes)
    cluster.network.cut((one, other) for one in names for other in names if one != other)
    yield "cut all nodes off from each other"
    cluster.network.heal(reset=cluster.chance.random() < 0.5)


def _flap(cluster: ChaosCluster, name: str) -> Iterator[str]:
    for _ in range(10):
        cluster.network.isolate(name)
        wait_some(cluster.chance.uniform(0.0, 0.5))
        cluster.network.heal(reset=cluster.chance.random() < 0.5)
        wait_some(cluster.chance.uniform(0.0, 0.3))
    yield f"cut {name} off for moments, ten times"


def _kill_two(cluster: ChaosCluster, name: str) -> Iterator[str]:
    other = cluster.other_node(name)
    cluster.network.isolate(other)
    cluster.kill(name)
    yield f"cut {other} off, and kill {name}"
    cluster.network.heal()
    cluster.start(name)


def _strangers(cluster: ChaosCluster, name: str) -> Iterator[str]:
    """What anybody can send to the ports between nodes, and between edges and nodes."""
    node = cluster.nodes[name]
    with Strangers([node.settings["peer_port"], node.settings["link_port"]], cluster.chance):
        yield f"let strangers talk to {name}"


def _fail_disk(number: int) -> Fault:
    def fail(cluster: ChaosCluster, name: str) -> Iterator[str]:
        cluster.disks[name].fail(number)
        yield f"let the disk of {name} fail with {errno.errorcode[number]}"
        cluster.disks[name].heal()
        if not cluster.nodes[name].alive:
            cluster.nodes[name].wait()
            cluster.start(name)

    return fail


def _slow_disk(cluster: ChaosCluster, name: str) -> Iterator[str]:
    late_ms = cluster.chance.choice([20, 100, 800])
    cluster.disks[name].slow_down(late_ms)
    yield f"slow the syncs of {name} down by {late_ms} ms"
    cluster.disks[name].heal()


def _restart(cluster: ChaosCluster, name: str) -> Iterator[str]:
    cluster.nodes[name].process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
    cluster.nodes[name].wait()
    cluster.start(name)
    yield f"restart {name}"


def _restart_edge(cluster: ChaosCluster, _name: str) -> Iterator[str]:
    edge = cluster.chance.choice(cluster.servers.edges)
    cluster.restart_edge(edge)
    yield f"kill {edge.service} {edge.url}"


OF_ONE_NODE: Final[dict[str, Fault]] = {
    "kill": _kill,
    "power": _cut_power,
    "pause": _pause,
    "isolate": _isolate,
    "cut-pair": _cut_pair,
    "deaf": _deafen,
    "flap": _flap,
    "strangers": _strangers,
    "kill-and-cut": _kill_two,
    "mute": _mute,
    "enospc": _fail_disk(errno.ENOSPC),
    "eio": _fail_disk(errno.EIO),
    "slow-disk": _slow_disk,
    "restart": _restart,
    "wipe": _wipe,
}
OF_ALL: Final[dict[str, Fault]] = {
    "kill-all": _kill_all,
    "power-all": _cut_all_power,
    "split": _split,
    "edge": _restart_edge,
}
NEED_A_DISK: Final = {"power", "enospc", "eio", "slow-disk", "power-all"}


@contextmanager
def done(fault: Fault, cluster: ChaosCluster, name: str) -> Iterator[str]:
    """Do a fault while the context lasts."""
    doing = iter(fault(cluster, name))
    yield next(doing)
    next(doing, None)


def wait_some(seconds: float) -> None:
    """Let something last."""
    time.sleep(seconds)
