"""A disk that hangs, and one that fails to read: everybody is answered, and it heals."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_link.contract.publish import PublishOutcome
from contrail_link.contract.read import LastRequest, RangeRequest, ReplayRequest
from contrail_link.publishing import publish
from contrail_serve.groups import SingleMemberGroups
from contrail_storage import healing
from contrail_storage.core.key_layout import META_GROUP
from contrail_storage.disk.files import AppendHandle, Files
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.reading.answering import AnswerDeadline
from contrail_storage.replica.shard import Shard
from contrail_storage.store.rocks_store import StoreFailedError
from contrail_storage.upkeep.due_messages import DueMessages
from tests.crash.lives import wait_until

PATIENCE_S = 60.0


class HangingFiles(Files):
    """A disk whose syncs of the log come back only while ``going`` is set."""

    def __init__(self) -> None:
        self.going = threading.Event()
        self.going.set()

    def create(self, path: Path, *, ahead_bytes: int = 0) -> AppendHandle:
        return _Hanging(super().create(path, ahead_bytes=ahead_bytes), self.going)


class _Hanging:
    def __init__(self, handle: AppendHandle, going: threading.Event) -> None:
        self._handle = handle
        self._going = going

    def write(self, parts: Sequence[bytes]) -> None:
        self._handle.write(parts)

    def sync(self) -> None:
        self._going.wait()
        self._handle.sync()

    def close(self) -> None:
        self._handle.close()


@asynccontextmanager
async def running(
    data_dir: Path, files: Files, timeout_s: float
) -> AsyncIterator[tuple[StorageNode, LocalLink]]:
    options = NodeOptions(data_dir, files=files, publish_timeout_s=timeout_s)
    node = StorageNode.open(options, SingleMemberGroups())
    async with asyncio.timeout(PATIENCE_S):
        await node.start()
        try:
            yield node, LocalLink(node)
        finally:
            if isinstance(files, HangingFiles):
                files.going.set()
            await node.stop()


def message(number: int, subject: str = "s.a") -> PublishMessage:
    return PublishMessage(subject, None, b"%d" % number, f"id-{number}")


async def make(link: LocalLink) -> None:
    config = StreamConfig(name="S", subjects=("s.>",), allow_atomic=True)
    await link.put_stream(config, "create", None, False)
    sharded = StreamConfig(name="H", subjects=("h.*",), shards=2)
    await link.put_stream(sharded, "create", None, False)
    await link.put_consumer("S", ConsumerConfig(name="c", durable=True), "create", None, False)


@pytest.mark.parametrize("timeout_s", [0.0, 0.05])
def test_everything_that_a_hung_disk_has_not_taken_is_unknown_and_stored_when_it_continues(
    tmp_path: Path, timeout_s: float
) -> None:
    async def scenario() -> None:
        files = HangingFiles()
        async with running(tmp_path, files, 30.0) as (node, link):
            await make(link)
            await publish(link, "S", [message(0)])
            pulled = await link.pull(PullRequest(stream="S", consumer="c"))
            await link.consumer_info("S", "c")
            files.going.clear()
            hasty = LocalLink(node)
            hasty.deadline._timeout_s = timeout_s
            reported: dict[str, list[PublishOutcome]] = {}

            def report(name: str) -> Callable[[PublishOutcome], None]:
                return lambda outcome: reported.setdefault(name, []).append(outcome)

            atomic = MessageBatch.of([message(7), message(8)])
            atomic.atomic = True
            hasty.publish_then("S", [message(1)], report("single"))
            hasty.publish_then("S", MessageBatch.of([message(2), message(3)]), report("batch"))
            hasty.publish_then("S", atomic, report("atomic"))
            hasty.publish_then("H", [message(1, "h.a")], report("sharded"))
            each = [message(4), message(5), message(6, "h.b")]
            hasty.publish_each_then(each, lambda at, outcome: report(f"each {at}")(outcome))
            ack = AckItem(pulled.shard_id, pulled.consumer_id, pulled.epoch, [1], "ack", 0)
            waiting = {
                "publish": publish(hasty, "S", [message(9)]),
                "publish_batch": publish(hasty, "S", MessageBatch.of([message(10)])),
                "put_stream": hasty.put_stream(
                    StreamConfig(name="T", subjects=("t",)), "create", None, False
                ),
                "delete_message": hasty.delete_message("S", 1),
                "put_consumer": hasty.put_consumer(
                    "S", ConsumerConfig(name="d", durable=True), "create", None, False
                ),
                "sync ack": hasty.acknowledge("S", "c", [ack], True),
            }
            found = await asyncio.gather(*waiting.values(), return_exceptions=True)
            for name, outcome in zip(waiting, found, strict=True):
                assert isinstance(outcome, ApiError), (name, outcome)
                assert outcome.spec is errors.OUTCOME_UNKNOWN, name
            while len(reported) < 6:
                await asyncio.sleep(0)
            for name, outcomes in reported.items():
                [outcome] = outcomes
                assert isinstance(outcome, ApiError), name
                assert outcome.spec is errors.OUTCOME_UNKNOWN, name
                assert outcome.applied is None
            # What changes nothing goes on, or says what is wrong.
            assert (await hasty.get_message("S", 1)).payload == b"0"
            assert node.shard_log.queued_bytes or node.groups[1].outstanding_bytes
            files.going.set()
            while hasty.deadline.waiting or node.shard_log.queued_bytes:
                await asyncio.sleep(0)
            state = (await link.stream_info("S")).state
            assert (state.last_seq, state.messages) == (10, 9)
            assert (await link.stream_info("H")).state.messages == 2
            assert (await link.stream_info("T")).config.name == "T"
            assert (await link.consumer_info("S", "d")).num_pending == 9
            assert (await link.consumer_info("S", "c")).num_ack_pending == 0
            # Nobody is told twice, and nothing stays counted.
            assert {len(outcomes) for outcomes in reported.values()} == {1}
            assert [group.outstanding_bytes for group in node.groups.values()] == [0, 0, 0]
            assert node.shard_log._in_flight == [0, 0]
            again = await publish(link, "S", [message(1)])
            assert (again.results[0].seq, again.results[0].duplicate) == (2, True)

    asyncio.run(scenario())


def test_publish_that_is_refused_at_once_waits_for_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, Files(), 0.0) as (node, link):
            link.deadline._timeout_s = 30.0
            await make(link)
            node._defect = "the log failed: for a test"
            for content in ([message(1)], [message(1, "h.a")]):
                with pytest.raises(ApiError) as refused:
                    await publish(link, "S" if content[0].subject == "s.a" else "H", content)
                assert refused.value.spec is errors.STORAGE_FAILED
            node._defect = ""
            assert link.deadline.waiting == 0

    asyncio.run(scenario())


def test_pull_and_info_that_wait_for_a_record_say_that_the_disk_hangs(tmp_path: Path) -> None:
    async def scenario() -> None:
        files = HangingFiles()
        async with running(tmp_path, files, 30.0) as (node, link):
            await make(link)
            config = ConsumerConfig(name="limited", durable=True, max_deliver=2)
            await link.put_consumer("S", config, "create", None, False)
            await publish(link, "S", [message(0)])
            hasty = LocalLink(node)
            hasty.deadline._timeout_s = 0.05
            files.going.clear()
            # With max_deliver a delivery is recorded before it is given out.
            with pytest.raises(ApiError) as unrecorded:
                await hasty.pull(PullRequest(stream="S", consumer="limited"))
            assert unrecorded.value.spec is errors.STORAGE_FAILED
            with pytest.raises(ApiError) as unsettled:
                await hasty.consumer_info("S", "limited")
            assert unsettled.value.spec is errors.STORAGE_FAILED
            files.going.set()
            pulled = await link.pull(
                PullRequest(stream="S", consumer="limited", expires_ns=30_000_000_000)
            )
            assert [one.message.seq for one in pulled.deliveries] == [1]

    asyncio.run(scenario())


@pytest.mark.parametrize(("steps", "ends"), [([1, 2, 3, 4], True), ([1, 2, 2], False)])
def test_change_of_many_steps_takes_as_long_as_the_log_continues(
    steps: list[int], ends: bool
) -> None:
    async def scenario() -> None:
        went_on, looks = asyncio.Event(), iter(steps)

        def progress() -> int:
            seen = next(looks)
            if seen == 4:
                went_on.set()
            return seen

        async def change() -> str:
            await went_on.wait()
            return "done"

        deadline = AnswerDeadline(0.01, progress)
        if ends:
            assert await deadline.change(change()) == "done"
        else:
            with pytest.raises(ApiError) as unknown:
                await deadline.change(change())
            assert unknown.value.spec is errors.OUTCOME_UNKNOWN
            assert deadline.waiting == 1
            went_on.set()
        while deadline.waiting:
            await asyncio.sleep(0)

    asyncio.run(scenario())


def test_read_that_the_disk_fails_is_reported_by_every_route_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "IO error: While pread offset 0 len 4096: /data/store/000007.sst: Input/output error"

    async def scenario() -> None:
        async with running(tmp_path, Files(), 30.0) as (_, link):
            await make(link)
            for number in range(4):
                await publish(link, "S", [message(number)])
        async with running(tmp_path, Files(), 30.0) as (node, link):

            def failing(*_: object) -> None:
                raise StoreFailedError(reason)

            with monkeypatch.context() as patch:
                for name in ("get_once", "get_unverified", "get_many", "scan", "view"):
                    patch.setattr(node._disk, name, failing)
                plan = ReplayRequest(stream="S", format="ndjson", from_seq=1, to_seq=4)

                async def replay() -> list[object]:
                    return [chunk async for chunk in await link.replay(plan)]

                async def snapshot() -> list[object]:
                    return [chunk async for chunk in await link.snapshot("S", True)]

                ways = [
                    link.get_message("S", 1),
                    link.read_range(RangeRequest(stream="S", limit=9)),
                    link.last_messages(LastRequest(stream="S", subject="s.>")),
                    link.pull(PullRequest(stream="S", consumer="c")),
                    replay(),
                    snapshot(),
                ]
                for way in ways:
                    with pytest.raises(ApiError) as failed:
                        await way
                    assert failed.value.spec is errors.STORAGE_READ_FAILED, way
                    assert "Input/output error" in failed.value.detail
                    assert "/data" not in failed.value.detail
            assert node.readiness() == {}
            assert (await link.get_message("S", 1)).payload == b"0"

    asyncio.run(scenario())


def test_what_the_disk_fails_to_read_of_one_stream_keeps_no_other_from_ageing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running(tmp_path, Files(), 30.0) as (node, link):
            remove, tries = DueMessages.remove, []

            async def failing(self: DueMessages, shard: Shard, now_ns: int) -> None:
                if shard.name == "A":
                    tries.append(now_ns)
                    raise StoreFailedError("IO error: Input/output error")
                await remove(self, shard, now_ns)

            with monkeypatch.context() as patch:
                patch.setattr(DueMessages, "remove", failing)
                for name in ("A", "B"):
                    config = StreamConfig(
                        name=name,
                        subjects=(f"{name}.>",),
                        max_age_ns=100_000_000,
                        allow_msg_ttl=True,
                        allow_rollup_hdrs=True,
                        subject_delete_marker_ttl_ns=1_000_000_000,
                    )
                    await link.put_stream(config, "create", None, False)
                for number in range(3):
                    await publish(link, "A", [message(number, "A.a")])
                    await publish(link, "B", [message(number, "B.a")])
                while (await link.stream_info("B")).state.first_seq < 4:
                    await asyncio.sleep(0)
                assert tries
                assert (await link.stream_info("A")).state.messages == 3
                assert not node.fatal.done()
            while (await link.stream_info("A")).state.first_seq < 4:
                await asyncio.sleep(0)

    asyncio.run(scenario())


@pytest.mark.parametrize("pattern", ["wal/*.wal", "identity", "checkpoints/*"])
def test_start_that_meets_a_file_that_cannot_be_read_names_it(tmp_path: Path, pattern: str) -> None:
    async def fill() -> None:
        async with running(tmp_path, Files(), 30.0) as (node, link):
            await make(link)
            await publish(link, "S", [message(1)])
            await node.checkpoint()

    asyncio.run(fill())
    spoilt = max(tmp_path.glob(pattern))
    spoilt.unlink()
    spoilt.symlink_to("/proc/self/mem")  # opens, and then fails to read with EIO
    with pytest.raises(OSError, match=f"Input/output error.*{spoilt.name}"):
        StorageNode.open(NodeOptions(tmp_path), SingleMemberGroups())


@pytest.mark.parametrize("part", ["log", "store"])
def test_failed_part_is_given_up_and_recovers_even_if_the_failure_cannot_be_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    class Unwritable:
        def error(self, *_: object, **fields: object) -> None:
            raise OSError("No space left on device")

        def info(self, *_: object, **fields: object) -> None:
            pass

    async def scenario() -> None:
        async with running(tmp_path, Files(), 30.0) as (node, link):
            await make(link)
            monkeypatch.setattr(healing, "_log", Unwritable())
            fail = node._log_failed if part == "log" else node._store_failed
            with suppress(OSError):
                fail(OSError("for a test"))
            assert not node.groups[META_GROUP].is_leader
            await wait_until(lambda: not node.readiness())
            assert (await publish(link, "S", [message(1)])).results[0].seq == 1

    asyncio.run(scenario())
