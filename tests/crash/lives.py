"""One life of a storage node, in its own process: make calls, then look at everything it holds.

Everything is reported as it happens: the outcome of a call before the next call.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import StoredMessage, StreamInfo
from contrail_link.contract.consume import AckItem, Delivery, PullRequest
from contrail_link.contract.publish import PubResult
from contrail_link.contract.read import RangeRequest, ReplayRequest
from contrail_link.publishing import publish
from contrail_storage.core import key_layout as keys
from contrail_storage.core.commands import META_SHARD
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.replica.log_time import LogTime
from contrail_storage.store.rocks_store import RocksStore, StoreFailedError
from tests.crash import history
from tests.crash.history import (
    AckPulled,
    Call,
    Delivered,
    Drained,
    Erased,
    Invoked,
    Looked,
    Outcome,
    Published,
    Refused,
    Returned,
    Seen,
    Step,
    StreamView,
    Unknown,
)
from tests.crash.pipe import Reporter

_WAIT_S: Final = 60.0
_RECORD_S: Final = 0.2
_RECONCILE_S: Final = 1.0
_ATTEMPTS: Final = 50
_ERASED_NS: Final = 60_000_000_000
_PAUSE_S: Final = 0.0005
_PAGE: Final = 500
_PIECE: Final = 64 << 10
_NO_CHECKPOINT: Final = "checkpoint_failed"
_UNAVAILABLE: Final = (
    errors.STORAGE_FAILED.name,
    errors.STORAGE_FULL.name,
    errors.NOT_READY.name,
    _NO_CHECKPOINT,
)


class MovedTime(LogTime):
    """Log time that a test can move forward."""

    ahead_ns = 0

    def now(self) -> int:
        """Log time now, in nanoseconds."""
        return super().now() + self.ahead_ns


class NodeStoppedError(Exception):
    """The node has stopped; the text says why."""


class Life:
    """A node in this process, and the calls to it."""

    def __init__(
        self,
        node: StorageNode,
        reporter: Reporter,
        first_number: int,
        log_is_idle: Callable[[], bool],
        store: RocksStore,
        *,
        held: bool = False,
    ) -> None:
        """With `held`, nothing is written to the store until a call asks for it."""
        self.node = node
        self._store = store
        self._held = held
        self._archives: dict[str, bytes] = {}
        self._log_is_idle = log_is_idle
        self.link = LocalLink(node)
        self._report = reporter.send
        self._numbers = itertools.count(first_number)
        self._pulled: dict[tuple[str, str], list[int]] = {}

    async def run(self, script: list[Step], *, insist: bool) -> None:
        """Make the calls step by step; with `insist`, repeat those that the disk has failed."""
        for step in script:
            calls = [self._resolved(call) for call in step]
            outcomes = await self._make_together(calls)
            attempts = 1
            while insist and any(map(_is_open, outcomes)):
                if attempts == _ATTEMPTS:
                    raise TimeoutError(f"{outcomes} after {attempts} attempts")
                await self._wait_until(lambda: not self.node.readiness())
                outcomes = await self._make_together(calls)
                attempts += 1
            await self._settle(calls, outcomes)

    async def _make_together(self, calls: list[Call]) -> list[Outcome]:
        numbers = [next(self._numbers) for _ in calls]
        for number, call in zip(numbers, calls, strict=True):
            self._report(Invoked(number, call, self.node.clock.now()))
        return list(await asyncio.gather(*map(self._make, numbers, calls)))

    def _resolved(self, call: Call | AckPulled) -> Call:
        if not isinstance(call, AckPulled):
            return call
        pulled = self._pulled.get((call.stream, call.consumer), [])
        seqs = [pulled.pop(0) for _ in range(min(call.count, len(pulled)))]
        return history.Ack(call.stream, call.consumer, call.kind, seqs, call.sync)

    async def _make(self, number: int, call: Call) -> Outcome:
        try:
            outcome = await self._perform(call)
        except ApiError as error:
            if error.spec is errors.OUTCOME_UNKNOWN:
                outcome = Unknown()
            else:
                outcome = Refused(error.spec.name, error.detail, error.applied)
        except (OSError, StoreFailedError) as error:
            assert isinstance(call, history.TakeCheckpoint), call
            outcome = Refused(_NO_CHECKPOINT, str(error), None)
        self._report(Returned(number, outcome, self.node.clock.now()))
        return outcome

    async def _perform(self, call: Call) -> Outcome:
        link = self.link
        match call:
            case history.Publish():
                return Published(await self._publish(call))
            case history.Pull():
                return Delivered(await self._pull(call.stream, call.consumer, call.batch))
            case history.Look():
                return Looked(await link.consumer_info(call.stream, call.consumer))
            case history.PutStream():
                await link.put_stream(call.config, "put", None, False)
            case history.DeleteStream():
                await link.delete_stream(call.stream)
            case history.Remove():
                await link.delete_message(call.stream, call.seq)
            case history.Purge():
                await link.purge_stream(call.stream, call.subject, call.up_to_seq, call.keep)
            case history.Erase() | history.AskErasure() | history.Reclaim():
                return await self._reclaim(call)
            case history.PutConsumer():
                await link.put_consumer(call.stream, call.config, "put", None, False)
            case history.DropConsumer():
                await link.delete_consumer(call.stream, call.consumer)
            case history.Ack():
                await self._acknowledge(call)
            case _:
                await self._maintain(call)
        return history.Done()

    async def _maintain(self, call: Call) -> None:
        match call:
            case history.TakeCheckpoint():
                await self.node.checkpoint()
            case history.WriteOut():
                await self.node.until_written()
            case history.PassTime():
                await self._pass_time(call.time_ns)
            case history.Save() | history.Restore():
                await self._archive(call)

    async def _publish(self, call: history.Publish) -> list[PubResult]:
        if not call.atomic:
            return (await publish(self.link, call.stream, call.messages)).results
        batch = MessageBatch.of(call.messages)
        batch.atomic = True
        runs = (await publish(self.link, call.stream, batch)).results
        return [
            PubResult(run.seq + at, duplicate=run.duplicate, code=run.code, detail=run.detail)
            for run in runs
            for at in range(run.count)
        ]

    async def _pass_time(self, time_ns: int) -> None:
        assert isinstance(self.node.clock, MovedTime)
        self.node.clock.ahead_ns += time_ns
        await self.look(kept=True)

    async def _archive(self, call: history.Save | history.Restore) -> None:
        link = self.link
        if isinstance(call, history.Save):
            pieces = [piece async for piece in await link.snapshot(call.stream, True)]
            self._archives[call.stream] = b"".join(pieces)
            return
        token = await link.begin_restore(call.stream)
        archive = self._archives[call.saved]
        for start in range(0, len(archive), _PIECE):
            await link.append_restore(token, start, archive[start : start + _PIECE])
        await link.commit_restore(token)

    async def _reclaim(self, call: history.Erase | history.AskErasure | history.Reclaim) -> Outcome:
        match call:
            case history.Erase():
                receipt = await self.link.erase(call.stream, call.seqs, call.subject)
                return Erased(receipt.erasure_id)
            case history.AskErasure():
                receipt = await self.link.erasure(call.erasure_id, _ERASED_NS)
                assert receipt.status == "done"
            case history.Reclaim():
                await self.node.compactor.tick()
                assert self.node.compactor.counts.dropped
        return history.Done()

    async def _pull(self, stream: str, consumer: str, batch: int) -> list[Delivery]:
        request = PullRequest(stream=stream, consumer=consumer, batch=batch, no_wait=True)
        deliveries = (await self.link.pull(request)).deliveries
        self._pulled.setdefault((stream, consumer), []).extend(
            one.message.seq for one in deliveries
        )
        return deliveries

    async def _acknowledge(self, call: history.Ack) -> None:
        machine = self.node.streams.shard(call.stream).machine
        consumer = machine.consumer(call.consumer)
        if consumer is None:
            raise ApiError(errors.CONSUMER_NOT_FOUND, applied=False)
        address = (machine.shard_id, consumer.consumer_id, consumer.epoch)
        items = [AckItem(*address, [seq], call.kind) for seq in call.seqs]
        results = await self.link.acknowledge(call.stream, call.consumer, items, call.sync)
        assert all(result.code == 0 for result in results), results

    # Waiting -------------------------------------------------------------------------------------

    async def _settle(self, calls: list[Call], outcomes: list[Outcome]) -> None:
        """Wait until all effects of the calls are in the log and the store.

        Deliveries are recorded a little after they are sent. Waiting for that too makes every run
        write the same batches.
        """
        for call, outcome in zip(calls, outcomes, strict=True):
            if isinstance(call, history.Pull) and isinstance(outcome, Delivered):
                await self._wait_recorded(call, outcome.deliveries)
        await self._wait_until(self._is_quiet)

    async def _wait_recorded(self, pull: history.Pull, deliveries: list[Delivery]) -> None:
        consumer = self.node.streams.shard(pull.stream).machine.consumer(pull.consumer)
        assert consumer is not None
        last = max((delivery.consumer_seq for delivery in deliveries), default=0)
        # If the log has failed meanwhile, the condition never holds.
        with suppress(TimeoutError):
            await wait_until(lambda: consumer.delivered.consumer_seq >= last, _RECORD_S)

    def _is_quiet(self) -> bool:
        if not self._log_is_idle() or self.node.eraser.erasures.pending():
            return False
        if self._held:
            return True
        self.node.applier.flush()  # instead of waiting for its timer
        return self._is_written()

    def _is_written(self) -> bool:
        written = self.node.applier.written_indexes
        return all(
            written.get(number) == group.applied_index for number, group in self.node.groups.items()
        )

    def _is_all_written(self) -> bool:
        """Whether the store has everything; hands it what is still held back."""
        self.node.applier.flush()
        return self._is_quiet() and self._is_written()

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds. Raises TimeoutError or NodeStoppedError."""
        fatal = self.node.fatal
        await wait_until(lambda: fatal.done() or condition())
        if fatal.done():
            raise NodeStoppedError(fatal.result())

    # Looking -------------------------------------------------------------------------------------

    async def look(self, *, kept: bool = False) -> None:
        """Report everything the node holds, read in every way there is.

        With `kept`, everything that is due is done first.
        """
        time_ns = self.node.clock.now()
        with suppress(TimeoutError):
            await wait_until(lambda: not self._half_made(), _RECONCILE_S)
        if kept:
            try:
                await self.node._housekeeper.tick()
            except ApiError:  # the disk fails
                kept = False
        await self._wait_until(self._is_all_written)
        unreadable: dict[str, str] = {}
        streams = {}
        for name in sorted(one.name for one in self.node.streams.listed()):
            try:
                streams[name] = await self._view(await self.link.stream_info(name))
            except ApiError as error:
                unreadable[name] = str(error)
        half_made = self._half_made() + self._overlaps()
        if not unreadable:
            half_made += self._leftovers(self._store)
        listed = [] if unreadable else await self._listed()
        self._report(Seen(streams, listed, half_made, unreadable, time_ns, kept))

    async def _listed(self) -> list[str]:
        page = await self.link.list_streams("", "", _PAGE, "")
        return [info.config.name for info in page.streams]

    async def _view(self, info: StreamInfo) -> StreamView:
        name = info.config.name
        messages = await self._read(name)
        return StreamView(
            config=info.config,
            state=info.state,
            claimed_subjects=self.node.meta.streams[name].subjects,
            messages=messages,
            fetched=[await self.link.get_message(name, message.seq) for message in messages],
            replayed=await self._replay(name),
            consumers={
                consumer.config.name: consumer
                for consumer in (await self.link.list_consumers(name, _PAGE, "")).consumers
            },
        )

    async def _read(self, stream: str) -> list[StoredMessage]:
        messages: list[StoredMessage] = []
        next_seq = 0
        while True:
            request = RangeRequest(stream=stream, from_seq=next_seq, max_bytes=8 << 20)
            result = await self.link.read_range(request)
            messages += result.messages
            if result.num_pending == 0 or not result.messages:
                return messages
            next_seq = result.next_seq

    async def _replay(self, stream: str) -> list[int]:
        chunks = await self.link.replay(ReplayRequest(stream=stream, format="ndjson"))
        *rows, end = b"".join([chunk async for chunk in chunks]).splitlines()
        assert json.loads(end) == {"end": True, "messages": len(rows)}
        return [json.loads(row)["seq"] for row in rows]

    def _half_made(self) -> list[str]:
        """Streams and shards that a crash left half created or half deleted."""
        entries = self.node.meta.streams.values()
        found = [f"{entry.name} is {entry.stage}" for entry in entries if entry.stage != "listed"]
        shard_ids = {shard_id for entry in entries for shard_id in entry.shard_ids}
        strays = shard_ids ^ set(self.node.applier.shards)
        return found + [f"shard {shard_id} is loaded or listed, not both" for shard_id in strays]

    def _overlaps(self) -> list[str]:
        """Blocks whose sequences overlap those of another block."""
        found = []
        for shard_id, directory in self.node.blocks.directories.items():
            spans = [directory.span(at) for at in range(len(directory))]
            found += [
                f"shard {shard_id} has a block from {above.base_seq} to {above.end_seq} twice"
                for below, above in itertools.pairwise(spans)
                if above.base_seq < below.end_seq
            ]
        return found

    def _leftovers(self, store: RocksStore) -> list[str]:
        """Rows of streams that do not exist."""
        rows = {
            int.from_bytes(key[1:5], "big")
            for kind in keys.SHARD_KINDS
            for key in store.scan_keys(kind, keys.prefix_end(kind))
        }
        entries = self.node.meta.streams.values()
        listed = {shard_id for entry in entries for shard_id in entry.shard_ids}
        strays = rows - {META_SHARD} - listed
        return [f"shard {shard_id} is gone and has rows" for shard_id in strays]

    async def drain_all(self) -> None:
        """Drain every consumer of the streams that can be read."""
        for name in sorted(one.name for one in self.node.streams.listed()):
            with suppress(ApiError):
                seqs = [message.seq for message in await self._read(name)]
                for consumer in sorted(self.node.streams.shard(name).machine.consumer_ids):
                    await self._drain(name, consumer, seqs)

    async def _drain(self, stream: str, consumer: str, seqs: list[int]) -> None:
        """Return the pending deliveries of `seqs`, then pull all that the consumer has."""
        if seqs:
            await self._acknowledge(history.Ack(stream, consumer, "nak", seqs, sync=True))
        deliveries: list[Delivery] = []
        while taken := await self._pull(stream, consumer, _PAGE):
            deliveries += taken
        self._report(Drained(stream, consumer, deliveries))


async def wait_until(condition: Callable[[], bool], timeout_s: float = _WAIT_S) -> None:
    """Wait until the condition holds. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not reached within {timeout_s} s")
        await asyncio.sleep(_PAUSE_S)


def _is_open(outcome: Outcome) -> bool:
    """Whether to repeat the call: its outcome is unknown, or it was refused because of the disk."""
    match outcome:
        case Unknown():
            return True
        case Refused(name=name):
            return name in _UNAVAILABLE
        case Published(results=results):
            return any(result.code == errors.OUTCOME_UNKNOWN.code for result in results)
    return False
