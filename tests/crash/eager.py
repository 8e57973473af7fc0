"""Raft groups without their most important rule: they commit before the log is durable.

They test the tests: with these groups acknowledged messages are lost, and the checker must report
that.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from contrail_replicator import NullTransport, RaftGroup
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.replica.raft_port import Group
from contrail_storage.wal.node_log import NodeLog
from contrail_storage.wal.replay import RecoveredGroup


class EagerLog:
    """A node log that reports every record as durable as soon as it is appended."""

    def __init__(self, log: NodeLog) -> None:
        self._log = log
        self._on_durable: Callable[[int, int], None]
        self._last_index = 0

    def attach(self, group: int, on_durable: Callable[[int, int], None]) -> RecoveredGroup:
        """Attach a group, without passing on the reports of the disk: it gets ours."""
        self._on_durable = on_durable
        recovered = self._log.attach(group, lambda _position, _index: None)
        self._last_index = recovered.last_index
        return recovered

    def append(self, group: int, index: int, term: int, data: bytes) -> int:
        """Append a record, and report it as durable."""
        self._last_index = index
        return self._claim(self._log.append(group, index, term, data))

    def save_hard_state(self, group: int, term: int, voted_for: str | None) -> int:
        """Save the hard state, and report it as durable."""
        return self._claim(self._log.save_hard_state(group, term, voted_for))

    def _claim(self, position: int) -> int:
        asyncio.get_running_loop().call_soon(self._on_durable, position, self._last_index)
        return position

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


class EagerGroups(SingleMemberGroups):
    """Makes groups over an eager log."""

    def make(self, *, log: NodeLog, **rest: Any) -> Group:
        """A group that does not wait for the disk."""
        transport = NullTransport()
        return RaftGroup(log=EagerLog(log), transport=transport, **rest)
