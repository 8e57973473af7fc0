"""The Raft groups that a node uses. The composition root supplies the replicator's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_storage.wal.node_log import NodeLog


class Committed(Protocol):
    """A committed entry, as a group passes it on."""

    index: int
    term: int
    data: bytes
    context: object | None


OnCommit = Callable[[Committed], bool]
"""Accepts the next committed entry, and returns whether it accepts the one after it now.

After False it gets none until `Group.resume`.
"""

OnLost = Callable[[list[object]], None]
"""Accepts the contexts of entries that this node proposed and that will not be applied with them.

`Callbacks.on_lost`: nobody knows the outcome. `Callbacks.on_replaced`: another entry was committed
in their place, so they never will be.
"""


@dataclass(slots=True, frozen=True)
class Callbacks:
    """What a group calls: see `GroupFactory.make`."""

    on_commit: OnCommit
    on_role: Callable[[bool], None]
    on_lost: OnLost
    on_replaced: OnLost


class Group(Protocol):
    """A Raft group of this node."""

    @property
    def is_leader(self) -> bool:
        """Whether this node leads the group and has passed on all entries of earlier terms."""
        ...

    @property
    def is_alone(self) -> bool:
        """Whether this node is the only member."""
        ...

    @property
    def leader(self) -> str:
        """Id of the node that leads; empty if none is known."""
        ...

    @property
    def outstanding_bytes(self) -> int:
        """Bytes proposed and not yet committed."""
        ...

    @property
    def applied_index(self) -> int:
        """Index of the last entry that was passed on."""
        ...

    def read_index(self, done: Callable[[bool], None]) -> None:
        """Call ``done(True)`` once this node has passed on all that was committed until now.

        ``done(False)`` means that it does not lead, so what it has may be out of date.
        """
        ...

    def start(self) -> None:
        """Begin to take part in the group."""
        ...

    def tick(self) -> None:
        """Do what has become due, such as an election."""
        ...

    def resume(self) -> None:
        """Pass on entries again, after the owner has refused the next one."""
        ...

    def resign(self) -> None:
        """Stop leading, until the next :meth:`start`."""
        ...

    def stop(self) -> None:
        """Stop taking part in the group."""
        ...

    def propose(self, data: bytes, context: object) -> int:
        """Append an entry, and return its index; ``context`` comes back when it is committed."""
        ...

    def handle_log_failure(self) -> None:
        """Stop leading: the log has failed."""
        ...

    def handle_log_recovered(self) -> None:
        """Take part again: the log accepts records again."""
        ...


class GroupFactory(Protocol):
    """Makes Raft groups. The composition root supplies the replicator's."""

    refusals: tuple[type[Exception], ...]
    """The errors of `Group.propose` if this node does not lead; nothing was appended."""
    busy: tuple[type[Exception], ...]
    """Its errors if too many bytes wait; nothing was appended."""

    def make(  # noqa: PLR0913 - all of them are named
        self,
        *,
        group_id: int,
        node_id: str,
        peers: Sequence[str],
        log: NodeLog,
        applied_index: int,
        on_commit: OnCommit,
        on_role: Callable[[bool], None],
        on_lost: OnLost,
        on_replaced: OnLost,
    ) -> Group:
        """Make a member of a group over the node's log; ``peers`` are the other members."""
        ...


def no_leader(leader: str | None = None) -> ApiError:
    """The refusal of a node that may not propose.

    ``leader`` is the member that leads, "" if it is not known; None in a group of one.
    """
    if leader is None:
        return ApiError(errors.NOT_READY, "no leader", retry_after_s=1, applied=False)
    return ApiError(errors.NOT_LEADER, retry_after_s=1, applied=False, leader=leader)
