"""PySyncObj without its journal, transport, poller, apply loop and pickled commands.

Only this module and `raft_core` import the library.
"""

from collections.abc import Callable
from typing import Any, Final
from zlib import crc32

import pysyncobj.journal
import pysyncobj.pickle
import pysyncobj.syncobj
from pysyncobj.config import SyncObjConf
from pysyncobj.node import Node
from pysyncobj.syncobj import _RAFT_STATE
from pysyncobj.transport import Transport
from pysyncobj.version import VERSION

from contrail_replicator.journal import GroupJournal
from contrail_replicator.ports import LogEntry, Timings

AUDITED_VERSION: Final = "0.3.17"
FOLLOWER: Final = _RAFT_STATE.FOLLOWER
CANDIDATE: Final = _RAFT_STATE.CANDIDATE
LEADER: Final = _RAFT_STATE.LEADER

if VERSION != AUDITED_VERSION:
    raise ImportError(f"pysyncobj {VERSION} is installed, but only {AUDITED_VERSION} is audited")


class _NoPoller:
    def poll(self, _timeout: float) -> None:
        """Do nothing: the event loop drives the group."""


def _refuse_pickle(*_args: object, **_kwargs: object) -> None:
    raise RuntimeError("Raft commands and messages are never pickled")


def _replace_library_parts() -> None:
    core = pysyncobj.syncobj
    core.createJournal = lambda journal: journal
    core.createPoller = lambda _kind: _NoPoller()
    # The library calls this only for the command type of a leader's first entry. Ours has no data.
    core._bchr = lambda _command_type: b""
    for module in (pysyncobj.pickle, pysyncobj.journal):
        for name in ("load", "loads", "dump", "dumps"):
            setattr(module, name, _refuse_pickle)


_replace_library_parts()


class CoreJournal:
    """A group's journal with the methods that the core calls."""

    def __init__(self, journal: GroupJournal, applied_index: int) -> None:
        self._journal = journal
        self._applied_index = applied_index

    def __len__(self) -> int:
        return len(self._journal)

    def __getitem__(self, position: int) -> LogEntry:
        return self._journal[position]

    def add(self, data: bytes, index: int, term: int) -> None:
        self._journal.append(data, index, term)

    def getCurrentTerm(self) -> int:  # noqa: N802
        return self._journal.term

    def getVotedForNodeId(self) -> str | None:  # noqa: N802
        return self._journal.voted_for

    def setCurrentTerm(self, term: int, voted_for: str | None) -> None:  # noqa: N802
        self._journal.save_hard_state(term, voted_for)

    def getRaftCommitIndex(self) -> int:  # noqa: N802
        return self._applied_index

    def setRaftCommitIndex(self, _index: int) -> None:  # noqa: N802
        """Do nothing: the store keeps the applied index."""

    def onOneSecondTimer(self) -> None:  # noqa: N802
        """Do nothing: no write depends on a timer."""


class CoreTransport(Transport):  # type: ignore[misc]
    """Takes the messages that the core sends. `RaftCore.receive` gives it received ones."""

    def __init__(self, send: Callable[[Any, dict[str, Any]], None]) -> None:
        super().__init__(None, None, [])
        self.send = send

    ready = True
    """The core asks before each tick. Links to peers come and go without it."""


class Member(Node):  # type: ignore[misc]
    """A node with a stable hash, so that the core's sets have the same order in every run."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._hash = crc32(name.encode())

    def __hash__(self) -> int:
        return self._hash


def configuration(journal: CoreJournal, timings: Timings) -> Any:
    """The library's settings."""
    return SyncObjConf(
        autoTick=False,
        journalFile=journal,
        appendEntriesUseBatch=True,
        appendEntriesPeriod=timings.heartbeat_s,
        raftMinTimeout=timings.election_min_s,
        raftMaxTimeout=timings.election_max_s,
        leaderFallbackTimeout=timings.leader_fallback_s,
        connectionTimeout=2 * timings.election_max_s,
        commandsWaitLeader=False,
        dynamicMembershipChange=False,
    )
