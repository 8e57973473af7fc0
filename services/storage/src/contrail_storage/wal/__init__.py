"""The node's write-ahead log and its small fsynced files."""

from contrail_storage.wal.log_options import LogOptions
from contrail_storage.wal.node_log import (
    EntriesGoneError,
    LogFailedError,
    LogFullError,
    LogRottenError,
    NodeLog,
)
from contrail_storage.wal.replay import RecoveredGroup, Recovery, Rot, TornTail

__all__ = [
    "EntriesGoneError",
    "LogFailedError",
    "LogFullError",
    "LogOptions",
    "LogRottenError",
    "NodeLog",
    "RecoveredGroup",
    "Recovery",
    "Rot",
    "TornTail",
]
