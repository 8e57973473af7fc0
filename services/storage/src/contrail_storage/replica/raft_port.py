"""The Raft groups as a node needs them; the composition root gives the replicator's."""

from collections.abc import Callable, Sequence
from typing import Protocol

from contrail_storage.wal.node_log import NodeLog


class Committed(Protocol):
    """A committed entry as a group hands it out."""

    index: int
    term: int
    data: bytes
    context: object | None


OnCommit = Callable[[Sequence[Committed]], None]
"""Takes committed entries, in order."""

OnLost = Callable[[list[object]], None]
"""Takes the contexts of entries whose outcome will not be known here."""


class Group(Protocol):
    """A Raft group of this node."""

    @property
    def is_leader(self) -> bool:
        """Whether this node leads the group and has handed out all earlier terms' entries."""
        ...

    @property
    def outstanding_bytes(self) -> int:
        """Bytes proposed and not yet committed."""
        ...

    @property
    def applied_index(self) -> int:
        """Index of the last entry handed out."""
        ...

    def start(self) -> None:
        """Take part."""
        ...

    def tick(self) -> None:
        """Do what is due."""
        ...

    def resign(self) -> None:
        """Lead no longer, and do not before :meth:`start`."""
        ...

    def stop(self) -> None:
        """End taking part."""
        ...

    def propose(self, data: bytes, context: object) -> int:
        """Append an entry."""
        ...

    def handle_log_failure(self) -> None:
        """The log failed."""
        ...

    def handle_log_recovered(self) -> None:
        """The log takes records again."""
        ...


class GroupFactory(Protocol):
    """Makes Raft groups; the composition root gives the replicator's."""

    refusals: tuple[type[Exception], ...]
    """What `Group.propose` raises where it may not propose."""
    busy: tuple[type[Exception], ...]
    """What it raises where too much waits; either way nothing was appended."""

    def make(
        self,
        *,
        group_id: int,
        node_id: str,
        log: NodeLog,
        applied_index: int,
        on_commit: OnCommit,
        on_role: Callable[[bool], None],
        on_lost: OnLost,
    ) -> Group:
        """A group of one member over the node's log."""
        ...
