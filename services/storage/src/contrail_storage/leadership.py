"""Moves leadership between nodes: before this one stops, on request, and to spread it evenly.

The members of a group are listed with the one first that should lead. After a failure or a restart
others do, until the leader finds that the first one has been well for a while.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

import structlog

from contrail_common import errors
from contrail_common.errors import ApiError, FieldProblem
from contrail_storage.replica.groups import Groups
from contrail_storage.replica.raft_port import Group

WELL_S: Final = 30.0
"""For how long a node must have been fit to lead before it gets a group back."""
REST_S: Final = 60.0
"""For how long a group keeps its leader, unless it fails."""
PAUSE_S: Final = 5.0
"""A node gives away one group in this time."""
HANDOVER_S: Final = 1.0
"""A handover that takes longer has failed."""
LEAVE_S: Final = 2.0
_LOOK_S: Final = 1.0
_POLL_S: Final = 0.005
_log = structlog.get_logger("contrail.leadership")


class Leadership:
    """Which of its replicated groups a node leads. Used on the event loop only."""

    def __init__(
        self,
        groups: Groups,
        members_of: Callable[[int], Sequence[str]],
        lacks_copies: Callable[[int], bool],
    ) -> None:
        self.leaving = False
        """Whether the node is about to stop."""
        self.caught_up = False
        """Whether the node has been up to date in all its groups since its start."""
        self._groups = groups
        self._members_of = members_of  # returns the members of a group
        # Says whether this node lacks copies that the leader of a group needs.
        self._lacks_copies = lacks_copies
        # By group that this node leads: since when. By group that another should lead: since when
        # that one has been fit for it. In seconds of `balance`.
        self._led_since: dict[int, float] = {}
        self._well_since: dict[int, float] = {}
        # When this node gave a group away.
        self._gave_at = float("-inf")

    def _replicated(self) -> Iterator[tuple[int, Group]]:
        return ((n, group) for n, group in self._groups.items() if not group.is_alone)

    async def hand_over(self, number: int, target: str | None = None) -> str:
        """Make another member the leader, and return its name; "" if that fails.

        Without ``target``, the best one. Requests for the group wait meanwhile.
        """
        group = self._groups[number]
        if not group.hand_over(target):
            return ""
        with suppress(TimeoutError):
            async with asyncio.timeout(HANDOVER_S):
                while True:
                    if group.leader not in ("", self._groups.node_id):
                        return group.leader
                    await asyncio.sleep(_POLL_S)
        return ""

    async def step_down(self, number: int, preferred: str) -> str:
        """As `hand_over`, on request. Raises INVALID_FIELD or NO_FIT_PEER."""
        members = self._members_of(number)
        if preferred and preferred not in members:
            message = f"the stream has no replica there; it is on {', '.join(sorted(members))}"
            problem = FieldProblem("/preferred", message)
            raise ApiError(errors.INVALID_FIELD, message, [problem], applied=False)
        if preferred == self._groups.node_id:
            return preferred
        leader = await self.hand_over(number, preferred or None)
        if not leader:
            raise ApiError(errors.NO_FIT_PEER, retry_after_s=1)
        return leader

    async def leave(self) -> None:
        """Hand over all groups that this node leads, because it is about to stop."""
        self.leaving, led = True, []
        for number, group in self._replicated():
            group.decline()
            if group.is_leader:
                led.append(number)
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                found = await asyncio.gather(*map(self.hand_over, led))
                _log.info("handed_over", groups=len(led), taken=len(list(filter(None, found))))

    async def keep_balanced(self) -> None:
        """Give groups to the nodes that should lead them, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.balance(asyncio.get_running_loop().time())

    def balance(self, now: float) -> None:
        """Give one group to the node that should lead it, if that is due. Called every second."""
        for number, group in self._replicated():
            if group.is_leader and self._lacks_copies(number):
                _log.warning("leadership_handed_on", group=number, reason="a copy is not whole")
                group.hand_over(None)
        due = [number for number, group in self._replicated() if self._is_due(number, group, now)]
        if not due or now - self._gave_at < PAUSE_S:
            return
        number, self._gave_at = due[0], now
        target = self._members_of(number)[0]
        _log.info("leadership_given_back", group=number, to=target)
        self._groups[number].hand_over(target)

    def _is_due(self, number: int, group: Group, now: float) -> bool:
        if not group.is_leader:
            self._led_since.pop(number, None)
            self._well_since.pop(number, None)
            return False
        led_since = self._led_since.setdefault(number, now)
        target = self._members_of(number)[0]
        if target == self._groups.node_id or not group.may_take_over(target):
            self._well_since.pop(number, None)
            return False
        well_since = self._well_since.setdefault(number, now)
        return now - well_since >= WELL_S and now - led_since >= REST_S
