"""The parts of a node that a Raft group uses: a log, a transport and timings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from contrail_replicator.messages import Message

LogEntry = tuple[bytes, int, int]
"""An entry as (data, index, term); empty data is a leader's first entry of its term."""


class RecoveredLog(Protocol):
    """The durable log of a group, as the node recovered it at its start."""

    term: int
    voted_for: str | None
    base_index: int
    base_term: int

    @property
    def entries(self) -> Sequence[LogEntry]:
        """The entries after the base, in order and without gaps."""


class JournalLog(Protocol):
    """The node's write-ahead log, shared by all groups; called from the event loop only.

    Each change returns its position, a count of this group's records. Once the log has failed,
    changes raise OSError until the owner of the log has recovered it.
    """

    def attach(self, group: int, on_durable: Callable[[int, int], None]) -> RecoveredLog:
        """Return what was recovered; from then on report (durable position, index there)."""

    def detach(self, group: int) -> None:
        """Stop reporting to a group that has ended."""

    def has_capacity(self, size: int) -> bool:
        """Whether entries of `size` bytes may be added: the bytes that wait are bounded."""

    def append(self, group: int, index: int, term: int, data: bytes) -> int:
        """Add the next entry of the group's log.

        Raises BlockingIOError, and adds nothing, if too many bytes wait for the disk. An entry
        without data always fits.
        """

    def truncate(self, group: int, from_index: int, last_term: int) -> int:
        """Cut from `from_index` on; `last_term` is the term of what is then the last entry."""

    def save_hard_state(self, group: int, term: int, voted_for: str | None) -> int:
        """Record the current term and the vote given in it."""


class MemberLog(Protocol):
    """The parts of a node's log that only groups with several members need."""

    def flags(self, group: int) -> int:
        """Flags of the hard state, as recovered: `messages.RESTORING`, `messages.SUSPECT`."""

    def save_flags(self, group: int, flags: int) -> int:
        """Record the flags beside term and vote; returns the position, as `JournalLog` does."""

    def reset(self, group: int, index: int, term: int) -> int:
        """Replace the group's whole log by the base (`index`, `term`); returns the position."""

    def term_at(self, group: int, index: int) -> int | None:
        """Term of a retained entry, or of the one before the oldest; None for any other index."""

    def read(
        self,
        group: int,
        from_index: int,
        max_bytes: int,
        on_read: Callable[[Sequence[LogEntry]], None],
    ) -> None:
        """Call `on_read`, in a later turn of the loop, with retained entries from an index on.

        They have up to `max_bytes`, or one more; there are none if the first is not retained.
        """


class GroupEndpoint(Protocol):
    """The part of a group that receives from a transport. Called on the event loop."""

    def receive(self, peer: str, message: Message) -> None:
        """Handle a message from an authenticated peer."""

    def link_changed(self, peer: str, connected: bool) -> None:
        """Note whether messages can be sent to a peer."""


class Transport(Protocol):
    """Links to the peers of all groups of the node. Messages may be lost, repeated or reordered."""

    def attach(self, group: int, endpoint: GroupEndpoint) -> None:
        """Deliver the group's messages and link changes from now on."""

    def detach(self, group: int) -> None:
        """Deliver nothing more to the group."""

    def send(self, group: int, peer: str, message: Message) -> None:
        """Send without waiting; drop the message if it cannot be sent."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Raft's time bounds in seconds.

    Without a leader, an election starts after a random time between the two election bounds, and
    again after a time between `heartbeat_s` and `election_min_s` if it fails. A leader gives up
    after `leader_fallback_s` without answers from a majority, and a transfer after
    `election_max_s`. A request for a vote is repeated after `vote_repeat_s`.
    """

    election_min_s: float = 0.3
    election_max_s: float = 0.6
    heartbeat_s: float = 0.075
    leader_fallback_s: float = 0.6
    vote_repeat_s: float = 0.15
    slow_disk_s: float = 0.5
    """A leader whose log has waited this long for the disk hands over."""
    outcome_s: float = 10.0
    """After this time, a proposal of a former leader counts as unknown."""
