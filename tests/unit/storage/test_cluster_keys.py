"""Subject keys of streams on three nodes: on most of them before use, on none after an erasure."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage, StreamConfig
from contrail_link.contract.admin import ErasureReceipt
from contrail_link.publishing import publish
from contrail_storage.core.key_layout import META_GROUP
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.replica.raft_port import no_leader
from contrail_storage.seal.key_file import SHARED_KEYS_NAME
from contrail_storage.seal.shared_keys import SharedKeys
from contrail_storage.state.messages import GetKeys
from contrail_storage.wal import LogOptions
from tests.support.folders import files_with
from tests.unit.storage.cluster_rig import NAMES, Nodes, running, turn, until
from tests.unit.storage.erase_rig import WAIT_NS
from tests.unit.storage.restore_rig import archive_of, restored


def message(number: int, subject: str = "") -> PublishMessage:
    return PublishMessage(subject or f"S.{number}", None, text(number) + b"." * 40)


def text(number: int) -> bytes:
    return f"payload-text-{number:04}-".encode()


async def make(nodes: Nodes) -> StorageNode:
    """Make a stream with subject keys; return the node that leads it."""
    config = StreamConfig(name="S", subjects=("S.*",), num_replicas=3, erasure="subject_key")
    await nodes.call("a", lambda link: link.put_stream(config, "put", None, False))
    await nodes.until_listed("S")
    return await leader_of(nodes)


async def leader_of(nodes: Nodes) -> StorageNode:
    await until(lambda: any(one.groups.leads(group_of(nodes)) for one in nodes.all()))
    return next(one for one in nodes.all() if one.groups.leads(group_of(nodes)))


def group_of(nodes: Nodes) -> int:
    groups = [node.meta.group_of(shard_of(nodes)) for node in nodes.all()]
    return groups[0]


def shard_of(nodes: Nodes) -> int:
    known = [node.meta.streams["S"] for node in nodes.all() if "S" in node.meta.streams]
    return known[0].shard_id


async def put(nodes: Nodes, name: str, *numbers: int, subject: str = "") -> None:
    """Publish by a node, each message to a subject of its own or all to one."""
    for number in numbers:
        one = message(number, subject)
        await nodes.call(name, lambda link, one=one: publish(link, "S", [one]))


async def until_same(nodes: Nodes) -> None:
    """Wait until all nodes have applied the same, and have the keys for it."""
    group = group_of(nodes)

    def same() -> bool:
        indexes = {node.groups[group].applied_index for node in nodes.all()}
        behind = [node for node in nodes.all() if node.key_sharing.keys.is_behind]
        return len(indexes) == 1 and not behind

    await until(same)


async def seen(node: StorageNode, count: int) -> dict[int, bytes]:
    """By sequence up to ``count``: what a node reads of its own copy."""
    shard, payloads = node.streams.shard("S"), {}
    for seq in range(1, count + 1):
        if shard.machine.is_live(seq):
            payloads[seq] = bytes((await node.reader.get(shard, seq)).payload)
    return payloads


def keys_of(node: StorageNode) -> SharedKeys:
    return node.key_sharing.keys


def material(node: StorageNode, shard_id: int) -> dict[int, bytes]:
    """The keys of the stream that a node has, by id."""
    known = keys_of(node)
    ids = known.ids_of(known.slots_of_shard(shard_id))
    return {one.id: one.key for one in known.give(shard_id, ids)}


async def erase(nodes: Nodes, subject: str) -> ErasureReceipt:
    receipt: ErasureReceipt = await nodes.call("a", lambda link: link.erase("S", [], subject))
    return receipt


async def done(nodes: Nodes, receipt: ErasureReceipt) -> ErasureReceipt:
    found: ErasureReceipt = await nodes.call(
        "a", lambda link: link.erasure(receipt.erasure_id, WAIT_NS)
    )
    assert found.status == "done"
    return found


def test_subject_is_shredded_on_all_nodes(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await make(nodes)
            await put(nodes, "a", *range(1, 9))
            await put(nodes, "a", 9, 10, subject="S.1")
            await until_same(nodes)
            shard_id = shard_of(nodes)
            before = [material(node, shard_id) for node in nodes.all()]
            assert before[0] == before[1] == before[2]
            assert len(before[0]) == 8
            payloads = {number: text(number) + b"." * 40 for number in range(1, 11)}
            for node in nodes.all():
                assert await seen(node, 10) == payloads
            assert files_with(tmp_path, [text(number) for number in range(1, 11)]) == {}
            receipt = await erase(nodes, "S.1")
            assert (receipt.messages, receipt.shredded, len(receipt.replicas)) == (3, True, 3)
            await done(nodes, receipt)
            left = {seq: payload for seq, payload in payloads.items() if seq not in (1, 9, 10)}
            gone = set(before[0].values())
            for node in nodes.all():
                assert await seen(node, 10) == left
                gone -= set(material(node, shard_id).values())
            assert len(gone) == 1
            assert files_with(tmp_path, gone) == {}
            # The subject gets another key, and the others keep theirs, also over a restart.
            await put(nodes, leader.options.name, 11, subject="S.1")
            left[11] = text(11) + b"." * 40
            await nodes.stop(*NAMES)
            await nodes.start(*NAMES)
            await leader_of(nodes)
            await put(nodes, "b", 12, subject="S.1")
            left[12] = text(12) + b"." * 40
            await until_same(nodes)
            for node in nodes.all():
                assert await seen(node, 12) == left
                assert len(material(node, shard_id)) == 8
            # All of them, by a wildcard.
            await done(nodes, await erase(nodes, "S.*"))
            await until_same(nodes)
            for node in nodes.all():
                assert await seen(node, 12) == {}
                assert material(node, shard_id) == {}
            assert files_with(tmp_path, before[0].values()) == {}

    asyncio.run(scene())


def unnamed(node: StorageNode, shard_id: int) -> list[int]:
    known = keys_of(node)
    slots = known._live_slots(shard_id).tolist()
    return sorted(set(known.ids_of(slots)) - set(material(node, shard_id)))


def test_keys_that_a_former_leader_made_are_not_used_and_do_not_stay(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await make(nodes)
            await put(nodes, "a", 1)
            await until_same(nodes)
            shard_id, name, group = shard_of(nodes), leader.options.name, group_of(nodes)
            handed_out, released = asyncio.Event(), asyncio.Event()
            naming = leader.key_sharing._name

            async def late(*given: Any) -> None:
                handed_out.set()
                await released.wait()
                await naming(*given)

            # All members have the key, and it is not named when the leader is cut off.
            leader.key_sharing._name = late  # type: ignore[method-assign]
            publishing = asyncio.ensure_future(publish(LocalLink(leader), "S", [message(2)]))
            await handed_out.wait()
            await until(lambda: all(unnamed(node, shard_id) for node in nodes.all()))
            [spare] = {one.key for one in keys_of(leader).give(shard_id, unnamed(leader, shard_id))}
            nodes.links.part(name)
            others = [one for one in nodes.all() if one is not leader]
            await until(lambda: any(one.groups.leads(group) for one in others))
            # The next leader makes a key of its own for the subject.
            other = others[0].options.name
            await put(nodes, other, 2, 3)
            await until(lambda: not any(unnamed(one, shard_id) for one in others))
            released.set()
            assert isinstance(
                (await asyncio.gather(publishing, return_exceptions=True))[0], ApiError
            )
            # Alone, it makes no key that seals.
            with pytest.raises(ApiError):
                await publish(LocalLink(leader), "S", [message(4)])
            assert len(material(leader, shard_id)) == 1
            nodes.links.heal()
            await put(nodes, other, 4)
            await until_same(nodes)
            known = [material(node, shard_id) for node in nodes.all()]
            assert known[0] == known[1] == known[2]
            assert len(known[0]) == 4
            assert [unnamed(one, shard_id) for one in nodes.all()] == [[], [], []]
            assert files_with(tmp_path, [spare]) == {}
            for node in nodes.all():
                assert sorted(await seen(node, 10)) == [1, 2, 3, 4]

    asyncio.run(scene())


def test_absent_member_destroys_the_key_when_it_is_back(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await make(nodes)
            await put(nodes, "a", 1, 2)
            await until_same(nodes)
            shard_id = shard_of(nodes)
            away, failing = (one for one in NAMES if one != leader.options.name)
            before = material(leader, shard_id)
            await nodes.stop(away)

            def fail(*_: Any) -> None:
                raise OSError("the disk does not answer")

            # It has applied that the key is shredded, and stops before it is destroyed.
            keys_of(nodes[failing]).destroy = fail  # type: ignore[method-assign]
            receipt = await nodes.call(failing, lambda link: link.erase("S", [], "S.1"))
            await until(lambda: len(material(nodes[failing], shard_id)) == 1)
            [left] = material(leader, shard_id)
            [gone] = [key for key_id, key in before.items() if key_id != left]
            for name in (away, failing):
                assert files_with(tmp_path / name, [gone])
            await nodes.stop(failing)
            await nodes.start(failing)
            await until(lambda: not files_with(tmp_path / failing, [gone]))
            assert files_with(tmp_path / away, [gone])
            pending = await nodes.call(failing, lambda link: link.erasure(receipt.erasure_id, 0))
            assert pending.status == "pending"
            await nodes.start(away)
            done = await nodes.call(away, lambda link: link.erasure(receipt.erasure_id, WAIT_NS))
            assert done.status == "done"
            assert files_with(tmp_path, [gone]) == {}
            assert [sorted(await seen(node, 2)) for node in nodes.all()] == [[2]] * 3

    asyncio.run(scene())


@pytest.mark.parametrize("with_log", [True, False])
def test_wiped_member_has_all_keys_before_it_votes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_log: bool
) -> None:
    if not with_log:
        monkeypatch.setattr("contrail_replicator.group._TAIL_BYTES", 1)
    log = LogOptions() if with_log else LogOptions(8 << 10, keep_bytes=0, tail_bytes=16 << 10)

    async def scene() -> None:
        async with running(tmp_path, log=log) as nodes:
            leader = await make(nodes)
            count = 10 if with_log else 150
            await put(nodes, leader.options.name, *range(1, count + 1))
            shard_id, group, name = shard_of(nodes), group_of(nodes), leader.options.name
            # The last entry names a key.
            await leader.key_sharing.make(group, [(shard_id, "S.unused")])
            await until_same(nodes)
            wiped = next(one for one in NAMES if one != name)
            await nodes.stop(wiped)
            nodes.wipe(wiped)
            if not with_log:
                for node in nodes.all():
                    await node.cut_log()
            refused = asyncio.Event()
            answers = {one: one.key_sharing.answer for one in nodes.all()}

            async def refuse(request: Any) -> bytes:
                refused.set()
                raise no_leader("")

            for one in answers:
                one.key_sharing.answer = refuse  # type: ignore[method-assign]
            await nodes.start(wiped)
            await refused.wait()
            index = leader.groups[group].applied_index
            await until(lambda: nodes[wiped].groups[group].applied_index >= index)
            for _ in range(20):
                await turn()
                assert nodes[wiped].groups[group].flags
            assert "subject keys" in nodes[wiped].readiness()
            for one, answer in answers.items():
                one.key_sharing.answer = answer  # type: ignore[method-assign]
            await until(lambda: not nodes[wiped].groups[group].flags)
            assert not keys_of(nodes[wiped]).wants(shard_id)
            assert bool(nodes[wiped].catching_up.installs.installed) != with_log
            await until_same(nodes)
            # The others are lost, and their disks: what two had is whole.
            assert material(nodes[wiped], shard_id) == material(leader, shard_id)
            assert len(await seen(nodes[wiped], count)) == count

    asyncio.run(scene())


def test_message_whose_key_a_member_lacks_is_not_damaged(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await make(nodes)
            await put(nodes, "a", 1)
            await until_same(nodes)
            without = nodes[next(one for one in NAMES if one != leader.options.name)]
            others = [one for one in nodes.all() if one is not without]
            answer, shard_id = without.key_sharing.answer, shard_of(nodes)

            async def refuse(request: Any) -> bytes:
                raise no_leader("")

            kept = {one: one.key_sharing.answer for one in others}
            without.key_sharing.answer = refuse  # type: ignore[method-assign]

            async def only_take(request: Any) -> bytes:
                return (
                    await refuse(request)
                    if isinstance(request, GetKeys)
                    else await answer_of(request)
                )

            follower = next(one for one in others if one is not leader)
            answer_of = kept[follower]
            follower.key_sharing.answer = only_take  # type: ignore[method-assign]
            leader.key_sharing.answer = refuse  # type: ignore[method-assign]
            await put(nodes, "a", 2)
            shard = without.streams.shard("S")
            await until(lambda: shard.applied_seq == 2)
            assert keys_of(without).wants(shard_id)
            assert "subject keys" in without.readiness(strict=True)
            with pytest.raises(ApiError) as refusal:
                await without.reader.get(shard, 2)
            assert refusal.value.spec is errors.NOT_READY
            assert (await without.reader.get(shard, 1)).seq == 1
            await without.scrubber.round()
            assert not shard.damaged
            without.key_sharing.answer = answer  # type: ignore[method-assign]
            for one, known in kept.items():
                one.key_sharing.answer = known  # type: ignore[method-assign]
            await until_same(nodes)
            assert sorted(await seen(without, 2)) == [1, 2]

    asyncio.run(scene())


def test_keys_of_unused_subjects_and_of_deleted_streams_are_destroyed(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await make(nodes)
            await put(nodes, "a", 1, 2, 3)
            await until_same(nodes)
            shard_id = shard_of(nodes)
            before = material(leader, shard_id)
            await nodes.call("a", lambda link: link.delete_message("S", 2))
            while len(material(leader, shard_id)) == 3:
                await leader.shredder.tick(0.0)
            await until_same(nodes)
            for node in nodes.all():
                assert len(material(node, shard_id)) == 2
            [gone] = set(before.values()) - set(material(leader, shard_id).values())
            assert files_with(tmp_path, [gone]) == {}
            await nodes.call("a", lambda link: link.delete_stream("S", None))
            await until(lambda: not any(sum(keys_of(one).live().values()) for one in nodes.all()))
            await until(lambda: files_with(tmp_path, before.values()) == {})

    asyncio.run(scene())


def test_restored_stream_has_keys_of_its_own_on_all_members(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await make(nodes)
            await put(nodes, "a", *range(1, 6))
            await until_same(nodes)
            old = set(material(leader, shard_of(nodes)).values())
            data = await archive_of(LocalLink(leader))
            await nodes.call("a", lambda link: link.delete_stream("S", None))
            await restored(LocalLink(leader), data)
            leader = await leader_of(nodes)
            await until_same(nodes)
            shard_id = shard_of(nodes)
            known = [material(node, shard_id) for node in nodes.all()]
            assert known[0] == known[1] == known[2]
            assert (len(known[0]), set(known[0].values()) & old) == (5, set())
            # A subject keeps the key from the restore, so an erasure finds it.
            await put(nodes, "a", 6, subject="S.1")
            await until_same(nodes)
            assert len(material(leader, shard_id)) == 5
            await done(nodes, await erase(nodes, "S.1"))
            for node in nodes.all():
                assert sorted(await seen(node, 6)) == [2, 3, 4, 5]
                assert len(material(node, shard_id)) == 4

    asyncio.run(scene())


def test_subjects_whose_keys_are_lost_on_all_nodes_are_erased(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            leader = await make(nodes)
            await put(nodes, "a", *range(1, 5))
            await until_same(nodes)
            shard_id = shard_of(nodes)
            await nodes.stop(*NAMES)
            kept = (tmp_path / "a" / SHARED_KEYS_NAME).read_bytes()
            for name in NAMES:
                (tmp_path / name / SHARED_KEYS_NAME).unlink()
            await nodes.start(*NAMES)
            leader = await leader_of(nodes)
            await nodes.until_led(META_GROUP)
            assert "erase its subject" in leader.readiness(strict=True)["subject keys"]
            with pytest.raises(ApiError, match="erase its subject"):
                await nodes.call("a", lambda link: link.get_message("S", 1))
            # Only what is named is given up.
            receipt = await erase(nodes, "S.1")
            assert (receipt.messages, receipt.shredded) == (1, True)
            await done(nodes, receipt)
            await until(
                lambda: [len(keys_of(one).wanted[shard_id]) for one in nodes.all()] == [3] * 3
            )
            await put(nodes, "a", 5, subject="S.1")
            # A message that is deleted leaves no use for its key either.
            await nodes.call("a", lambda link: link.delete_message("S", 2))
            while any(len(keys_of(one).wanted[shard_id]) == 3 for one in nodes.all()):
                await (await leader_of(nodes)).shredder.tick(0.0)
                await turn()
            # A node finds its keys again: those that were given up do not come back.
            await nodes.stop("a")
            (tmp_path / "a" / SHARED_KEYS_NAME).write_bytes(kept)
            await nodes.start("a")
            await until_same(nodes)
            for node in nodes.all():
                assert sorted(await seen(node, 5)) == [3, 4, 5]
                assert len(material(node, shard_id)) == 3

    asyncio.run(scene())
