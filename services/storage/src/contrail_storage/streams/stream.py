"""One stream at run time: the object that requests work with.

A `Stream` refers to the `Shard` objects that the applier keeps. Whatever changes in a shard (its
machine is loaded again, it is damaged, its stream is removed) is therefore visible here at once.
Only `StreamManager.stream` makes these objects. It decides whether a known one is still current.
"""

import asyncio
from functools import partial
from typing import Protocol

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import Replica, StreamConfig, StreamInfo, StreamState
from contrail_link.contract.publish import PublishContent
from contrail_storage.core.key_layout import is_in_memory
from contrail_storage.core.meta_machine import StreamEntry
from contrail_storage.replica.entries import Content, Done, contents_of
from contrail_storage.replica.shard import Shard
from contrail_storage.replica.shard_logs import Append
from contrail_storage.replica.spread import Spread
from contrail_storage.store.block_store import UNREADABLE
from contrail_storage.streams.expectations import Expectations
from contrail_storage.streams.last_ids import LastIds
from contrail_storage.streams.sharded_publish import scatter
from contrail_storage.streams.sharded_state import (
    no_such_shard,
    shard_needed,
    sum_losses,
    sum_states,
)


class CheckServing(Protocol):
    """See `StorageNode.check_serving`."""

    def __call__(self, *, in_memory: bool = False, is_replicated: bool = False) -> None:
        """Raise ApiError while changes are refused."""
        ...


class Stream:
    """A listed stream with its one or more shards. Used on the event loop only."""

    __slots__ = (
        "_appends", "_check_serving", "_expectations", "_groups", "_last_ids", "_node", "_spread",
        "durability", "entry", "groups", "in_memory", "is_replicated", "shards",
    )  # fmt: skip

    def __init__(
        self,
        entry: StreamEntry,
        shards: list[Shard],
        node: str,
        spread: Spread,
        check_serving: CheckServing,
        appends: list[Append],
        last_ids: LastIds,
        expectations: Expectations,
    ) -> None:
        self.entry = entry
        """Its entry in the meta machine. Replaced when its subjects change."""
        self.shards = shards
        """All shards, in order of their numbers; never replaced."""
        self.groups = tuple(dict.fromkeys(shard.group for shard in shards))
        """The groups of the shards, that of the first one first."""
        self.in_memory = is_in_memory(entry.shard_id)
        """Whether the messages are kept only in memory."""
        # Name of this node.
        self._node = node
        self.is_replicated = not spread.groups[shards[0].group].is_alone
        """Whether other nodes have copies of the messages."""
        on_disk = "quorum-fsync" if self.is_replicated else "fsync"
        self.durability = "memory" if self.in_memory else on_disk
        """The guarantee of its publish acks."""
        # Know whether this node leads the groups of the shards, or may serve all of them.
        self._groups = spread.groups
        self._spread = spread
        self._check_serving = check_serving
        # By shard: accepts its messages, and seals them if the stream needs that.
        self._appends = dict(zip(shards, appends, strict=True))
        # Completes refusals of messages that expect a last message id.
        self._last_ids = last_ids
        # Finds what publishes that expect something of a wildcard need to know.
        self._expectations = expectations

    @property
    def exists(self) -> bool:
        """False once the removal of the stream has begun. The first shard decides."""
        return self.shards[0].machine.record is not None

    @property
    def name(self) -> str:
        """The name under which it is listed."""
        return self.entry.name

    @property
    def config(self) -> StreamConfig:
        """The current configuration (STREAM_NOT_FOUND once the stream is removed)."""
        return self.shards[0].config

    def shard(self, number: int | None = None) -> Shard:
        """The shard with that number, damaged or not; INVALID_FIELD if there is none.

        The number may be left out (None) for a stream with one shard.
        """
        count = len(self.shards)
        if number is None:
            if count > 1:
                raise shard_needed(count)
            return self.shards[0]
        if not 0 <= number < count:
            raise no_such_shard(count)
        return self.shards[number]

    def sound_shard(self, number: int | None = None) -> Shard:
        """As :meth:`shard`; DATA_LOST if it is damaged."""
        shard = self.shard(number)
        if shard.damaged:
            raise data_lost(shard)
        return shard

    def sound_shards(self, number: int | None = None) -> list[Shard]:
        """All shards, or the one with that number; DATA_LOST if one of them is damaged."""
        if number is not None:
            return [self.sound_shard(number)]
        for shard in self.shards:
            if shard.damaged:
                raise data_lost(shard)
        return self.shards

    @property
    def is_led(self) -> bool:
        """Whether this node serves the stream: it leads the first shard, and may use the others."""
        return self._spread.is_fresh(self.groups)

    @property
    def leader(self) -> str:
        """Name of the node that serves it; empty while none is known."""
        return self._leader_of(self.shards[0])

    def _leader_of(self, shard: Shard) -> str:
        return self._groups[shard.group].leader if self.is_replicated else self._node

    async def confirm_led(self, number: int | None = None) -> None:
        """Wait until what can be read is no older than this call (NOT_LEADER).

        With ``number``, only what can be read of that shard.
        """
        if len(self.groups) == 1:
            await self._groups.confirm_led(self.groups[0])
            return
        self.check_led()
        groups = self.groups if number is None else {self.groups[0], self.shard(number).group}
        await self._spread.confirm(groups)

    def staleness_s(self) -> float:
        """Seconds since this copy had everything that was acknowledged; inf if that is unknown."""
        return max(self._groups[one].staleness_s() for one in self.groups)

    def check_led(self) -> None:
        """Raise NOT_LEADER if the stream is replicated and another node serves it."""
        if len(self.groups) > 1:
            self._spread.check(self.groups)
        else:
            self._groups.check_led(self.groups[0])

    def check_writable(self) -> None:
        """Raise ApiError while the stream accepts no changes."""
        self.check_led()
        self._check_serving(in_memory=self.in_memory, is_replicated=self.is_replicated)

    def publish(self, content: PublishContent, done: Done) -> None:
        """Store messages; see ``StorageLink.publish_then``.

        ``done`` is called in a later turn of the event loop. Raises ApiError at once if the request
        is certainly not stored.
        """
        first = self.shards[0]
        alone = len(self.shards) == 1
        try:
            if alone and first.damaged:
                raise data_lost(first)
            self._check_serving(in_memory=self.in_memory, is_replicated=self.is_replicated)
        except ApiError:
            # Only the node that serves the stream may refuse for good: others may be sound.
            self.check_led()
            raise
        count = len(content) if isinstance(content, list) else content.count
        if not count:
            asyncio.get_running_loop().call_soon(done, [])
            return
        messages: Content
        if count == 1 and isinstance(content, list):
            [messages] = content
        else:
            messages, done = contents_of(content, done)
        if alone:
            self._append(first, messages, done)
        else:
            scatter(self.shards, messages, self._check_shard, self._send, done)

    def _check_shard(self, shard: Shard) -> None:
        """Raise NOT_LEADER unless this node accepts messages for a shard."""
        self._groups.check_led(shard.group)

    async def confirm_shard(self, number: int) -> None:
        """As :meth:`confirm_led`, if this node leads a shard, whoever leads the others."""
        group = self.shard(number).group
        self._groups.check_led(group)
        await self._groups.confirm_led(group)

    def _send(self, shard: Shard, content: Content, done: Done) -> None:
        """Send messages to one of the shards (DATA_LOST)."""
        if shard.damaged:
            raise data_lost(shard)
        self._append(shard, content, done)

    def _append(self, shard: Shard, content: Content, done: Done) -> None:
        if content.expected:
            done = partial(self._last_ids.complete, shard, done)
        append = self._appends[shard]
        if shard.publishes_wait or content.expected:
            self._expectations.propose(shard, content, done, append)
        else:
            append(shard.machine.shard_id, content, done)

    def info(self, *, damaged: bool = False) -> StreamInfo:
        """Configuration and state.

        Raises DATA_LOST when a first message cannot be read. With ``damaged``, a damaged stream is
        shown with what is known, without the time of its first message.
        """
        record = self.shards[0].machine.record
        assert record is not None
        states = [shard_state(shard, damaged=damaged) for shard in self.shards]
        several = len(states) > 1
        if len(self.groups) > 1:
            led = zip(states, map(self._leader_of, self.shards), strict=True)
            states = [msgspec.structs.replace(state, leader=leader) for state, leader in led]
        losses = [shard.machine.loss for shard in self.shards]
        return StreamInfo(
            config=record.config,
            created_ns=record.created_ns,
            state=sum_states(states) if several else states[0],
            shards=states if several else [],
            incarnation=record.incarnation,
            version=record.version,
            leader=self.leader,
            durability=self.durability,
            data_loss=sum_losses(losses) if several else losses[0],
            replicas=self._replicas(),
        )

    def _replicas(self) -> list[Replica]:
        """The other copies; empty on a node that does not lead."""
        if not self.is_replicated:
            return []
        peers = self._groups[self.shards[0].group].report().peers
        return [Replica(one.name, one.current, one.offline, one.lag) for one in peers]


def data_lost(shard: Shard) -> ApiError:
    """The refusal of a request that needs a damaged shard."""
    return ApiError(errors.DATA_LOST, shard.damaged, applied=False)


def shard_state(shard: Shard, *, damaged: bool = False) -> StreamState:
    """State of a shard that exists; see :meth:`Stream.info`."""
    try:
        return shard.machine.state(timed=not (damaged and shard.damaged))
    except UNREADABLE as error:
        shard.damaged = f"the first message cannot be read back: {error}"
        if not damaged:
            raise ApiError(errors.DATA_LOST, shard.damaged) from error
        return shard.machine.state(timed=False)
