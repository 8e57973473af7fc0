"""One stream shard on this node: its machine, its applied sequence, and who waits for changes."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import StreamConfig
from contrail_storage.core.key_layout import SHARD_GROUP, is_in_memory
from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.replica.raft_port import no_leader
from contrail_storage.store.block_store import BlockSpan

Listener = Callable[[], None]
Mend = Callable[["Shard", int], Awaitable[bool]]
"""Replaces the block at a base sequence, which cannot be read, by what another node has.

True if the block is to be read again: it may also have been merged or removed meanwhile.
"""


@dataclass(slots=True, eq=False)
class SmallRun:
    """Adjoining small blocks that wait to be merged, with their totals."""

    base_seqs: list[int] = field(default_factory=list)
    bytes: int = 0
    count: int = 0

    def add(self, span: BlockSpan) -> None:
        """Add one more block at the end."""
        self.base_seqs.append(span.base_seq)
        self.bytes += span.bytes
        self.count += span.count


async def not_mended(shard: "Shard", base_seq: int) -> bool:
    """The `Mend` of a node that is alone."""
    del shard, base_seq
    return False


def in_memory_first(shards: "list[Shard]") -> "list[Shard]":
    """Sort shards in memory first, so that their work is done even if a log fails."""
    return sorted(shards, key=lambda shard: not shard.in_memory)


@dataclass(slots=True, eq=False)
class Shard:
    """Runtime of one shard, used on the event loop only."""

    machine: StreamMachine
    applied_seq: int
    """Sequence of the last applied message. Readers see messages up to here."""
    group: int = SHARD_GROUP
    """The group whose log has its entries."""
    damaged: str = ""
    """The damage, as a sentence; empty without any. A damaged shard accepts no writes."""
    stopped: bool = False
    """Whether an entry needed damaged messages. That entry and all later ones are not applied."""
    away: bool = False
    """Whether the shard has no state, until this node has fetched that of the leader."""
    listeners: dict[Listener, None] = field(default_factory=dict)
    """Called after each change that a waiting reader or pull may be interested in.

    Only those that wait are here, so that a change costs nothing while nobody waits.
    """
    removal: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while messages are removed by subject, so that no two search for the same ones."""
    small_runs: dict[int, SmallRun] = field(default_factory=dict)
    """By level of merging: the small blocks at the end that wait to be merged."""
    publishes_wait: bool = False
    """Whether publishes wait for a proof, so that all later ones must wait too."""
    stay_below: int = 0
    """No live message below this sequence is ever removed for its age."""
    oldest: tuple[int, int] = (0, 0)
    """Sequence and time of the first other message, as of the last look; (0, 0) before that.

    All later messages have this time or a later one.
    """

    @property
    def in_memory(self) -> bool:
        """Whether the shard is in memory only."""
        return is_in_memory(self.machine.shard_id)

    @property
    def config(self) -> StreamConfig:
        """The stream's configuration.

        STREAM_NOT_FOUND when the stream has been removed, NOT_LEADER without a state.
        """
        if self.away:
            raise no_leader("")
        if self.machine.record is None:
            raise ApiError(errors.STREAM_NOT_FOUND)
        return self.machine.record.config

    @property
    def name(self) -> str:
        """The stream's name; STREAM_NOT_FOUND when the stream has been removed."""
        return self.config.name

    def check_readable(self) -> None:
        """Raise as :attr:`config`, or DATA_LOST if it is damaged."""
        if self.away:
            raise no_leader("")
        if not self.machine.exists:
            raise ApiError(errors.STREAM_NOT_FOUND)
        if self.damaged:
            raise ApiError(errors.DATA_LOST, self.damaged)

    def notify(self) -> None:
        """Call the listeners: something has changed that waiting readers or pulls look at."""
        # A copy: a listener may remove itself.
        for listener in list(self.listeners):
            listener()

    async def wait_for_change(self, timeout_s: float) -> bool:
        """Wait until the shard changes; False when ``timeout_s`` passed first."""
        loop = asyncio.get_running_loop()
        changed: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not changed.done():
                changed.set_result(None)

        self.listeners[wake] = None
        try:
            async with asyncio.timeout(timeout_s):
                await changed
        except TimeoutError:
            return False
        else:
            return True
        finally:
            self.listeners.pop(wake, None)


def check_removal(shard: Shard, *, by_subject: bool = False) -> None:
    """Refuse to remove messages where the stream does not permit it, even if there are none.

    Raises STREAM_SEALED or DELETE_DENIED; PURGE_DENIED if they are chosen ``by_subject``.
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
    """Wait for a wake; False when ``timeout_s`` passed first."""
    try:
        async with asyncio.timeout(timeout_s):
            await waiter.wait()
    except TimeoutError:
        return False
    # Cleared before the caller looks: a wake that comes while it looks is kept for the next wait.
    waiter.clear()
    return True
