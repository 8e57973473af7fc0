"""Many deliveries at once over a log that does not keep up: all are recorded, whatever they add to.

What consumers are given counts in the log as it is encoded, and never becomes an entry that the log
does not take, after which nobody would answer these consumers again.
"""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_link.contract.consume import PullRequest
from contrail_link.publishing import publish
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.core import commands as cmd
from contrail_storage.core.entry_codec import encode_command
from contrail_storage.core.key_layout import SHARD_GROUP
from contrail_storage.core.results import Result
from contrail_storage.disk.files import AppendHandle, Files
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.replica.entries import LOGGED_BYTES_MAX
from contrail_storage.replica.proposer import in_slices
from tests.unit.storage.dispatcher_rig import SECOND_NS, DispatcherRig, HandLoop, run_by_hand
from tests.unit.storage.machine_rig import Message, append_of

PATIENCE_S = 120.0
FIRST_SEQ = 1 << 40  # sequences that take nine bytes each
BATCH = 10_000


class SlowFiles(Files):
    """The disk, whose log waits with its next sync while the gate is shut."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def create(self, path: Path, *, ahead_bytes: int = 0) -> AppendHandle:
        handle = super().create(path, ahead_bytes=ahead_bytes)
        return _SlowHandle(self, handle) if path.parent.name == "wal" else handle


class _SlowHandle:
    def __init__(self, files: SlowFiles, handle: AppendHandle) -> None:
        self._files = files
        self._handle = handle

    def write(self, parts: Sequence[bytes]) -> None:
        self._handle.write(parts)

    def sync(self) -> None:
        assert self._files.gate.wait(PATIENCE_S)
        self._handle.sync()

    def close(self) -> None:
        self._handle.close()


async def pull_all(link: LocalLink, names: Sequence[str]) -> None:
    for name in names:
        request = PullRequest(stream="S", consumer=name, batch=BATCH, no_wait=True)
        assert len((await link.pull(request)).deliveries) == BATCH


@pytest.mark.long
def test_many_large_pulls_on_a_slow_log_are_all_recorded(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(52)]
    files = SlowFiles()

    async def scene() -> None:
        options = NodeOptions(tmp_path, files=files)
        node = StorageNode.open(options, SingleMemberGroups())
        await node.start()
        try:
            link = LocalLink(node)
            config = StreamConfig(name="S", subjects=("a",), first_seq=FIRST_SEQ)
            await link.put_stream(config, "create", None, False)
            for name in names:
                consumer = ConsumerConfig(
                    name=name, durable=True, max_ack_pending=-1, ack_wait_ns=3_600 * SECOND_NS
                )
                await link.put_consumer("S", consumer, "create", None, False)
            await publish(link, "S", [PublishMessage("a", None, b"x")] * BATCH)
            files.gate.clear()
            await pull_all(link, names)
            # All but the first few wait for what the log has and does not confirm.
            node.consumers.flush()
            log, group = node.shard_log, node.groups[SHARD_GROUP]
            assert log.queued_bytes + group.outstanding_bytes > LOGGED_BYTES_MAX
            files.gate.set()
            for name in names:
                info = await link.consumer_info("S", name)
                assert (info.delivered.consumer_seq, info.num_ack_pending) == (BATCH, BATCH)
            assert link.readiness() == {}
            assert node.shard_log.queued_bytes == 0
        finally:
            files.gate.set()
            await node.stop()

    async def whole() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scene()

    asyncio.run(whole())


@pytest.mark.long
def test_everything_that_is_pending_is_given_up_in_slices_after_a_restart() -> None:
    async def scene() -> None:
        rig = DispatcherRig(
            StreamConfig(name="S", subjects=("b",), first_seq=FIRST_SEQ),
            {"ack_wait_ns": SECOND_NS, "max_deliver": 1, "max_ack_pending": -1},
        )
        rig.dispatcher.close()
        stored = range(FIRST_SEQ, FIRST_SEQ + 480_000)
        published = append_of([Message("b")] * BATCH)
        for start in stored[::BATCH]:
            rig.apply(published)
            rig.apply(cmd.Deliver(1, 1, list(range(start, start + BATCH)), start + BATCH))
        assert list(rig.consumer.pending) == list(stored)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HandLoop)
        taken: list[int] = []
        given_up: list[int] = []
        propose = rig.propose

        def measured(command: cmd.Command) -> asyncio.Future[Result]:
            assert isinstance(command, cmd.Exhaust)
            assert in_slices(command) == [command]
            given_up.extend(command.seqs)
            taken.append(len(encode_command(command)))
            return propose(command)

        rig.propose = measured  # type: ignore[method-assign]
        rig.dispatcher = rig.new_dispatcher()
        await loop.quiet()  # all deadlines are taken, in slices
        await rig.let_pass(2 * SECOND_NS)
        assert not rig.consumer.pending
        assert sorted(given_up) == list(stored)
        assert sum(taken) > LOGGED_BYTES_MAX
        assert max(taken) < 64 << 10

    run_by_hand(scene())
