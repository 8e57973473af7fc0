"""Replication: Raft groups over the node's write-ahead log."""

from contrail_replicator.group import RaftGroup
from contrail_replicator.guard import LogDivergedError
from contrail_replicator.journal import LogGapError
from contrail_replicator.messages import Message
from contrail_replicator.ports import (
    GroupEndpoint,
    JournalLog,
    LogEntry,
    MemberLog,
    RecoveredLog,
    Timings,
    Transport,
)
from contrail_replicator.proposals import (
    MAX_ENTRY_BYTES,
    CommittedEntry,
    GroupBusyError,
    NotLeaderError,
)
from contrail_replicator.transport import NullTransport

__all__ = [
    "MAX_ENTRY_BYTES",
    "CommittedEntry",
    "GroupBusyError",
    "GroupEndpoint",
    "JournalLog",
    "LogDivergedError",
    "LogEntry",
    "LogGapError",
    "MemberLog",
    "Message",
    "NotLeaderError",
    "NullTransport",
    "RaftGroup",
    "RecoveredLog",
    "Timings",
    "Transport",
]
