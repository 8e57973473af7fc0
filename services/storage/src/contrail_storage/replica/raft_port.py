"""The Raft groups that a node uses. The composition root supplies the replicator's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_storage.wal.node_log import NodeLog


class Committed(Protocol):
    """A committed entry, as a group passes it on."""

    index: int
    term: int
    data: bytes
    context: object | None


SUSPECT: Final = 2
"""The flag of a member whose state is damaged or out of date: it applies nothing."""

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


class PeerReport(Protocol):
    """What a leader knows of another member."""

    name: str
    lag: int
    """Committed entries that it has not acknowledged."""
    applied: int
    current: bool
    """Whether it is whole and up to date."""
    offline: bool
    """Whether it does not answer."""
    restoring: bool
    suspect: bool


class GroupReport(Protocol):
    """What a member knows of its group."""

    term: int
    role: str
    """`leader` or `follower`."""
    leader: str
    durable: int
    commit: int
    applied: int
    restoring: bool
    """Whether this member's log is not whole."""
    suspect: bool
    """Whether this member's state is damaged."""

    elections: Mapping[str, int]
    """How often this member came to lead, by cause."""
    step_downs: Mapping[str, int]
    """How often it ceased to lead, by cause."""

    @property
    def peers(self) -> Sequence[PeerReport]:
        """The other members, if this one leads."""
        ...


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
    def term(self) -> int:
        """The current term."""
        ...

    @property
    def ended_by(self) -> str:
        """Why this node ceased to lead last; `no_quorum` if no majority followed it."""
        ...

    @property
    def outstanding_bytes(self) -> int:
        """Bytes proposed and not yet committed."""
        ...

    @property
    def applied_index(self) -> int:
        """Index of the last entry that was passed on."""
        ...

    @property
    def flags(self) -> int:
        """What the member is unfit for, such as `SUSPECT`; 0 if for nothing."""
        ...

    @property
    def flags_are_durable(self) -> bool:
        """Whether the disk has the flags."""
        ...

    @property
    def lagging(self) -> list[str]:
        """While this node leads: the members that need entries which its log no longer has."""
        ...

    @property
    def may_hand_over(self) -> bool:
        """Whether this node leads, and another member is fit to lead."""
        ...

    def mark_suspect(self, suspect: bool) -> None:
        """Set or remove `SUSPECT`, durably. OSError if the log has failed; none is applied then."""
        ...

    def install(self, index: int, term: int) -> bool:
        """Go on after the state at an entry, which the store has; True if that began a new log."""
        ...

    def trim(self, index: int, at_most: int) -> bool:
        """Drop entries up to ``index`` from memory: no member needs them any more.

        Only the oldest ``at_most`` of them; returns whether these were all.
        """
        ...

    @property
    def is_handing_over(self) -> bool:
        """Whether this node is about to stop leading, and proposals must wait."""
        ...

    def hand_over(self, target: str | None = None) -> bool:
        """Begin to make ``target``, or the best member, the leader; False if none is fit for it."""
        ...

    def may_take_over(self, peer: str) -> bool:
        """Whether this node leads, and a member could lead at once instead."""
        ...

    def decline(self, declines: bool = True) -> None:
        """Let no leader hand over to this node while it ``declines``."""
        ...

    def read_index(self, done: Callable[[bool], None]) -> None:
        """Call ``done(True)`` once this node has passed on all that was committed until now.

        ``done(False)`` means that it does not lead, so what it has may be out of date.
        """
        ...

    def heard_majority_within(self, seconds: float) -> bool:
        """Whether this node leads, and a majority has followed it within the last ``seconds``."""
        ...

    def staleness_s(self) -> float:
        """Seconds since all that was committed then was passed on; inf if that is unknown."""
        ...

    def report(self) -> GroupReport:
        """What this member knows of the group."""
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

    def keep_applied(self, kept: bool) -> None:
        """Pass on nothing while ``kept``, so that the applied index stays as it is."""
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


class Comparison(Protocol):
    """Compares what the members of a group have applied."""

    on_differs: Callable[[bool], None]
    """Told that the members of this leader differ and no majority agrees, or no longer."""

    def note(self, index: int, digest: bytes) -> None:
        """Note 16 bytes that tell apart what members have applied, after the entry at ``index``."""
        ...


class ComparedGroup(Protocol):
    """A group with other members."""

    @property
    def comparison(self) -> Comparison:
        """Its comparison with them."""
        ...

    def vote_only_if(self, is_complete: Callable[[], bool]) -> None:
        """While restoring, vote again only when ``is_complete()`` says so as well."""
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
