"""A block that does not read back is never a result: its shard stands still before the command.

Nothing of the command is stored, whoever waits for it or for what follows is told that the outcome
is unknown, and the other shards of the same entry go on.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage, StreamConfig
from contrail_link.contract.publish import PubResult
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.commands import Entry
from contrail_storage.core.entry_codec import encode_entry
from contrail_storage.core.meta_machine import MetaMachine
from contrail_storage.core.results import Done, Refused
from contrail_storage.replica.advisories import AdvisoryHub
from contrail_storage.replica.applier import Applier
from contrail_storage.replica.entries import AppendRequest, EntryContext, Outcome, Waiter
from contrail_storage.replica.loading import load_shard, stored_shards
from contrail_storage.replica.store_writer import StoreWriter, WriteJob
from contrail_storage.store.block_store import BlockStore
from contrail_storage.store.rocks_store import StoreFailedError, StoreStalledError
from tests.support.each import each
from tests.unit.storage.machine_rig import (
    SHARD,
    Message,
    RowStore,
    append_of,
    configure,
    consumer_config,
)

OTHER = SHARD + 1
SECOND_NS = 1_000_000_000
BLOCKS = 3
BLOCK_MESSAGES = 10
LAST_SEQ = BLOCKS * BLOCK_MESSAGES


class RottingStore(RowStore):
    """Rows, of which some do not read back any more."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: set[bytes] = set()

    def get_once(self, wanted: Sequence[bytes]) -> list[bytes | None]:
        if self.failing.intersection(wanted):
            raise StoreFailedError("IO error: While pread: Input/output error")
        return [self.rows.get(key) for key in wanted]

    get_unverified = get_once

    def of_shard(self, number: int) -> dict[bytes, bytes]:
        """All rows of a shard."""
        prefix = number.to_bytes(4, "big")
        return {key: row for key, row in self.rows.items() if key[1:5] == prefix}


class ApplierRig:
    """An applier that writes each entry at once, with a log time of a second an entry."""

    def __init__(self) -> None:
        self.store = RottingStore()
        self.blocks = BlockStore(self.store, cache_bytes=0)  # type: ignore[arg-type]
        self.writer = StoreWriter(
            self.store,  # type: ignore[arg-type]
            StoreStalledError,
            lambda _: None,
            lambda _: None,
        )
        self.applier = Applier(
            MetaMachine(), self.blocks, self.writer, lambda: None, AdvisoryHub(), sink=self
        )
        self.stopped: list[int] = []
        self.applier.on_stopped = lambda shard: self.stopped.append(shard.machine.shard_id)
        self.index = 0

    def put(self, job: WriteJob) -> None:
        assert self.writer.write_now([job])
        for number, block, _ in job.blocks:
            self.blocks.written(number, block)

    def flush(self) -> None:
        """Nothing is held."""

    def apply(self, *commands: tuple[int, cmd.Command]) -> list[Any]:
        """Apply an entry; answers the result of each command, or the error that its caller gets."""
        self.index += 1
        entry = Entry(self.index * SECOND_NS, list(commands))
        answers: list[Any] = [None] * len(commands)
        waiters: list[Waiter] = []
        for at, (number, command) in enumerate(commands):
            if isinstance(command, cmd.Append):

                def done(outcome: Outcome, at: int = at) -> None:
                    answers[at] = outcome

                count = command.columns.count
                message = PublishMessage("a", None, b"")
                waiters.append([AppendRequest(number, message, done, count, size=0)])
            else:
                future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                waiters.append(future)
                answers[at] = future
        context = EntryContext(entry, waiters, messages=0)
        self.applier.apply(1, self.index, 1, encode_entry(entry), context)
        return [_answer(one) for one in answers]

    def run(self, *commands: cmd.Command) -> None:
        """Apply commands of the shard, an entry each."""
        for command in commands:
            self.apply((SHARD, command))

    def rot(self, how: str = "rot") -> None:
        """The first block does not read back: other bytes, an error of the disk, or no entry."""
        key = keys.large_key(keys.BLOCK, SHARD, 1)
        if how == "disk error":
            self.store.failing.add(key)
        elif how == "no such block":
            self.blocks.directory(SHARD).drop_below(BLOCK_MESSAGES + 1)
        else:
            self.store.rows[key] = self.store.rows[key][:-1] + b"\xff"


def _answer(one: Any) -> Any:
    if not isinstance(one, asyncio.Future):
        return one
    return one.exception() or one.result()


def messages(*, size: int = 10, subjects: int = 5, **fields: Any) -> list[Message]:
    return [Message(f"a.{at % subjects}", b"x" * size, **fields) for at in range(BLOCK_MESSAGES)]


ONE = append_of([Message("a.0", b"x" * 10)])
SEQS = list(range(1, LAST_SEQ + 1))


def acked(**fields: Any) -> list[cmd.Command]:
    """A consumer that was given all messages."""
    config = consumer_config("red", max_ack_pending=-1, **fields)
    return [cmd.PutConsumer(config, 1), cmd.Deliver(1, 1, SEQS, LAST_SEQ + 1)]


def stream(**fields: Any) -> StreamConfig:
    return StreamConfig(name="S", subjects=("a.*",), **fields)


CASES: dict[str, tuple[StreamConfig, list[cmd.Command], cmd.Command]] = {
    "messages over the limit": (stream(max_msgs=LAST_SEQ), [], ONE),
    "bytes over the limit": (stream(max_bytes=LAST_SEQ * 10 + 5), [], ONE),
    "messages of a subject over the limit": (stream(max_msgs_per_subject=6), [], ONE),
    "several with ids": (
        stream(max_msgs=LAST_SEQ),
        [],
        append_of(messages(msg_id="one")[:1] + messages(ttl_ns=5)[1:]),
    ),
    "roll-up of a subject": (
        stream(allow_rollup_hdrs=True),
        [],
        append_of([Message("a.0", rollup="sub")]),
    ),
    "age": (stream(max_age_ns=SECOND_NS), [], cmd.ExpireAge(100)),
    "single ages": (
        stream(max_age_ns=SECOND_NS),
        [],
        cmd.Expire(np.array([2, 12], np.int64).tobytes(), b"", b""),
    ),
    "purge below": (stream(), [], cmd.Trim(15, 100)),
    "delete": (stream(), [], cmd.DeleteMessage(2)),
    "lowered limits": (stream(), [configure(stream(max_msgs=3))], cmd.EnforceLimits(100)),
    "ack of a work queue": (
        stream(retention="workqueue"),
        acked(),
        cmd.Acknowledge(1, 1, [25, 2], [("term", 3, 0)]),
    ),
    "ack of interest": (
        stream(retention="interest"),
        [cmd.Deliver(2, 1, SEQS, LAST_SEQ + 1)],
        cmd.Acknowledge(1, 1, [25, 2]),
    ),
    "delivery without acks": (
        stream(retention="interest"),
        [cmd.Acknowledge(1, 1, SEQS)],
        cmd.Deliver(2, 1, SEQS, LAST_SEQ + 1),
    ),
    "interest that went": (
        stream(retention="interest"),
        [cmd.Deliver(2, 1, SEQS, LAST_SEQ + 1), cmd.DropConsumer(1)],
        cmd.EnforceInterest(100),
    ),
}


def rig_of(config: StreamConfig, prepared: list[cmd.Command]) -> ApplierRig:
    """Two shards, the first with three blocks."""
    rig = ApplierRig()
    rig.apply((OTHER, configure(StreamConfig(name="T", subjects=("t",)))))
    rig.run(configure(config))
    if config.retention == "interest":
        rig.run(
            cmd.PutConsumer(consumer_config("red", max_ack_pending=-1), 1),
            cmd.PutConsumer(consumer_config("bare", ack_policy="none"), 1),
        )
    rig.run(*[append_of(messages()) for _ in range(BLOCKS)])
    if config.retention == "interest":
        rig.run(cmd.Deliver(1, 1, SEQS, LAST_SEQ + 1))
    rig.run(*prepared)
    return rig


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def is_unknown(answer: Any) -> bool:
    """Whether a caller was told that nobody knows what became of its request."""
    if isinstance(answer, ApiError):
        return answer.spec is errors.OUTCOME_UNKNOWN and answer.applied is None
    return {result.code for result in answer} == {errors.OUTCOME_UNKNOWN.code}


@each("how", ["rot", "disk error", "no such block"])
@each("name", CASES)
def test_command_that_needs_a_rotten_block_leaves_the_shard_as_it_was(name: str, how: str) -> None:
    config, prepared, command = CASES[name]

    async def scene() -> None:
        rig = rig_of(config, prepared)
        before = rig.store.of_shard(SHARD)
        state = rig.applier.shards[SHARD].machine.counters.messages
        rig.rot(how)
        rotten = rig.store.of_shard(SHARD)
        other = append_of([Message("t", b"y")])
        answers = rig.apply((OTHER, other), (SHARD, command), (OTHER, other), (SHARD, ONE))
        assert answers[0] == [PubResult(1)]
        assert answers[2] == [PubResult(2)]
        assert is_unknown(answers[1])
        assert is_unknown(answers[3])
        stopped = keys.shard_key(keys.STOPPED, SHARD)
        after = rig.store.of_shard(SHARD)
        reason = rig.applier.shards[SHARD].damaged
        assert "cannot be read back" in reason
        # Rot stays what it is; a disk may read again, so that the next start tries it.
        kept = "" if how == "disk error" else reason
        assert after.pop(stopped, b"").decode() == kept
        assert after == rotten
        assert rig.stopped == [SHARD]
        assert list(stored_shards(rig.applier)) == [OTHER]
        assert is_unknown(rig.apply((SHARD, ONE))[0])
        rig.store.rows.update(before)
        rig.store.failing.clear()
        loaded = load_shard(rig.store.scan, SHARD, BlockStore(rig.store))  # type: ignore[arg-type]
        assert (loaded.damaged, loaded.stopped) == (kept, bool(kept))
        assert loaded.machine.counters.messages == state
        assert loaded.machine.counters.last_seq == LAST_SEQ
        assert rig.stopped == [SHARD]
        # Its stream can be removed, and then nothing of it is left.
        assert rig.apply((SHARD, cmd.DropStream())) == [Done()]
        assert rig.store.of_shard(SHARD) == {}

    run(scene())


@each("name", CASES)
def test_the_same_command_is_carried_out_where_the_block_reads_back(name: str) -> None:
    config, prepared, command = CASES[name]

    async def scene() -> None:
        rig = rig_of(config, prepared)
        counters = rig.applier.shards[SHARD].machine.counters
        before, last_seq = counters.messages, counters.last_seq
        [answer] = rig.apply((SHARD, command))
        assert not isinstance(answer, ApiError | Refused)
        assert counters.messages < before + counters.last_seq - last_seq
        assert rig.stopped == []

    run(scene())


def test_what_an_entry_did_before_the_shard_stopped_is_kept() -> None:
    async def scene() -> None:
        rig = rig_of(stream(), [])
        rig.rot()
        fine, broken = cmd.DeleteMessage(12), cmd.DeleteMessage(2)
        answers = rig.apply((SHARD, ONE), (SHARD, fine), (SHARD, broken), (SHARD, ONE))
        assert answers[0] == [PubResult(LAST_SEQ + 1)]
        assert is_unknown(answers[2])
        loaded = load_shard(rig.store.scan, SHARD, BlockStore(rig.store))  # type: ignore[arg-type]
        counters = loaded.machine.counters
        assert (counters.last_seq, counters.messages) == (LAST_SEQ + 1, LAST_SEQ)
        assert not loaded.machine.is_live(12)

    run(scene())


def test_damage_that_a_reader_met_is_no_result_either() -> None:
    async def scene() -> None:
        rig = rig_of(stream(), [])
        rig.applier.shards[SHARD].damaged = "block 1: the checksum does not match"
        # It was on its way when the reader met it; all that comes new is refused before the log.
        assert rig.apply((SHARD, ONE)) == [[PubResult(LAST_SEQ + 1)]]
        assert list(stored_shards(rig.applier)) == [OTHER, SHARD]

    run(scene())
