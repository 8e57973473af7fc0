"""One stream shard on this node: its machine, what is applied of it, and who waits for more."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import StreamConfig
from contrail_storage.core.key_layout import is_volatile
from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.store.block_store import BlockSpan

Listener = Callable[[], None]


@dataclass(slots=True, eq=False)
class SmallRun:
    """Adjoining small blocks that wait to be merged, with their totals."""

    base_seqs: list[int] = field(default_factory=list)
    bytes: int = 0
    count: int = 0

    def add(self, span: BlockSpan) -> None:
        """One more block at the end."""
        self.base_seqs.append(span.base_seq)
        self.bytes += span.bytes
        self.count += span.count


def volatile_first(shards: "list[Shard]") -> "list[Shard]":
    """Those in memory before the others, so that they have their turn where a log fails."""
    return sorted(shards, key=lambda shard: not shard.volatile)


@dataclass(slots=True, eq=False)
class Shard:
    """Runtime of one shard. Readers see messages up to ``applied_seq``, the last one applied.

    Every live message below ``stay_below`` is one that no age removes; ``oldest`` are the sequence
    and the time of the first other one, when it was last looked for.

    ``damaged`` says what does not read back, whoever met it: from then on nothing new is taken.
    ``stopped``: an entry needed it, and from that one on none is applied.
    """

    machine: StreamMachine
    applied_seq: int
    damaged: str = ""
    stopped: bool = False
    listeners: set[Listener] = field(default_factory=set)
    removal: asyncio.Lock = field(default_factory=asyncio.Lock)
    small_runs: dict[int, SmallRun] = field(default_factory=dict)
    stay_below: int = 0
    oldest: tuple[int, int] = (0, 0)

    @property
    def volatile(self) -> bool:
        """Whether it lives in memory alone."""
        return is_volatile(self.machine.shard)

    @property
    def durability(self) -> str:
        """What the ack of a publish means."""
        return "memory" if self.volatile else "fsync"

    @property
    def config(self) -> StreamConfig:
        """The stream's configuration; STREAM_NOT_FOUND when it was removed meanwhile."""
        if self.machine.record is None:
            raise ApiError(errors.STREAM_NOT_FOUND)
        return self.machine.record.config

    @property
    def name(self) -> str:
        """The stream's name; STREAM_NOT_FOUND when it was removed meanwhile."""
        return self.config.name

    def check_readable(self) -> None:
        """Raise STREAM_NOT_FOUND or DATA_LOST where there is nothing to read any more."""
        if not self.machine.exists:
            raise ApiError(errors.STREAM_NOT_FOUND)
        if self.damaged:
            raise ApiError(errors.DATA_LOST, self.damaged)

    def advance(self, applied_seq: int) -> None:
        """Messages up to ``applied_seq`` are applied: wake who waits for them."""
        if applied_seq > self.applied_seq:
            self.applied_seq = applied_seq
            self.notify()

    def notify(self) -> None:
        """Something that waiting readers or pulls look at has changed."""
        for listener in list(self.listeners):
            listener()

    async def wait_for_change(self, timeout_s: float) -> bool:
        """Wait until the shard changes; False when ``timeout_s`` passed first."""
        loop = asyncio.get_running_loop()
        changed: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not changed.done():
                changed.set_result(None)

        self.listeners.add(wake)
        try:
            async with asyncio.timeout(timeout_s):
                await changed
        except TimeoutError:
            return False
        else:
            return True
        finally:
            self.listeners.discard(wake)


def check_removal(shard: Shard, *, by_subject: bool = False) -> None:
    """Refuse to take messages away where that is not permitted, whether they are there or not.

    Raises STREAM_SEALED or DELETE_DENIED; PURGE_DENIED where they are chosen ``by_subject``.
    """
    config = shard.config
    refusal = None
    if config.sealed:
        refusal = errors.STREAM_SEALED
    elif config.deny_delete:
        refusal = errors.DELETE_DENIED
    elif by_subject and config.deny_purge:
        refusal = errors.PURGE_DENIED
    if refusal is not None:
        raise ApiError(refusal, applied=False)


async def woken(waiter: asyncio.Event, timeout_s: float) -> bool:
    """Wait to be woken; False when ``timeout_s`` passed first."""
    try:
        async with asyncio.timeout(timeout_s):
            await waiter.wait()
    except TimeoutError:
        return False
    # From here on a wake is noted, so that none is missed while the pull looks.
    waiter.clear()
    return True
