"""The Raft groups of a node, and the requests and commits of each.

A node is a member of several groups over one log: the meta group, a group of its own for shards
that are not replicated, and groups that replicate shards. The shards in memory have a group without
a log.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, ValuesView
from functools import partial
from time import perf_counter
from typing import Final, TypeVar, cast

import structlog

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.timings import Timings
from contrail_storage.core.chain import NO_CHAIN
from contrail_storage.replica.applier import Applier, StateDamagedError
from contrail_storage.replica.apply_pace import ApplyPace
from contrail_storage.replica.entries import EntryContext
from contrail_storage.replica.group_time import LOOK_S, GroupTime
from contrail_storage.replica.proposer import Proposer
from contrail_storage.replica.raft_port import (
    SUSPECT,
    Callbacks,
    Committed,
    ComparedGroup,
    Comparison,
    Group,
    no_leader,
)

_APPLIED_S: Final = 5.0
LATELY_S: Final = 0.3
"""Nobody else is elected before a majority has missed the leader for that long."""
_Group = TypeVar("_Group", bound=Group)
_log = structlog.get_logger("contrail.groups")


async def _nothing() -> None:
    return


class NodeTimings:
    """Times from proposal to apply, and of apply itself."""

    def __init__(self) -> None:
        self.commits = Timings()
        self.applies = Timings()

    def applied(self, begun: float, own: EntryContext | None) -> float:
        """Count an entry whose apply began at ``begun``; ``own`` if this node proposed it.

        Returns the seconds that it took.
        """
        now = perf_counter()
        self.applies.add(now - begun)
        if own is not None:
            self.commits.add(now - own.begun)
        return now - begun


class Groups(Mapping[int, Group]):
    """By number: the groups that this node is a member of. Used on the event loop only."""

    def __init__(
        self,
        node_id: str,
        applier: Applier,
        log_time_ns: Callable[[], int],
        on_role: Callable[[int, bool], None],
        fail: Callable[[str], None],
    ) -> None:
        self.node_id = node_id
        """The name of this node as a member."""
        self.proposers: dict[int, Proposer] = {}
        """By group: the queue of its requests."""
        self.planned = 0
        """How many groups the cluster has once all are made; 0 for a node alone."""
        self.timings = NodeTimings()
        self._applier = applier
        # Says when a group may hand out its next entry.
        self._pace = ApplyPace(applier)
        self._log_time_ns = log_time_ns
        # Learns the number of a group that begins (True) or ceases to be led by this node.
        self._on_role = on_role
        # Stops the node, for the reason given, if an entry cannot be applied.
        self._fail = fail
        self.lacks_keys: Callable[[int], bool] = lambda group: False
        """Whether this node has yet to get subject keys of a group from another member."""
        self.before_single: Callable[[], Awaitable[None]] = _nothing
        """Done before this node of a cluster makes a shard of which it has the only copy."""
        self.on_damage: Callable[[int, str], None] = lambda group, reason: None
        """Learns of a replicated group whose state cannot be read, and why."""
        self.failed = False
        """Whether the node is stopping. Then no later entry may be applied."""
        self._groups: dict[int, Group] = {}
        # By number: the log time of groups with other members.
        self._times: dict[int, GroupTime] = {}
        # Of those with other members.
        self._comparisons: dict[int, Comparison] = {}
        # By group: who waits until an entry is applied, and its index.
        self._awaited: dict[int, list[tuple[int, asyncio.Future[None]]]] = {}

    def __getitem__(self, number: int) -> Group:
        return self._groups[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def values(self) -> ValuesView[Group]:
        """The groups; a `Mapping` would look each of them up, at each of 40 ticks a second."""
        return self._groups.values()

    @property
    def busy(self) -> bool:
        """Whether requests are queued, or entries are on their way to the log."""
        return any(one.queued_bytes for one in self.proposers.values()) or any(
            group.outstanding_bytes for group in self._groups.values()
        )

    def close(self) -> None:
        """Refuse all queued and later requests, while entries on their way are applied.

        After a clean stop the log has no other entry, since another release may not read it.
        """
        for proposer in self.proposers.values():
            proposer.close()

    def join(
        self,
        number: int,
        make: Callable[[Callbacks], _Group],
        refusals: tuple[type[Exception], ...],
        busy: tuple[type[Exception], ...] = (),
        time: GroupTime | None = None,
    ) -> tuple[_Group, Proposer]:
        """Take part in a group that ``make`` makes; return it, and the queue of its requests.

        ``refusals`` and ``busy`` are the errors of its `Group.propose`. ``time`` is its log time
        if it has other members (a `ComparedGroup`).
        """
        group = make(
            Callbacks(
                partial(self._commit_compared if time is not None else self._commit, number),
                partial(self._role, number),
                partial(self._lost, number),
                partial(self._replaced, number),
            )
        )
        proposer = Proposer(group, self._log_time_ns, self._applier, refusals, busy=busy)
        if time is not None:
            self._times[number] = time
            proposer.log_time_ns = time.now_ns
            proposer.skipped_ns = lambda: time.skipped_ns
            compared = cast(ComparedGroup, group)
            # A member that was wiped has forgotten its keys as well.
            compared.vote_only_if(lambda: not self.lacks_keys(number))
            self._comparisons[number] = compared.comparison
            compared.comparison.on_differs = partial(self._differs, number)
        self._groups[number], self.proposers[number] = group, proposer
        return group, proposer

    def resume(self) -> None:
        """Hand out entries and propose again: the store has caught up, or has lost its jobs."""
        self._pace.resume()
        for proposer in self.proposers.values():
            proposer.resume()

    # Time ----------------------------------------------------------------------------------------

    def time_ns(self, number: int) -> int:
        """Log time of a group, in nanoseconds."""
        time = self._times.get(number)
        return self._log_time_ns() if time is None else time.now_ns()

    def elapsed_ns(self, number: int) -> int:
        """Elapsed time of a group, in nanoseconds: log time without jumps."""
        time = self._times.get(number)
        return self._log_time_ns() if time is None else time.elapsed_ns()

    def latest_ns(self) -> int:
        """The latest log time of all groups, in nanoseconds."""
        return max([self._log_time_ns(), *(one.now_ns() for one in self._times.values())])

    @property
    def clock_doubts(self) -> dict[int, str]:
        """By group: why the clocks of its members are not used; empty where they are."""
        return {number: one.doubt for number, one in self._times.items() if one.doubt}

    async def follow_clocks(self) -> None:
        """Compare the clocks of the members every second; until cancelled."""
        while self._times:
            await asyncio.sleep(LOOK_S)
            for time in self._times.values():
                time.look()

    # Leading -------------------------------------------------------------------------------------

    def leads(self, number: int) -> bool:
        """Whether this node leads a group."""
        group = self._groups.get(number)
        return group is not None and group.is_leader

    def tells(self, number: int) -> bool:
        """Whether this node tells the events of a group: it leads it, or is alone in it."""
        group = self._groups.get(number)
        return group is None or group.is_alone or group.is_leader

    def check_led(self, number: int, preferred: str = "") -> None:
        """Raise NOT_LEADER for a replicated group unless this node leads it.

        ``preferred`` is the member to name if this node is none. In a group of one, a request finds
        out by itself what fails: reads go on without a leader.
        """
        group = self._groups.get(number)
        if group is None:
            raise no_leader(preferred)
        if not (group.is_alone or group.is_leader):
            raise self.proposers[number].no_leader()

    async def confirm_led(self, number: int) -> None:
        """Wait until what is applied is no older than this call (NOT_LEADER).

        A leader that was cut off or stopped does not know that another one leads, so a majority is
        asked. That takes a round trip; calls that wait together share it.
        """
        confirmed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def done(leads: bool) -> None:
            if not confirmed.done():
                confirmed.set_result(leads)

        self._groups[number].read_index(done)
        if not await confirmed:
            raise self.proposers[number].no_leader()

    async def until_applied(self, number: int, index: int) -> None:
        """Wait until this node has applied the entry ``index`` of a group.

        Raises NOT_READY if that takes long, for example because it has no whole copy.
        """
        if self._groups[number].applied_index >= index:
            return
        applied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._awaited.setdefault(number, [])
        waiting.append((index, applied))
        try:
            async with asyncio.timeout(_APPLIED_S):
                await applied
        except TimeoutError:
            detail = f"this node has not applied entry {index} of group {number}"
            raise ApiError(errors.NOT_READY, detail, retry_after_s=1, applied=False) from None
        finally:
            waiting.remove((index, applied))
            if not waiting and self._awaited.get(number) is waiting:
                del self._awaited[number]

    def _wake(self, number: int) -> None:
        applied_index = self._groups[number].applied_index
        for index, applied in self._awaited.get(number, ()):
            if index <= applied_index and not applied.done():
                applied.set_result(None)

    async def confirm_led_lately(self, number: int) -> None:
        """As :meth:`confirm_led`, but what is applied may be 0.3 s old. Mostly waits for nothing.

        For messages that leave unasked. A node that was stopped or cut off still has messages that
        another leader may have removed since.
        """
        if not self._groups[number].heard_majority_within(LATELY_S):
            await self.confirm_led(number)

    def _commit(self, number: int, entry: Committed) -> bool:
        used_s = 0.0
        own = entry.context if isinstance(entry.context, EntryContext) else None
        # No entry may be skipped: later entries would be applied to a different state.
        if not self.failed:
            begun = perf_counter()
            try:
                self._applier.apply(number, entry.index, entry.term, entry.data, own)
                used_s = self.timings.applied(begun, own)
            except StateDamagedError as error:
                self.on_damage(number, str(error))
                if own is not None:
                    own.unknown()
            except Exception as error:
                _log.exception("entry_not_applied", group=number, index=entry.index)
                self._fail(f"entry {entry.index} of group {number}: {error!r}")
        if own is not None:
            if self.failed:
                own.unknown()
            self.proposers[number].settled(own)
        return self._pace.may_go_on(self._groups[number], used_s)

    def _commit_compared(self, number: int, entry: Committed) -> bool:
        more = self._commit(number, entry)
        if not self.failed:
            self._times[number].note_applied()
            if number in self._awaited:
                self._wake(number)
            if not self._groups[number].flags & SUSPECT:
                digest = self._applier.chains.get(number, NO_CHAIN).digest
                self._comparisons[number].note(entry.index, digest)
        return more

    def _differs(self, number: int, differs: bool) -> None:
        """Accept no requests while nobody knows which replica is right."""
        _log.error("replicas_differ" if differs else "replicas_agree", group=number)
        self.proposers[number].differ(differs)

    def note_installed(self, number: int) -> None:
        """Note that a group has got a state from another member."""
        if number in self._times:
            self._times[number].note_applied()
        self._wake(number)
        if number in self._comparisons:
            digest = self._applier.chains.get(number, NO_CHAIN).digest
            self._comparisons[number].note(self._groups[number].applied_index, digest)

    def _lost(self, number: int, contexts: list[object]) -> None:
        for context in contexts:
            if isinstance(context, EntryContext):
                context.unknown()
                self.proposers[number].settled(context)

    def _replaced(self, number: int, contexts: list[object]) -> None:
        for context in contexts:
            if isinstance(context, EntryContext):
                context.refuse(self.proposers[number].no_leader())
                self.proposers[number].settled(context)

    def _role(self, number: int, leads: bool) -> None:
        time = self._times.get(number)
        if time is not None:
            time.begin_term() if leads else time.end_term()
        if not leads:
            self.proposers[number].fail_all()
        self._on_role(number, leads)
