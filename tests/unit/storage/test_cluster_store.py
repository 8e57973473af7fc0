"""A node of a cluster whose store fails, while the others go on."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage, StreamConfig
from contrail_link.publishing import publish
from contrail_storage.healing import Healing
from tests.unit.storage.cluster_rig import NAMES, Nodes, running, turn, until


async def publish_until(nodes: Nodes, done: asyncio.Event) -> int:
    """Publish one message after another until all are stored; return their number."""
    count = 0
    while not done.is_set():
        message = PublishMessage("S.x", None, b"%d" % count, msg_id=f"{count}")
        for name in NAMES:
            with suppress(ApiError):  # while nobody leads, or the node has no store
                ack = await nodes.call(name, lambda link: publish(link, "S", [message]))  # noqa: B023
                count += 1
                assert ack.results[0].seq == count
                break
        await turn()
    return count


@pytest.mark.parametrize("leads", [False, True])
def test_store_is_opened_again_while_other_nodes_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    attempts: list[str] = []
    reopen = Healing._reopen

    async def counted(self: Healing) -> None:
        attempts.append(self._node.options.name)
        await reopen(self)

    monkeypatch.setattr(Healing, "_reopen", counted)

    async def scene() -> None:
        async with running(tmp_path) as nodes:
            config = StreamConfig(name="S", subjects=("S.>",), num_replicas=3)
            await nodes.call("a", lambda link: link.put_stream(config, "put", None, False))
            await nodes.until_listed("S")
            [group] = nodes["a"].meta.streams["S"].groups
            await nodes.until_led(group)
            leader = nodes.leader(group)
            name = leader if leads else next(one for one in NAMES if one != leader)
            node, done = nodes[name], asyncio.Event()
            publishing = asyncio.ensure_future(publish_until(nodes, done))
            node._store_failed(OSError("No space left on device"))
            others = [nodes[one].groups[group] for one in NAMES if one != name]
            await until(lambda: any(one.is_leader for one in others))
            await until(lambda: not any(one.may_take_over(name) for one in others))
            await until(lambda: node.healing.reopened == 1 and not node.failure)
            assert attempts == [name]
            await until(lambda: any(one.may_take_over(name) for one in others))
            done.set()
            count = await publishing
            await until(lambda: node.streams.stream("S").info().state.messages == count)

    asyncio.run(scene())
