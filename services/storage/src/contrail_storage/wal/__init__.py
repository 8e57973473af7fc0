"""The node's write-ahead log and its small fsynced files."""

from contrail_storage.wal.files import AppendHandle, Files
from contrail_storage.wal.log_options import LogOptions
from contrail_storage.wal.node_file import (
    NodeFileDamagedError,
    NodeIdentity,
    load_identity,
    read_node_file,
    save_identity,
    write_node_file,
)
from contrail_storage.wal.node_log import (
    LogFailedError,
    LogFullError,
    LogRottenError,
    NodeLog,
)
from contrail_storage.wal.replay import RecoveredGroup, Recovery, Rot, TornTail

__all__ = [
    "AppendHandle",
    "Files",
    "LogFailedError",
    "LogFullError",
    "LogOptions",
    "LogRottenError",
    "NodeFileDamagedError",
    "NodeIdentity",
    "NodeLog",
    "RecoveredGroup",
    "Recovery",
    "Rot",
    "TornTail",
    "load_identity",
    "read_node_file",
    "save_identity",
    "write_node_file",
]
