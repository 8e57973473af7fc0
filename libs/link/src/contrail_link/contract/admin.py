"""Administration: archives, erasures, events, and the state of the node."""

from collections.abc import AsyncIterator
from typing import Final, Literal, Protocol

import msgspec

from contrail_common.model import Advisory, AdvisoryType, StreamInfo
from contrail_link.contract.remote import (
    ALL,
    META,
    REFUSE,
    REPEAT,
    TOKEN,
    UNKNOWN,
    leader_of,
    remote,
)
from contrail_link.contract.tickets import TicketUse

RESTORE_PIECE_BYTES_MAX: Final = 1 << 20
ERASE_SEQS_MAX: Final = 10_000


class EventsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """At most ``limit`` events after the position ``after`` ("": from now on).

    ``stream``, ``consumer`` and ``types`` select events, if they are given.
    """

    after: str = ""
    stream: str = ""
    consumer: str = ""
    types: tuple[AdvisoryType, ...] = ()
    limit: int = 256
    wait_ns: int = 0


class EventsResult(msgspec.Struct, frozen=True):
    """Events in order; ``position`` continues after them.

    ``lost`` is the number of earlier events, selected or not, that were not kept; None if the
    number is unknown.
    """

    advisories: list[Advisory]
    position: str
    lost: int | None = 0


class ReplicaErasure(msgspec.Struct, frozen=True):
    """The progress of an erasure on one node; ``reason`` says why the last attempt failed."""

    node: str
    status: Literal["pending", "done"]
    reason: str = ""


class ErasureReceipt(msgspec.Struct, frozen=True):
    """The receipt of an erasure of ``messages``; it is done when every node is.

    ``shredded``: the keys of their subjects are destroyed, so no copy can be decrypted.
    """

    erasure_id: str
    status: Literal["pending", "done"]
    messages: int
    replicas: list[ReplicaErasure]
    shredded: bool = False


class AdminLink(TicketUse, Protocol):
    """Administration: archives, erasures, events, and the state of the node."""

    @remote(30, REFUSE, to=leader_of("stream"))
    async def snapshot(self, stream: str, consumers: bool) -> AsyncIterator[bytes]:
        """Return the chunks of the stream's archive as of one moment, on request with consumers.

        The archive is complete if it ends with its end record. An ApiError cuts it.
        """
        ...

    @remote(31, REFUSE, to=META)
    async def begin_restore(self, stream: str) -> str:
        """Begin a restore into ``stream``, which must not exist (STREAM_RESTORE_EXISTS).

        Returns a token for the calls that follow, which must come one at a time. A restore without
        a call for a minute is undone.
        """
        ...

    @remote(32, REFUSE, to=TOKEN)
    async def append_restore(self, token: str, offset: int, piece: bytes) -> None:
        """Add the archive's bytes from ``offset`` on, at most ``RESTORE_PIECE_BYTES_MAX``.

        Any refusal (ARCHIVE_INVALID, SUBJECT_OVERLAP and others) undoes the restore.
        """
        ...

    @remote(33, UNKNOWN, to=TOKEN)
    async def commit_restore(self, token: str) -> StreamInfo:
        """Create the stream durably from the whole archive, or nothing (ARCHIVE_INVALID)."""
        ...

    @remote(34, REPEAT, to=TOKEN)
    async def abort_restore(self, token: str) -> None:
        """Undo a restore; does nothing if it has ended."""
        ...

    @remote(36, UNKNOWN, to=leader_of("stream"))
    async def erase(
        self, stream: str, seqs: list[int], subject: str, shard: int | None = None
    ) -> ErasureReceipt:
        """Delete messages and remove their bytes from all files. The receipt is mostly pending.

        By ``seqs`` (at most ERASE_SEQS_MAX, also of messages that are gone) or, without any, by
        ``subject`` (a literal or a filter).

        Raises STREAM_NOT_FOUND, SEQUENCE_NOT_FOUND, STREAM_SEALED, DELETE_DENIED, PURGE_DENIED,
        ERASURE_LIMIT.
        """
        ...

    @remote(37, REPEAT, to=META, wait_ns=lambda _, wait_ns: wait_ns)
    async def erasure(self, erasure_id: str, wait_ns: int) -> ErasureReceipt:
        """Return a receipt when it is done, or after ``wait_ns`` (ERASURE_NOT_FOUND)."""
        ...

    @remote(22, REPEAT, to=ALL, wait_ns=lambda request: request.wait_ns)
    async def read_events(self, request: EventsRequest) -> EventsResult:
        """Return events in order; wait up to ``wait_ns`` for the first (TOO_MANY_WAITERS).

        Events are only kept while someone listens. A reader listens during a call and for a minute
        after it.
        """
        ...

    def readiness(self, *, strict: bool = False) -> dict[str, str]:
        """Return why each component is not ready, by name; empty if the node is ready.

        With ``strict``, a node must also be up to date in all groups that it shares with others.
        Only a node in the same process tells that.
        """
        ...

    async def metrics_text(self) -> str:
        """Return the Prometheus text of the node's own metrics."""
        ...
