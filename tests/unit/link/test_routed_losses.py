"""The link to a cluster over real connections that are cut, or fall silent."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import cast

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage
from contrail_link.contract import StorageLink
from contrail_link.publishing import publish
from contrail_link.routed.link import RoutedLink
from contrail_link.tcp.client import RemoteLink
from contrail_link.tcp.limits import limits_in_cluster
from tests.support.ports import HOST
from tests.unit.link.link_rig import KEY, QUICK, run, served, until
from tests.unit.link.routed_rig import Cluster
from tests.unit.link.test_pulls import SlowWire

IN_CLUSTER = replace(
    limits_in_cluster(10.0), pulse_s=0.05, sweep_s=0.05, backoff_min_s=0.002, backoff_max_s=0.01
)
PATIENT = replace(IN_CLUSTER, doubt_s=60.0)
"""For tests in which a node is away for other reasons: a busy machine must not add a silence."""


def message(msg_id: str | None = None) -> PublishMessage:
    return PublishMessage("S.a", None, b"x", msg_id)


class Rig:
    """Three played nodes behind servers and wires, and the link to all of them."""

    def __init__(self, cluster: Cluster, wires: list[SlowWire], remotes: list[RemoteLink]) -> None:
        self.cluster = cluster
        self.nodes = cluster.nodes
        self.wires = wires
        self.remotes = remotes
        self.routed = RoutedLink(remotes, again_s=20.0, answer_s=10.0)
        self.link = self.routed.link


@contextlib.asynccontextmanager
async def rig(limits: object = PATIENT) -> AsyncIterator[Rig]:
    async with contextlib.AsyncExitStack() as stack:
        cluster = Cluster(3)
        wires: list[SlowWire] = []
        remotes: list[RemoteLink] = []
        for node in cluster.nodes:
            node.delay_s = 0.0
            server = served(cast(StorageLink, node), limits=QUICK, node=node.name)
            _, port = await stack.enter_async_context(server)
            wires.append(await stack.enter_async_context(SlowWire(port)))
            remotes.append(RemoteLink((HOST, wires[-1].port), [KEY], limits))  # type: ignore[arg-type]
        found = Rig(cluster, wires, remotes)
        for one in remotes:
            one.start()
        try:
            await until(lambda: not any(one.readiness() for one in remotes))
            yield found
        finally:
            for wire in wires:
                wire.opened.set()
            await found.routed.close()
            for one in remotes:
                await one.close()


def test_node_says_its_name_and_a_hint_leads_there() -> None:
    async def scenario() -> None:
        async with rig() as found:
            assert [one.name for one in found.remotes] == ["n0", "n1", "n2"]
            for node in found.nodes:
                node.lead()
                ack = await publish(found.link, "", [message()])
                assert ack.results[0].seq == len(found.cluster.stored["S"])
                assert (await found.link.stream_info("S")).leader == node.name
            text = await found.routed.metrics_text()
            assert 'contrail_link_up{channel="calls n2"} 1.0' in text
            assert "contrail_link_again_total" in text
            assert text.count("# TYPE contrail_link_call_seconds ") == 1

    run(scenario())


def test_publish_on_a_cut_connection_is_sent_to_the_new_leader_if_it_has_an_id() -> None:
    async def scenario() -> None:
        for msg_id in ("1", None):
            async with rig() as found:
                await publish(found.link, "S", [message()])
                # The request arrives and takes effect, and its answer is lost.
                found.wires[0].opened.clear()
                work = asyncio.create_task(publish(found.link, "S", [message(msg_id)]))
                await until(lambda found=found: len(found.cluster.stored["S"]) == 2)  # type: ignore[misc]
                found.wires[0].refuse = True
                found.wires[0].cut()
                found.nodes[1].lead()
                if msg_id:
                    assert (await work).results[0].duplicate
                else:
                    (error,) = await asyncio.gather(work, return_exceptions=True)
                    assert isinstance(error, ApiError)
                    assert error.spec is errors.OUTCOME_UNKNOWN
                assert len(found.cluster.stored["S"]) == 2
                await publish(found.link, "S", [message()])
                assert len(found.nodes[1].sent) == (2 if msg_id else 1)

    run(scenario())


def test_requests_to_a_silent_node_go_elsewhere_if_that_is_safe() -> None:
    async def scenario() -> None:
        limits = replace(IN_CLUSTER, doubt_s=0.3, silence_s=60.0)
        async with rig(limits) as found:
            await publish(found.link, "S", [message()])
            found.wires[0].opened.clear()
            plain = asyncio.create_task(publish(found.link, "S", [message()]))
            safe = asyncio.create_task(publish(found.link, "S", [message("1")]))
            read = asyncio.create_task(found.link.stream_info("S"))
            hold = asyncio.create_task(found.link.bind_consumer("S", "c"))
            await until(lambda: len(found.cluster.stored["S"]) == 3)
            found.nodes[1].lead()
            assert (await safe).results[0].duplicate
            assert (await read).leader == "n1"
            await (await hold).aclose()
            # Without an id, the publish waits: this node knows its outcome, and it may come back.
            assert not plain.done()
            await publish(found.link, "S", [message()])
            found.wires[0].opened.set()
            assert (await plain).results[0].code == 0
            assert len(found.cluster.stored["S"]) == 4

    run(scenario())


def test_node_that_cannot_be_reached_costs_no_time() -> None:
    async def scenario() -> None:
        async with rig() as found:
            found.wires[0].refuse = True
            found.wires[0].cut()
            found.nodes[2].lead()
            await until(lambda: bool(found.remotes[0].readiness()))
            assert found.routed.readiness() == {}
            await publish(found.link, "S", [message()])
            for _ in range(3):
                assert (await found.link.stream_info("S")).leader == "n2"

    run(scenario())
