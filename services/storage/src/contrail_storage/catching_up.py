"""How a member of a replicated group gets a whole state again.

A member is suspect if its state is damaged, or if the leader's log no longer has the entries that
it needs. Then it applies nothing, answers nothing, and leads only to hand on. It fetches the state
of the group from the leader, replaces its own by it, and goes on with the log.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
from msgspec.structs import replace

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_storage.core import key_layout as keys
from contrail_storage.core.chain import entry_of, is_installed
from contrail_storage.core.key_layout import META_GROUP
from contrail_storage.disk.node_file import save_identity
from contrail_storage.disk.whole_steps import whole
from contrail_storage.options import Cluster
from contrail_storage.replica.raft_port import SUSPECT, no_leader
from contrail_storage.replica.shard import Shard
from contrail_storage.state.fetching import Fetching
from contrail_storage.state.install import InstallCounts, Installer
from contrail_storage.state.mending import MendCounts, Mending
from contrail_storage.state.messages import (
    Close,
    GetKeys,
    Offer,
    Open,
    OpenBlocks,
    Opened,
    PutKeys,
    Read,
    decoder,
)
from contrail_storage.state.rows import BrokenStateError
from contrail_storage.state.source import BlockRange, SourceCounts, StateSource
from contrail_storage.store.store_errors import StoreError, StoreFailedError
from contrail_storage.upkeep.backoff import Backoff

if TYPE_CHECKING:
    from contrail_storage.node import StorageNode

_LOOK_S: Final = 0.5
_AGAIN_S: Final = 0.25
_AGAIN_MAX_S: Final = 30.0
_log = structlog.get_logger("contrail.state")


class CatchingUp:
    """The suspect groups of one node, and the states that others read from it.

    Used on the event loop, apart from :meth:`prepare`.
    """

    source: StateSource
    installer: Installer

    def __init__(self, node: "StorageNode", cluster: Cluster | None) -> None:
        self.meta_known = asyncio.Event()
        """Set once the meta machine has a state; at once unless its rows could not be read."""
        self.mended = ""
        """Which damaged parts of the folder were set aside at the start, and why."""
        self._node = node
        self._cluster = cluster
        node.applier.is_replicated = self.is_replicated
        node.groups.on_damage = self.suspect
        node.groups.before_single = self._note_unreplicated
        node.reader.mend = self.mend
        self.installs, self.sent = InstallCounts(), SourceCounts()
        self.fetching = Fetching(cluster.fetch) if cluster is not None else None
        """How this node gets rows of others, if there are any."""
        self.mends = MendCounts()
        # Groups that are suspect as of the start, or whose damage it found.
        self._found: set[int] = set()
        # By group: the entry after which the log begins again, because a crash came in between.
        self._begin_again: dict[int, tuple[int, int]] = {}
        # Set when a group becomes suspect.
        self._wake = asyncio.Event()
        # By group: how long to wait after failures, and until when (loop time, s).
        self._pauses: dict[int, tuple[Backoff, float]] = {}

    def is_suspect(self, number: int) -> bool:
        """Whether a group has no whole state."""
        group = self._node.groups.get(number)
        return number in self._found if group is None else bool(group.flags & SUSPECT)

    # Opening -------------------------------------------------------------------------------------

    def is_replicated(self, number: int) -> bool:
        """Whether other nodes have the state of a group too."""
        own = self._node.membership.own_group
        return self._cluster is not None and number != own and not keys.is_in_memory(number)

    @property
    def suspects(self) -> frozenset[int]:
        """The groups without a whole state."""
        return frozenset(filter(self.is_suspect, {*self._node.groups, *self._found}))

    def prepare(self, rows: Mapping[int, bytes]) -> frozenset[int]:
        """Take up what the log says of members, once it is read; return the suspect groups.

        ``rows`` are those of the applied indexes.
        """
        held = self._node.log.recovery.groups
        self._found = {number for number, group in held.items() if group.flags & SUSPECT}
        for number in self._found:
            group, row = held[number], rows.get(number, b"")
            index, term = entry_of(row) if row else (0, 0)
            ends_before = group.base_index < index or (
                group.base_index == index and group.base_term != term
            )
            if is_installed(row) and ends_before:
                # The crash came after the whole state was stored, and before the log began again.
                group.base_index, group.base_term = self._begin_again[number] = index, term
                group.entries.clear()
        return frozenset(self._found)

    def add_damaged(self, numbers: frozenset[int]) -> None:
        """Note the groups whose stored state is damaged, and from where suspect ones go on."""
        node = self._node
        self._found |= numbers
        for number in self._found:
            group = node.log.recovery.groups.get(number)
            if group is not None:
                index = node.applier.written_indexes.get(number, 0)
                within = min(max(index, group.base_index), group.last_index)
                node.applier.written_indexes[number] = within

    @property
    def has_unreplicated(self) -> bool:
        """Whether this folder has shards that no other node has, or may have."""
        own, node = self._node.membership.own_group, self._node
        logged = node.log.recovery.groups.get(own)
        return (
            self._cluster is None
            or any(shard.group == own for shard in node.applier.shards.values())
            or (logged is not None and any(data for data, _, _ in logged.entries))
        )

    async def _note_unreplicated(self) -> None:
        """Record that the folder will have something that other nodes cannot replace."""
        node = self._node
        if not node.identity.has_unreplicated:
            identity = replace(node.identity, has_unreplicated=True)
            try:
                await whole(lambda: save_identity(node.files, node.options.data_dir, identity))
            except OSError as error:
                raise ApiError(errors.STORAGE_FAILED, str(error), applied=False) from error
            node.identity = identity

    # Running -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin, once the log accepts records, and before the groups start."""
        node = self._node
        for number, (index, term) in self._begin_again.items():
            node.log.reset(number, index, term)
        if META_GROUP not in self._found or node.meta.group_table.groups:
            self.meta_known.set()
        for number in self._found:
            if number in node.groups:
                self.suspect(number, "it was at the last stop, or cannot be read")
        self.source = StateSource(
            node.parts[0], node.log, self._until_applied, self.suspect, self.sent
        )
        if self.fetching is not None:
            member = node.membership.node_id
            self._mending = Mending(
                member,
                node.blocks,
                node.applier,
                self.fetching,
                node.groups.until_applied,
                self.mends,
            )
            self.installer = Installer(
                member,
                node.parts[0],
                node.blocks,
                node.applier,
                self._until_idle,
                self.fetching,
                self.installs,
            )
            self.installer.on_shown = node.key_sharing.shown
            node.spawn(self._keep_whole())
            node.spawn(self._keep_offering())

    def joined(self, number: int) -> None:
        """Note that the node takes part in a group, which has not started."""
        if number in self._found and self._node.begun:
            self.suspect(number, "it cannot be read")

    def suspect(self, number: int, reason: str) -> None:
        """Give up the state of a replicated group; nothing is read from it or applied any more."""
        group = self._node.groups[number]
        if group.is_alone:
            return
        if not group.flags & SUSPECT:
            _log.error("member_suspect", group=number, reason=reason)
        with suppress(OSError):  # the log has failed; `_keep_whole` repeats it
            group.mark_suspect(True)
        self._node.membership.spread.lose(number)
        self._found.add(number)
        self._wake.set()

    async def mend(self, shard: Shard, base_seq: int) -> bool:
        """Get a block that cannot be read from another member; see `Mend`."""
        node, number = self._node, shard.group
        group = node.groups.get(number)
        if group is None or group.is_alone or group.flags & SUSPECT or node.failure:
            return False
        members, me = node.membership.members_of(number), node.membership.node_id
        # The leader has everything that was acknowledged.
        peers = sorted((one for one in members if one != me), key=lambda one: one != group.leader)
        return await self._mending.mend(shard, base_seq, peers)

    async def _until_applied(self, number: int) -> None:
        """Wait until the store has what a group has applied (OVERLOADED)."""
        node = self._node
        index = node.groups[number].applied_index
        node.applier.flush()
        while node.applier.written_indexes.get(number, 0) < index:
            if node.healing.store_failure or self.is_suspect(number):
                raise ApiError(errors.OVERLOADED, node.failure, retry_after_s=1)
            await node.write_noted()

    async def _until_idle(self) -> None:
        """Wait until nothing that was applied is on its way to the store."""
        node = self._node
        node.applier.flush()
        queued = node.writer.submitted
        while node.writer.settled < queued:
            await node.write_noted()

    # Of this member ------------------------------------------------------------------------------

    async def _keep_whole(self) -> None:
        while True:
            self._notice_damage()
            await self._try_all()
            await self.source.end_old()
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._wake.wait()

    def _notice_damage(self) -> None:
        """Give up what readers or the scrub found damaged, if another member may be whole."""
        groups = self._node.groups
        damaged = {
            shard.group: shard.damaged
            for shard in self._node.applier.shards.values()
            if shard.damaged and self.is_replicated(shard.group) and shard.group in groups
        }
        for number, reason in damaged.items():
            group = groups[number]
            if not group.flags & SUSPECT and (not group.is_leader or group.may_hand_over):
                self.suspect(number, reason)

    async def _try_all(self) -> None:
        groups = self._node.groups
        # Also those that the comparison of digests has marked.
        for number in sorted({*self.suspects, *self._found}):
            wanted = number in self._found or groups[number].flags_are_durable
            if number in groups and wanted:
                await self._try(number)
            if number == META_GROUP and self.is_suspect(number):
                return  # the others need what the meta machine knows

    async def _try(self, number: int) -> None:
        """Install the leader's state, unless that is not possible now."""
        node, group = self._node, self._node.groups[number]
        node.membership.spread.lose(number)
        if not group.flags & SUSPECT:
            with suppress(OSError):
                group.mark_suspect(True)
        loop = asyncio.get_running_loop()
        backoff, due_s = self._pauses.setdefault(
            number, (Backoff(_AGAIN_S, _AGAIN_MAX_S), loop.time())
        )
        leader = group.leader
        if leader in ("", node.membership.node_id) or node.failure or loop.time() < due_s:
            return
        try:
            if number != META_GROUP:
                # The leader may have bytes that this node has erased.
                await node.eraser.erasures.reopen()
            done = await self.installer.install(number, group, leader)
        except StoreFailedError as error:
            node.healing.fail_store(error)
        except (ApiError, BrokenStateError, StoreError, OSError, msgspec.DecodeError) as error:
            self.installs.failed += 1
            if backoff.failed(str(error)):
                _log.warning("state_not_installed", group=number, reason=str(error))
        except Exception:
            # Whatever a leader sends must not end this node.
            self.installs.failed += 1
            backoff.failed("an error")
            _log.exception("state_not_installed", group=number)
        else:
            if done:
                del self._pauses[number]
                self._found.discard(number)
                self._installed(number)
                return
        self._pauses[number] = backoff, loop.time() + backoff.pause_s

    def _installed(self, number: int) -> None:
        self._node.groups.note_installed(number)
        if number == META_GROUP:
            self.meta_known.set()
            self._node.membership.reconcile_soon()
            self._node.eraser.erasures.changed()

    # For other members ---------------------------------------------------------------------------

    async def _keep_offering(self) -> None:
        """Tell members that need what the log no longer has to fetch the state."""
        node, me = self._node, self._node.membership.node_id
        while True:
            offers = [
                (peer, Offer(number, me, node.log.base_index(number)))
                for number, group in node.logged_groups.items()
                if not group.is_alone
                for peer in group.lagging
            ]
            await asyncio.gather(*(self._offer(peer, offer) for peer, offer in offers))
            await asyncio.sleep(_LOOK_S)

    async def _offer(self, peer: str, offer: Offer) -> None:
        assert self._cluster is not None
        with suppress(ApiError):  # offered again soon, if it is still needed
            await self._cluster.fetch(peer, msgspec.msgpack.encode(offer))

    async def provide(self, body: bytes) -> bytes:
        """Answer another node (NOT_LEADER, NOT_READY, and what `StateSource` raises)."""
        request = decoder.decode(body)
        if not hasattr(self, "source"):
            raise ApiError(errors.NOT_READY, "the node starts", retry_after_s=1)
        match request:
            case Offer():
                self._offered(request)
            case Open():
                self._check_whole(request.group)
                opened = await self.source.open(request.group, request.member)
                return msgspec.msgpack.encode(opened)
            case OpenBlocks():
                opened = await self._open_blocks(request)
                return msgspec.msgpack.encode(opened)
            case Read():
                return await self.source.read(request.number, request.piece)
            case Close():
                await self.source.close(request.number)
            case PutKeys() | GetKeys():
                return await self._node.key_sharing.answer(request)
        return b""

    def _check_whole(self, number: int) -> None:
        """Raise NOT_LEADER unless this node has won the election of a group, and is whole.

        It may not have committed anything in its term: perhaps only the member that asks can
        complete a majority. What is applied is committed in any case.
        """
        group = self._node.groups.get(number)
        if group is None or group.flags or group.leader != self._node.membership.node_id:
            raise no_leader("" if group is None else group.leader)

    async def _open_blocks(self, request: OpenBlocks) -> Opened:
        """Begin to read some blocks; any whole member may be asked for them."""
        group = self._node.groups.get(request.group)
        if group is None or group.flags:
            raise no_leader("" if group is None else group.leader)
        directory = self._node.blocks.directory(request.shard)
        position = directory.position(request.first_seq)
        low_seq = directory.base_seq(position) if position < len(directory) else request.end_seq
        blocks = BlockRange(request.shard, low_seq, request.end_seq)
        return await self.source.open(request.group, request.member, blocks)

    def _offered(self, offer: Offer) -> None:
        """Take the state of the leader if this member cannot go on without it."""
        group = self._node.groups.get(offer.group)
        if group is None or group.is_alone or group.flags & SUSPECT:
            return
        # An offer may be late: this member may have got what it lacked.
        if group.leader == offer.leader and group.applied_index < offer.base_index:
            self.suspect(offer.group, "the log of the leader begins after what is applied")
