"""A node's log, as groups of several members use it: entries are read in a thread."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from contrail_replicator.messages import RESTORING, SUSPECT
from contrail_storage.wal import EntriesGoneError, LogRottenError, NodeLog

LogEntry = tuple[bytes, int, int]
"""Data, index and term."""
_TOLD: Final = {0: "member_whole", RESTORING: "member_restoring", SUSPECT: "member_suspect"}
_log: Final = structlog.get_logger("contrail.groups")


class NodeMemberLog:
    """The `MemberLog` over a `NodeLog`. Used on the event loop."""

    def __init__(self, log: NodeLog) -> None:
        self._log = log
        # Kept until they end: the loop itself refers to its tasks only weakly.
        self._reads: set[asyncio.Task[None]] = set()

    def flags(self, group: int) -> int:
        """Flags of the member, as recovered or recorded last."""
        return self._log.flags(group)

    def save_flags(self, group: int, flags: int) -> int:
        """Record the flags beside term and vote; returns the position."""
        _log.warning(_TOLD.get(flags, "member_unfit"), group=group)
        return self._log.save_flags(group, flags)

    def reset(self, group: int, index: int, term: int) -> int:
        """Replace the group's log by the base (`index`, `term`); returns the position."""
        return self._log.reset(group, index, term)

    def term_at(self, group: int, index: int) -> int | None:
        """Term of a retained entry, or of the one before the oldest; None for any other index."""
        return self._log.term_at(group, index)

    def read(
        self,
        group: int,
        from_index: int,
        max_bytes: int,
        on_read: Callable[[Sequence[LogEntry]], None],
    ) -> None:
        """Call `on_read`, in a later turn of the loop, with retained entries from an index on."""
        task = asyncio.ensure_future(self._read(group, from_index, max_bytes, on_read))
        self._reads.add(task)
        task.add_done_callback(self._reads.discard)

    async def _read(
        self,
        group: int,
        from_index: int,
        max_bytes: int,
        on_read: Callable[[Sequence[LogEntry]], None],
    ) -> None:
        found: Sequence[LogEntry] = ()
        try:
            found = await asyncio.to_thread(self._log.read, group, from_index, max_bytes)
        except EntriesGoneError:
            pass  # the member needs a snapshot
        except (OSError, LogRottenError) as error:
            _log.error("entries_not_read", group=group, index=from_index, reason=str(error))
        on_read(found)
