"""Subject keys of streams whose shards are led by several nodes."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage
from contrail_common.partition import shard_of
from contrail_link.contract.read import RangeRequest
from contrail_link.publishing import publish
from contrail_storage.core import commands as cmd
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from tests.support.folders import files_with
from tests.unit.storage.cluster_rig import NAMES, Nodes, running, until
from tests.unit.storage.erase_rig import WAIT_NS
from tests.unit.storage.restore_rig import archive_of
from tests.unit.storage.test_cluster_keys import keys_of, material
from tests.unit.storage.test_spread import CONFIG, SHARDS, give, groups_of, home_of, until_served

SUBJECTS = [f"s.{number}" for number in range(8)]


def play(folder: Path, scene: Callable[[Nodes], Coroutine[Any, Any, None]]) -> None:
    """Play a scene with a stream whose shards are each led by another node."""

    async def whole() -> None:
        async with running(folder) as nodes:
            for group in (1024, 1025, 1026):
                await give(nodes, group, NAMES[group - 1024])
            config = replace(CONFIG, erasure="subject_key")
            await nodes.call("a", lambda link: link.put_stream(config, "put", None, False))
            await nodes.until_listed("S")
            await scene(nodes)

    asyncio.run(whole())


def text(number: int) -> bytes:
    return f"payload-text-{number:04}-".encode()


def group_of(nodes: Nodes, subject: str) -> int:
    return groups_of(nodes)[shard_of(subject, SHARDS)]


def elsewhere(nodes: Nodes) -> str:
    """A subject whose shard the node does not lead that serves the stream."""
    home = groups_of(nodes)[0]
    return next(one for one in SUBJECTS if group_of(nodes, one) != home)


def id_of(nodes: Nodes, subject: str) -> int:
    """The id of the shard of a subject."""
    known = next(node for node in nodes.all() if "S" in node.meta.streams)
    return known.meta.streams["S"].shard_ids[shard_of(subject, SHARDS)]


async def put(nodes: Nodes, number: int, subject: str) -> None:
    """Publish a message at the leader of its shard."""

    async def at_leader(link: LocalLink) -> None:
        ack = await publish(link, "S", [PublishMessage(subject, None, text(number))])
        assert not ack.results[0].code

    await until(lambda: bool(nodes.leader(group_of(nodes, subject))))
    await nodes.call(nodes.leader(group_of(nodes, subject)), at_leader)


async def seen(link: LocalLink) -> set[bytes]:
    messages = (await link.read_range(RangeRequest(stream="S", limit=1_000))).messages
    return {bytes(one.payload) for one in messages}


async def until_settled(nodes: Nodes) -> None:
    """Wait until all nodes have applied the same of all groups, and what follows for keys."""

    def settled() -> bool:
        alike = [
            len({node.groups[group].applied_index for node in nodes.all()}) == 1
            for group in groups_of(nodes)
        ]
        return all(alike) and not any(keys_of(node).is_behind for node in nodes.all())

    await until(settled)


async def erased(nodes: Nodes, subject: str) -> int:
    """Erase the messages of subjects, and wait until that is done; return their number."""
    link = await until_served(nodes)
    receipt = await link.erase("S", [], subject)
    assert receipt.shredded
    known = await nodes.call("a", lambda link: link.erasure(receipt.erasure_id, WAIT_NS))
    assert known.status == "done"
    return int(receipt.messages)


def all_material(node: StorageNode) -> dict[tuple[int, int], bytes]:
    """The keys of all shards of the stream that a node has."""
    shard_ids = node.meta.streams["S"].shard_ids
    return {(at, key_id): key for at in shard_ids for key_id, key in material(node, at).items()}


def test_subjects_are_shredded_whichever_node_leads_their_shard(tmp_path: Path) -> None:
    async def scene(nodes: Nodes) -> None:
        for number, subject in enumerate(SUBJECTS * 2):
            await put(nodes, number, subject)
        await until_settled(nodes)
        before = [all_material(node) for node in nodes.all()]
        assert before[0] == before[1] == before[2]
        assert len(before[0]) == len(SUBJECTS)
        everything = {text(number) for number in range(16)}
        assert await seen(await until_served(nodes)) == everything
        assert files_with(tmp_path, everything) == {}
        subject = elsewhere(nodes)
        assert await erased(nodes, subject) == 2
        left = {text(number) for number, one in enumerate(SUBJECTS * 2) if one != subject}
        await until_settled(nodes)
        assert await seen(await until_served(nodes)) == left
        gone = set(before[0].values()).difference(*(all_material(x).values() for x in nodes.all()))
        assert len(gone) == 1
        assert files_with(tmp_path, gone) == {}
        # The subject gets another key.
        await put(nodes, 16, subject)
        assert await seen(await until_served(nodes)) == left | {text(16)}
        assert await erased(nodes, "s.*") == 15
        await until_settled(nodes)
        assert [all_material(node) for node in nodes.all()] == [{}, {}, {}]
        assert files_with(tmp_path, before[0].values()) == {}

    play(tmp_path, scene)


def test_what_the_next_leader_of_a_shard_has_sealed_stays_readable(tmp_path: Path) -> None:
    async def scene(nodes: Nodes) -> None:
        subject = elsewhere(nodes)
        await put(nodes, 1, subject)
        await until_settled(nodes)
        link = await until_served(nodes)
        home, group, led = home_of(nodes), group_of(nodes, subject), []
        purge = nodes[home].streams.removals.purge

        async def then_another_leads(*given: Any, **how: Any) -> int:
            removed = await purge(*given, **how)
            if not led:
                # It was not told by the former leader that the key is retired, or has forgotten.
                led.append(next(x for x in NAMES if x not in (home, nodes.leader(group))))
                await give(nodes, group, led[0])
                keys_of(nodes[led[0]])._retired.clear()
                await put(nodes, 2, subject)
            return removed

        nodes[home].streams.removals.purge = then_another_leads  # type: ignore[method-assign]
        with pytest.raises(ApiError) as refused:
            await link.erase("S", [], subject)
        assert refused.value.spec is errors.OUTCOME_UNKNOWN
        assert await seen(await until_served(nodes)) == {text(2)}
        assert await erased(nodes, subject) == 1
        await until_settled(nodes)
        assert [all_material(node) for node in nodes.all()] == [{}, {}, {}]

    play(tmp_path, scene)


def test_keys_of_unused_subjects_are_destroyed_unless_they_are_used_again(tmp_path: Path) -> None:
    async def scene(nodes: Nodes) -> None:
        for number, subject in enumerate(SUBJECTS):
            await put(nodes, number, subject)
        await until_settled(nodes)
        subject = elsewhere(nodes)
        again = next(
            one
            for one in SUBJECTS
            if one != subject and group_of(nodes, one) == group_of(nodes, subject)
        )
        link, home = await until_served(nodes), nodes[home_of(nodes)]
        for one in (subject, again):
            assert await link.purge_stream("S", one, 0, 0) == 1
        await until_settled(nodes)
        before = material(home, id_of(nodes, subject))
        await home.shredder.tick(0.0)  # notes both
        await put(nodes, 20, again)
        await until_settled(nodes)
        # No other node sweeps: it may not know what is read here.
        for node in nodes.all():
            if node is not home:
                await node.shredder.tick(0.0)
        assert material(home, id_of(nodes, subject)) == before
        await home.shredder.tick(0.0)
        await until_settled(nodes)
        left = {text(number) for number, one in enumerate(SUBJECTS) if one not in (subject, again)}
        assert await seen(await until_served(nodes)) == left | {text(20)}
        for node in nodes.all():
            known = material(node, id_of(nodes, subject))
            assert len(known) == len(before) - 1
            assert files_with(tmp_path, set(before.values()) - set(known.values())) == {}

    play(tmp_path, scene)


def test_key_that_was_used_again_elsewhere_during_a_sweep_stays(tmp_path: Path) -> None:
    async def scene(nodes: Nodes) -> None:
        subject = elsewhere(nodes)
        await put(nodes, 1, subject)
        await until_settled(nodes)
        link, home = await until_served(nodes), nodes[home_of(nodes)]
        assert await link.purge_stream("S", subject, 0, 0) == 1
        await until_settled(nodes)
        await home.shredder.tick(0.0)
        command, used = home.shard_logs.command, []

        def used_before(shard_id: int, one: cmd.Command) -> Any:
            async def later() -> Any:
                if not used:
                    used.append(one)
                    await put(nodes, 2, subject)
                return await command(shard_id, one)

            return later() if isinstance(one, cmd.RetireKeys) else command(shard_id, one)

        home.shard_logs.command = used_before  # type: ignore[method-assign]
        await home.shredder.tick(0.0)
        assert used
        await until_settled(nodes)
        assert await seen(await until_served(nodes)) == {text(2)}
        assert len(material(home, id_of(nodes, subject))) == 1
        # A new message gets a key of its own, and the archive can be read.
        await put(nodes, 3, subject)
        await until_settled(nodes)
        assert await seen(await until_served(nodes)) == {text(2), text(3)}
        assert len(material(home, id_of(nodes, subject))) == 2
        assert await archive_of(await until_served(nodes))
        assert await erased(nodes, subject) == 2
        await until_settled(nodes)
        assert [all_material(node) for node in nodes.all()] == [{}, {}, {}]

    play(tmp_path, scene)
