"""A process with bare Raft groups on the peer port: `python bare_node.py` and a line of JSON.

The line has name, folder, port, peers (name to address), groups (numbers) and secret. Further lines
are proposals: `{"group": 1, "data": "...", "zeros": 0}`. Events are written as lines: `formed`,
`leader`, `applied`, `refused`, `read`.
"""

import asyncio
import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from contrail_replicator import CommittedEntry, GroupBusyError, LogEntry, NotLeaderError, RaftGroup
from contrail_replicator.peers.certificates import made_tls
from contrail_replicator.peers.formation import Membership, Stage, checked_names
from contrail_replicator.peers.forming import Forming
from contrail_replicator.peers.handshake import NO_CLUSTER
from contrail_replicator.peers.hub import Node, PeerHub
from contrail_replicator.peers.links import GroupLinks
from contrail_replicator.peers.tcp import PeerSockets
from contrail_serve.member_log import NodeMemberLog
from contrail_storage.wal.node_log import NodeLog

TICK_S = 0.025


def tell(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


class IdentityFile:
    """The node's identity, replaced as a whole; a test kills the process and not the machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        known = json.loads(path.read_text()) if path.exists() else [0, NO_CLUSTER.hex(), 0]
        self.membership = Membership(Stage(known[0]), bytes.fromhex(known[1]))
        self.boots = known[2] + 1
        self.save(self.membership)

    def load(self) -> Membership:
        return self.membership

    def save(self, membership: Membership) -> None:
        self.membership = membership
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps([membership.stage, membership.cluster_id.hex(), self.boots]))
        new.rename(self.path)


class LogOfMembers(NodeMemberLog):
    """The node's log for groups with several members; tells of reads."""

    def read(
        self,
        group: int,
        from_index: int,
        max_bytes: int,
        on_read: Callable[[Sequence[LogEntry]], None],
    ) -> None:
        def told(entries: Sequence[LogEntry]) -> None:
            on_read(entries)
            tell("read", group=group, index=from_index)

        super().read(group, from_index, max_bytes, told)


class BareNode:
    """One process: a log, the hub, and groups that apply by printing."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.groups: dict[int, RaftGroup] = {}
        self.log: NodeLog
        self.links: GroupLinks

    def start(self, listener: socket.socket) -> None:
        given, loop = self.given, asyncio.get_running_loop()
        folder, name = Path(given["folder"]), given["name"]
        file = IdentityFile(folder / "identity")
        formed = file.membership.stage is Stage.FORMED
        self.log = NodeLog.open(folder / "wal", keep_from=dict.fromkeys(given["groups"], 0))
        self.log.start(call_soon=loop.call_soon_threadsafe, on_failure=self.log_failed)
        sockets = PeerSockets(made_tls(name), encrypted_on_loopback=given["encrypted"])
        node = Node(
            name,
            file.membership.cluster_id if formed else NO_CLUSTER,
            1,
            file.boots,
            time.time_ns(),
        )
        key = bytes.fromhex(given["secret"])
        hub = PeerHub(sockets, node, given["peers"], lambda: [key])
        self.links = GroupLinks(hub, time.time_ns, self.fault)
        names = checked_names(given["peers"])
        forming = Forming(
            hub, names, file, self.begin, lambda why, lost: tell("obstacle", why=why, lost=lost)
        )
        sockets.listen(listener, hub.accept)
        hub.start()
        forming.start()

    def begin(self, membership: Membership) -> None:
        tell("formed", cluster=membership.cluster_id.hex())
        for number in self.given["groups"]:
            self.groups[number] = RaftGroup(
                group_id=number,
                node_id=self.given["name"],
                peers=sorted(self.given["peers"]),
                log=self.log,
                transport=self.links,
                applied_index=0,
                on_commit=lambda entry, number=number: self.apply(number, entry),
                on_role=lambda leads, number=number: tell("leader", group=number, leads=leads),
                on_lost=lambda contexts: tell("unknown", data=contexts),
                member_log=LogOfMembers(self.log),
            )
        for group in self.groups.values():
            group.start()
        self.tick()

    def tick(self) -> None:
        asyncio.get_running_loop().call_later(TICK_S, self.tick)
        for group in self.groups.values():
            group.tick()

    def apply(self, number: int, entry: CommittedEntry) -> bool:
        if entry.data:
            acked = entry.context is not None
            data = entry.data.rstrip(b"\0").decode()
            tell("applied", group=number, index=entry.index, data=data, acked=acked)
        return True

    def propose(self, line: bytes) -> None:
        given = json.loads(line)
        try:
            data = given["data"].encode() + bytes(given.get("zeros", 0))
            self.groups[given["group"]].propose(data, given["data"])
        except (KeyError, NotLeaderError, GroupBusyError) as error:
            tell("refused", data=given["data"], why=repr(error))

    def log_failed(self, error: Exception) -> None:
        tell("failed", why=repr(error))

    def fault(self, group: int, error: Exception) -> None:
        tell("failed", group=group, why=repr(error))


async def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    given = json.loads(await reader.readline())
    # The test keeps the port by a socket that is bound and does not listen.
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", given["port"]))
    node = BareNode(given)
    node.start(listener)
    while line := await reader.readline():
        node.propose(line)


if __name__ == "__main__":
    asyncio.run(main())
