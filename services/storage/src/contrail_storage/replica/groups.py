"""The Raft groups of a node, and the requests and commits of each.

A node is a member of several groups over one log: the meta group, a group of its own for shards
that are not replicated, and groups that replicate shards. The shards in memory have a group without
a log.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from time import perf_counter
from typing import TypeVar

import structlog

from contrail_storage.replica.applier import Applier, NodeTimings
from contrail_storage.replica.apply_pace import ApplyPace
from contrail_storage.replica.entries import EntryContext
from contrail_storage.replica.proposer import Proposer
from contrail_storage.replica.raft_port import Callbacks, Committed, Group, no_leader

_Group = TypeVar("_Group", bound=Group)
_log = structlog.get_logger("contrail.groups")


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
        self.timings = NodeTimings()
        self._applier = applier
        # Says when a group may hand out its next entry.
        self._pace = ApplyPace(applier)
        self._log_time_ns = log_time_ns
        # Learns the number of a group that begins (True) or ceases to be led by this node.
        self._on_role = on_role
        # Stops the node, for the reason given, if an entry cannot be applied.
        self._fail = fail
        self.failed = False
        """Whether the node is stopping. Then no later entry may be applied."""
        self._groups: dict[int, Group] = {}

    def __getitem__(self, number: int) -> Group:
        return self._groups[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

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
    ) -> tuple[_Group, Proposer]:
        """Take part in a group that ``make`` makes; return it, and the queue of its requests.

        ``refusals`` and ``busy`` are the errors of its `Group.propose`.
        """
        group = make(
            Callbacks(
                partial(self._commit, number),
                partial(self._role, number),
                partial(self._lost, number),
                partial(self._replaced, number),
            )
        )
        proposer = Proposer(group, self._log_time_ns, self._applier, refusals, busy=busy)
        self._groups[number], self.proposers[number] = group, proposer
        return group, proposer

    def resume(self) -> None:
        """Hand out entries and propose again: the store has caught up, or has lost its jobs."""
        self._pace.resume()
        for proposer in self.proposers.values():
            proposer.resume()

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

    def _commit(self, number: int, entry: Committed) -> bool:
        used_s = 0.0
        own = entry.context if isinstance(entry.context, EntryContext) else None
        # No entry may be skipped: later entries would be applied to a different state.
        if not self.failed:
            begun = perf_counter()
            try:
                self._applier.apply(number, entry.index, entry.term, entry.data, own)
                used_s = self.timings.applied(begun, own)
            except Exception as error:
                _log.exception("entry_not_applied", group=number, index=entry.index)
                self._fail(f"entry {entry.index} of group {number}: {error!r}")
        if own is not None:
            if self.failed:
                own.unknown()
            self.proposers[number].settled()
        return self._pace.may_go_on(self._groups[number], used_s)

    def _lost(self, number: int, contexts: list[object]) -> None:
        for context in contexts:
            if isinstance(context, EntryContext):
                context.unknown()
                self.proposers[number].settled()

    def _replaced(self, number: int, contexts: list[object]) -> None:
        for context in contexts:
            if isinstance(context, EntryContext):
                context.refuse(self.proposers[number].no_leader())
                self.proposers[number].settled()

    def _role(self, number: int, leads: bool) -> None:
        if not leads:
            self.proposers[number].fail_all()
        self._on_role(number, leads)
