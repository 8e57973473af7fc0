"""Erasures of streams on three nodes: done when the files of all of them hold nothing more."""

import asyncio
from pathlib import Path

from contrail_common.model import StreamConfig
from contrail_link.contract.admin import ErasureReceipt
from contrail_link.publishing import publish
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.replica.log_time import CLOCK_NAME
from tests.support.folders import files_with
from tests.unit.storage.cluster_rig import NAMES, Nodes, running, until
from tests.unit.storage.erase_rig import WAIT_NS, secret, traces


async def filled(nodes: Nodes, replicas: int = 3, count: int = 12) -> StorageNode:
    """Make a stream with messages that all members have applied; return the node that leads it."""
    config = StreamConfig(name="S", subjects=("S.*",), num_replicas=replicas)
    await nodes.call("a", lambda link: link.put_stream(config, "put", None, False))
    await nodes.until_listed("S")
    shard_id = nodes["a"].meta.streams["S"].shard_id
    leader = next(
        node
        for node in nodes.all()
        if shard_id in node.applier.shards and node.streams.stream("S").is_led
    )
    for number in range(1, count + 1):
        await publish(LocalLink(leader), "S", [secret(number)])
    await until(lambda: all(last_seq(node) == count for node in members(nodes, leader)))
    return leader


def members(nodes: Nodes, leader: StorageNode) -> list[StorageNode]:
    group = leader.streams.shard("S").group
    return [nodes[name] for name in leader.membership.members_of(group)]


def last_seq(node: StorageNode) -> int:
    entry = node.meta.streams.get("S")
    shard = node.applier.shards.get(entry.shard_id) if entry is not None else None
    return shard.applied_seq if shard is not None else 0


async def receipt_of(nodes: Nodes, erasure_id: str, asked: str, wait_ns: int = 0) -> ErasureReceipt:
    receipt: ErasureReceipt = await nodes.call(
        asked, lambda link: link.erasure(erasure_id, wait_ns)
    )
    return receipt


def status_of(node: StorageNode, erasure_id: str) -> dict[str, bool]:
    """By node: whether it is done, as another node has applied it."""
    known = node.meta.erasures.receipts.get(erasure_id)
    return {name: bool(at) for name, at in known.replicas.items()} if known is not None else {}


async def erased_but_for_one(nodes: Nodes) -> tuple[StorageNode, str, ErasureReceipt]:
    """Erase a message while one member gets no entries; return the leader, and the other one."""
    leader = await filled(nodes)
    behind, other = (one for one in NAMES if one != leader.options.name)
    nodes.links.withheld.add((behind, leader.streams.shard("S").group))
    receipt = await LocalLink(leader).erase("S", [7], "")
    expected = dict.fromkeys(NAMES, True) | {behind: False}
    for one in (leader, nodes[other]):
        await until(lambda one=one: status_of(one, receipt.erasure_id) == expected)  # type: ignore[misc]
    return leader, other, receipt


def test_erased_bytes_leave_the_files_of_all_members(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await filled(nodes)
            await leader.checkpoint()  # the bytes are in different files on different nodes
            held = files_with(tmp_path, traces(7) + traces(8))
            assert held
            receipt = await LocalLink(leader).erase("S", [7], "")
            assert [one.node for one in receipt.replicas] == list(NAMES)
            for asked in NAMES:
                done = await receipt_of(nodes, receipt.erasure_id, asked, WAIT_NS)
                assert (done.status, {one.status for one in done.replicas}) == ("done", {"done"})
            assert files_with(tmp_path, traces(7)) == {}
            assert files_with(tmp_path, traces(8))
            # Entries with the bytes are not in memory either, from where a new disk would get them.
            group = leader.streams.shard("S").group
            index = leader.meta.erasures.receipts[receipt.erasure_id].indexes[group]
            logs = [node.groups[group]._journal for node in nodes.all()]  # type: ignore[attr-defined]
            await until(lambda: all(log.anchor_index >= index for log in logs))
            receipt = await LocalLink(leader).erase("S", [], "S.name-of-0008")
            await receipt_of(nodes, receipt.erasure_id, "a", WAIT_NS)
            assert files_with(tmp_path, traces(7) + traces(8)) == {}

    asyncio.run(scene())


def test_receipt_names_the_nodes_that_have_copies(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await filled(nodes, replicas=1)
            receipt = await LocalLink(leader).erase("S", [7], "")
            assert [one.node for one in receipt.replicas] == [leader.options.name]
            asked = next(name for name in NAMES if name != leader.options.name)
            done = await receipt_of(nodes, receipt.erasure_id, asked, WAIT_NS)
            assert done.status == "done"
            assert files_with(tmp_path, traces(7)) == {}
            for config, holders in (
                (StreamConfig(name="M", subjects=("M.*",), storage="memory"), 1),
                (StreamConfig(name="P", subjects=("P.*",), num_replicas=3, shards=2), 3),
            ):
                name = config.name
                await nodes.call(
                    "a", lambda link, config=config: link.put_stream(config, "put", None, False)
                )
                for number in (1, 2, 3):
                    message = secret(number, name)
                    await nodes.call(
                        "a",
                        lambda link, name=name, message=message: publish(link, name, [message]),
                    )
                erased = await nodes.call("b", lambda link, name=name: link.erase(name, [], ">"))
                assert (erased.messages, len(erased.replicas)) == (3, holders)
                done = await receipt_of(nodes, erased.erasure_id, asked, WAIT_NS)
                assert done.status == "done"
                assert files_with(tmp_path, [f"{name}.name-of".encode()]) == {}

    asyncio.run(scene())


def test_member_that_has_yet_to_apply_the_deletion_does_not_say_that_it_is_done(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await filled(nodes)
            group, leading = leader.streams.shard("S").group, leader.options.name
            behind = next(one for one in NAMES if one != leading)
            # It hears of the receipt, but not of the deletion: it still shows the message as live.
            nodes.links.withheld.add((behind, group))
            receipt = await LocalLink(leader).erase("S", [7], "")
            expected = dict.fromkeys(NAMES, True) | {behind: False}
            await until(lambda: status_of(nodes[behind], receipt.erasure_id) == expected)
            assert nodes[behind].eraser.counts.cycles == 0
            assert files_with(tmp_path / behind, traces(7))
            pending = await receipt_of(nodes, receipt.erasure_id, "a")
            assert [one.node for one in pending.replicas if one.status == "pending"] == [behind]
            nodes.links.heal()
            done = await receipt_of(nodes, receipt.erasure_id, "a", WAIT_NS)
            assert done.status == "done"
            assert files_with(tmp_path, traces(7)) == {}

    asyncio.run(scene())


def test_erasure_outlives_its_leader_and_waits_for_it(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await filled(nodes)
            name = leader.options.name

            async def never() -> None:
                await asyncio.Event().wait()

            leader.eraser._cut_log = never
            receipt = await LocalLink(leader).erase("S", [7], "")
            others = [one for one in NAMES if one != name]
            expected = dict.fromkeys(NAMES, True) | {name: False}
            await until(lambda: status_of(nodes[others[0]], receipt.erasure_id) == expected)
            # It stops in the middle of its part, and the others go on without it.
            nodes.links.part(name)
            group = leader.streams.shard("S").group
            await nodes.stop(name)
            await until(lambda: any(nodes[one].groups.leads(group) for one in others))
            second = next(one for one in others if nodes[one].groups.leads(group))
            await nodes.call(second, lambda link: publish(link, "S", [secret(13)]))
            again = await nodes.call(second, lambda link: link.erase("S", [8], ""))
            await until(lambda: status_of(nodes[second], again.erasure_id) == expected)
            nodes.links.heal()
            await nodes.start(name)
            for one in (receipt, again):
                done = await receipt_of(nodes, one.erasure_id, second, WAIT_NS)
                assert done.status == "done"
            assert files_with(tmp_path, traces(7) + traces(8)) == {}
            assert len(files_with(tmp_path, traces(13))) >= 1

    asyncio.run(scene())


def test_node_that_gets_data_of_another_does_its_part_of_pending_erasures_again(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            _, other, receipt = await erased_but_for_one(nodes)
            cycles = nodes[other].eraser.counts.cycles
            await nodes[other].eraser.erasures.reopen()
            await until(lambda: nodes[other].eraser.counts.cycles > cycles)
            nodes.links.heal()
            done = await receipt_of(nodes, receipt.erasure_id, "a", WAIT_NS)
            assert done.status == "done"
            # A receipt that is done stays so.
            await nodes[other].eraser.erasures.reopen()
            assert (await receipt_of(nodes, receipt.erasure_id, "a")).status == "done"

    asyncio.run(scene())


def test_node_with_a_new_disk_is_named_again_until_it_has_removed_what_it_was_sent(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader, wiped, receipt = await erased_but_for_one(nodes)
            leading = leader.options.name
            await nodes.stop(wiped)
            nodes.wipe(wiped)
            await nodes.start(wiped)
            # It does not count in the group before it has heard of a majority.
            await until(lambda: not status_of(leader, receipt.erasure_id)[wiped])
            nodes.links.heal()
            done = await receipt_of(nodes, receipt.erasure_id, leading, WAIT_NS)
            assert done.status == "done"
            assert nodes[wiped].eraser.counts.cycles >= 1
            assert files_with(tmp_path, traces(7)) == {}

    asyncio.run(scene())


def test_member_that_gets_the_whole_state_removes_what_it_had(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await filled(nodes)
            behind = next(name for name in NAMES if name != leader.options.name)
            others = [name for name in NAMES if name != behind]
            nodes.links.part(behind)
            receipt = await LocalLink(leader).erase("S", [7], "")
            expected = dict.fromkeys(NAMES, True) | {behind: False}
            await until(lambda: status_of(leader, receipt.erasure_id) == expected)
            # From now on nobody has the deletion as an entry, nor the record of the receipt.
            await nodes.stop(*others)
            await nodes.start(*others)
            assert files_with(tmp_path / behind, traces(7))
            nodes.links.heal()
            done = await receipt_of(nodes, receipt.erasure_id, others[0], WAIT_NS)
            assert done.status == "done"
            assert nodes[behind].catching_up.installer.counts.installed >= 2
            assert files_with(tmp_path, traces(7)) == {}
            assert len(files_with(tmp_path / behind, traces(8))) >= 1

    asyncio.run(scene())


def test_receipts_outlast_a_clock_that_is_a_year_ahead(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await filled(nodes)
            ahead = next(name for name in NAMES if name != leader.options.name)
            receipt = await nodes.call(ahead, lambda link: link.erase("S", [7], ""))
            assert (await receipt_of(nodes, receipt.erasure_id, ahead, WAIT_NS)).status == "done"
            await nodes.stop(ahead)
            # Without a record of the time, a node believes its own clock at the start.
            (tmp_path / ahead / CLOCK_NAME).unlink()
            nodes.links.clocks[ahead].wall_step_ns = 365 * 86_400 * 10**9
            await nodes.start(ahead)
            await nodes[ahead].eraser.erasures.forget_old()
            assert receipt.erasure_id in nodes[ahead].meta.erasures.receipts

    asyncio.run(scene())
