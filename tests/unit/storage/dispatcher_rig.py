"""A dispatcher over a real machine, block store and reader, with commands that fail on demand."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from contrail_common import errors
from contrail_common.columns.blocks import Block, encode_block
from contrail_common.errors import ApiError, ErrorSpec
from contrail_common.model import AckKind, ConsumerConfig, StreamConfig
from contrail_link.contract.consume import Delivery, PullRequest, PullResult
from contrail_storage.consumers.consumer import dispatcher_kind
from contrail_storage.consumers.dispatcher import Dispatcher
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.consumer_machine import ConsumerMachine
from contrail_storage.core.facts import SubjectFacts
from contrail_storage.core.results import Result, Writes
from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.core.stream.strip_dead import between_live
from contrail_storage.core.subjects.filters import SubjectFilter
from contrail_storage.reading.reader import Reader
from contrail_storage.replica.shard import Shard
from contrail_storage.store.block_store import BlockStore, span_of
from contrail_storage.store.shard_facts import ShardFacts
from tests.unit.storage.machine_rig import SHARD, Message, append_of, configure, consumer_config
from tests.unit.storage.naive_subjects import naive_matches

SECOND_NS = 1_000_000_000
PATIENCE_S = 60.0
PROPOSALS_MAX = 1_000


class GatedSource:
    """Stored blocks; while the gate is shut, a read waits."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = 0

    def get(self, key: bytes) -> bytes | None:
        self.waiting += 1
        self.gate.wait(PATIENCE_S)
        self.waiting -= 1
        return self.rows.get(key)

    def get_many(self, wanted: Sequence[bytes]) -> list[bytes | None]:
        return [self.get(key) for key in wanted]

    get_once = get_unverified = get_many


class HandReader(Reader):
    """A reader whose reads of blocks wait while ``held``; one step lets each waiting one go on.

    If it is ``searching``, it looks for the next match in windows, as in a long stream.
    """

    def __init__(self, blocks: BlockStore, *, searching: bool = False) -> None:
        super().__init__(blocks)
        self.held = False
        self.searching = searching
        self._waiting: list[asyncio.Future[None]] = []

    async def block_at(self, shard: Shard, seq: int) -> Block | None:
        await self._allowed()
        return await super().block_at(shard, seq)

    async def block_below(self, shard: Shard, seq: int) -> Block | None:
        await self._allowed()
        return await super().block_below(shard, seq)

    async def facts(self, shard: Shard, from_seq: int, to_seq: int) -> SubjectFacts:
        await self._allowed()
        return await super().facts(shard, from_seq, to_seq)

    def _in_memory(self, shard: Shard, seq: int) -> bool:
        return not self.searching and super()._in_memory(shard, seq)

    def _lower_bound(self, shard: Shard, from_seq: int, subject_filter: SubjectFilter) -> int:
        if self.searching:
            return from_seq
        return super()._lower_bound(shard, from_seq, subject_filter)

    async def _allowed(self) -> None:
        if self.held:
            step: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(step)
            await step

    def step(self) -> None:
        """Let the reads that wait go on."""
        waiting, self._waiting = self._waiting, []
        for step in waiting:
            if not step.done():
                step.set_result(None)


@dataclass
class Proposal:
    """A command on its way through the log."""

    command: cmd.Command
    future: asyncio.Future[Result]


def from_the_first(rig: "DispatcherRig", config: ConsumerConfig) -> cmd.PutConsumer:
    """The command for a consumer of all messages."""
    del rig
    return cmd.PutConsumer(config, 1)


@dataclass
class DispatcherRig:
    """One consumer on one stream. Log time stands still until a test moves it."""

    config: StreamConfig = field(
        default_factory=lambda: StreamConfig(name="S", subjects=("a.*", "b"))
    )
    consumer_fields: dict[str, Any] = field(default_factory=dict)
    cached: bool = True
    late: bool = False
    searching: bool = False
    log_ns: int = 1_000 * SECOND_NS
    start: Callable[["DispatcherRig", ConsumerConfig], cmd.PutConsumer] = from_the_first

    def __post_init__(self) -> None:
        self.source = GatedSource()
        self.blocks = BlockStore(self.source, cache_bytes=(1 << 20) if self.cached else 0)
        self.machine = StreamMachine(SHARD, ShardFacts(self.blocks, SHARD))
        self.shard = Shard(self.machine, 0)
        self.reader = HandReader(self.blocks, searching=self.searching)
        self.proposals: deque[Proposal] = deque()
        self.refusing = False
        self.index = 0
        self.apply(configure(self.config))
        self.apply(self.start(self, consumer_config("red", **self.consumer_fields)))
        self.dispatcher = self.new_dispatcher()

    @property
    def consumer(self) -> ConsumerMachine:
        return self.machine.consumers[1]

    def new_dispatcher(self) -> Dispatcher:
        """The dispatcher of a leader that knows only what was applied."""
        kind = dispatcher_kind(self.consumer.config)
        return kind(self.shard, self.consumer, self.reader, self.propose, lambda: self.log_ns)

    # Log -----------------------------------------------------------------------------------------

    def apply(self, command: cmd.Command) -> Result:
        """Apply a command and write what it gives."""
        self.index += 1
        writes = Writes()
        result = self.machine.apply(self.index, self.log_ns, command, writes)
        for _, block in writes.blocks:
            self.blocks.add(SHARD, block)
            key = keys.large_key(keys.BLOCK, SHARD, block.base_seq)
            self.source.rows[key] = encode_block(block, self.index)
            self.blocks.written(SHARD, block)
        for first_seq in writes.trimmed.values():
            for base_seq in self.blocks.directory(SHARD).drop_below(first_seq):
                del self.source.rows[keys.large_key(keys.BLOCK, SHARD, base_seq)]
            self.shard.notify()
        if writes.dropped:
            self.blocks.forget(SHARD)
            self.shard.notify()
        last_seq = self.machine.counters.last_seq
        if last_seq > self.shard.applied_seq:
            self.shard.applied_seq = last_seq
            self.shard.notify()
        return result

    async def let_pass(self, step_ns: int) -> None:
        """Move log time and the clock of the loop on together."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HandLoop)
        self.log_ns += step_ns
        loop.now_s += step_ns / SECOND_NS
        await loop.quiet()

    def publish(self, *subjects: str, size: int = 1) -> None:
        """Store one message for each subject, in a block."""
        self.apply(append_of([Message(subject, b"x" * size) for subject in subjects]))

    def propose(self, command: cmd.Command) -> asyncio.Future[Result]:
        """The dispatcher's way into the log."""
        if self.refusing:
            raise ApiError(errors.OVERLOADED, applied=False)
        proposal = Proposal(command, asyncio.get_running_loop().create_future())
        self.proposals.append(proposal)
        if not self.late:
            asyncio.get_running_loop().call_soon(self.commit)
        return proposal.future

    def commit(self, count: int = PROPOSALS_MAX) -> None:
        """Apply what was proposed, or the first ``count`` commands of it."""
        while self.proposals and count:
            count -= 1
            proposal = self.proposals.popleft()
            result = self.apply(proposal.command)
            if not proposal.future.done():
                proposal.future.set_result(result)

    def lose(self, kept: int = 0) -> None:
        """Of what was proposed only the first ``kept`` may still be applied, and nobody knows."""
        lost = list(self.proposals)[kept:]
        self.proposals = deque(list(self.proposals)[:kept])
        for proposal in lost:
            fail(proposal, ApiError(errors.OUTCOME_UNKNOWN))

    def refuse_one(self, position: int) -> None:
        """The log does not take the command at ``position``, but those behind it."""
        proposal = self.proposals[position]
        del self.proposals[position]
        fail(proposal, ApiError(errors.NOT_READY, applied=False))

    async def lead_again(self, applied: int = PROPOSALS_MAX, pause: int = 0) -> None:
        """The node leads no longer, and after ``pause`` turns it leads anew.

        Who waits for a command hears that its outcome is unknown; the first ``applied`` of those
        commands went through all the same.
        """
        lost = list(self.proposals)
        self.lose()
        refusing, self.refusing = self.refusing, True
        await turns(pause)
        for proposal in lost[:applied]:
            self.apply(proposal.command)
        self.refusing = refusing
        asyncio.get_running_loop().call_soon(self.dispatcher.new_term)
        await turns()

    # Clients -------------------------------------------------------------------------------------

    async def pull(self, batch: int = 1, expires_s: float = 0, **fields: Any) -> PullResult:
        """Pull through the dispatcher."""
        request = PullRequest(
            stream="S",
            consumer="red",
            batch=batch,
            expires_ns=int(expires_s * SECOND_NS),
            **fields,
        )
        result = await self.dispatcher.pull(request)
        await turns()
        return result

    async def pull_seqs(self, batch: int = 1, **fields: Any) -> list[int]:
        """The sequences that a pull gets."""
        return seqs_of((await self.pull(batch, **fields)).deliveries)

    def waiting_pull(self, batch: int = 1, **fields: Any) -> "asyncio.Task[list[int]]":
        """A pull that waits as long as a test may take."""
        return asyncio.create_task(self.pull_seqs(batch, expires_s=PATIENCE_S, **fields))

    async def record(self) -> None:
        """Have the deliveries so far recorded, without waiting for more to join them."""
        self.dispatcher.flush()
        await turns()

    async def acknowledge(
        self, *seqs: int, kind: AckKind = "ack", delay_s: float = 0
    ) -> asyncio.Future[Result]:
        """Take acknowledgements the way a node does."""
        delay_ns = int(delay_s * SECOND_NS)
        acked, others = list(seqs), []
        if kind != "ack":
            acked, others = [], [(kind, seq, delay_ns) for seq in seqs]
        command = cmd.Acknowledge(1, self.consumer.epoch, acked, others)
        future = self.dispatcher.acknowledge(command)
        future.add_done_callback(partial(self.dispatcher.acknowledged, postponed=True))
        await turns()
        return future

    def reclaim(self) -> None:
        """Drop blocks without a live message, all but the last, and cut the others to theirs."""
        directory, rows = self.blocks.directory(SHARD), self.source.rows
        for span in [directory.span(at) for at in range(len(directory) - 1)]:
            live = np.array([self.machine.is_live(span.base_seq + at) for at in range(span.count)])
            old = self.blocks.load(SHARD, span.base_seq)
            self.blocks.discard(SHARD, span.base_seq)
            del rows[keys.large_key(keys.BLOCK, SHARD, span.base_seq)]
            left = between_live(old, live, gap=2) if live.any() else []
            directory.cut(span.base_seq, [span_of(block) for block in left])
            for block in left:
                key = keys.large_key(keys.BLOCK, SHARD, block.base_seq)
                rows[key] = encode_block(block, 0)

    # Looking -------------------------------------------------------------------------------------

    def wanted(self, from_seq: int = 1) -> list[int]:
        """Live messages that the consumer's filter matches, found one by one."""
        patterns = self.consumer.config.filter_subjects or (">",)
        found = []
        directory = self.blocks.directory(SHARD)
        for position in range(len(directory)):
            block = self.blocks.load(SHARD, directory.span(position).base_seq)
            for at, sid in enumerate(block.subject_ids.tolist()):
                seq = block.base_seq + at
                if seq < from_seq or not self.machine.is_live(seq):
                    continue
                name = self.machine.subjects.name(sid)
                if any(naive_matches(pattern, name) for pattern in patterns):
                    found.append(seq)
        return found


def fail(proposal: Proposal, error: ApiError) -> None:
    """Who waits for the command gets ``error``."""
    if not proposal.future.done():
        proposal.future.set_exception(error)
        proposal.future.exception()  # noted, also where nobody waits


def seqs_of(deliveries: list[Delivery]) -> list[int]:
    """The stream sequences of deliveries."""
    return [delivery.message.seq for delivery in deliveries]


async def wait_until(condition: Callable[[], bool]) -> None:
    """Let everything else run until ``condition`` holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


async def turns(count: int = 10) -> None:
    """Let what is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a scene."""
    asyncio.run(work)


class HandLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock a test moves, so that the same script plays the same every time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    async def quiet(self) -> None:
        """Let the others run until none has anything to do before the clock moves."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # timers that are due become ready in between
        while self._ready:  # type: ignore[attr-defined]
            await asyncio.sleep(0)


def run_by_hand(work: Coroutine[Any, Any, None]) -> None:
    """Run a scene that moves the clock of its loop itself and never waits for it."""
    with asyncio.Runner(loop_factory=HandLoop) as runner:
        runner.run(work)


def new_rig(**fields: Any) -> DispatcherRig:
    """A consumer with a second of ack_wait."""
    return DispatcherRig(consumer_fields={"ack_wait_ns": SECOND_NS, **fields})


def refused_with(spec: ErrorSpec) -> Any:
    return pytest.raises(ApiError, match=spec.name)


def facts(delivery: Delivery) -> tuple[int, int, int, int]:
    return (
        delivery.message.seq,
        delivery.consumer_seq,
        delivery.num_delivered,
        delivery.num_pending,
    )
