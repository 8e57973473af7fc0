"""The formation of a cluster over the connections between nodes: decisions are in `formation`."""

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from contrail_replicator.peers.formation import (
    Decision,
    Membership,
    MembershipFile,
    Report,
    Stage,
    decide,
    node_number,
)
from contrail_replicator.peers.frames import Bytes, Channel, Frame, FrameError
from contrail_replicator.peers.hub import PeerHub
from contrail_replicator.peers.plan import NODES_MAX
from contrail_replicator.peers.ports import Timer

FORMATION: Final = 12
_TELL_S: Final = 0.25
_NO_GROUP: Final = 0
_HEAD: Final = struct.Struct("<B16sB")


class Forming:
    """Makes this node part of a cluster, and helps the others to become part of it.

    Until the node is formed, it tells its report to all others four times a second; after that it
    answers those that are not. ``on_formed`` is called once, when the membership is on disk and the
    hub has the identity. ``on_obstacle`` gets each new reason why the node cannot go on, and
    whether its disk was lost: then it must ask the cluster to take it up again. Raises OSError from
    the file where this node saves: in `start`, and in the handler of a frame or timer.
    """

    def __init__(
        self,
        hub: PeerHub,
        names: tuple[str, ...],
        file: MembershipFile,
        on_formed: Callable[[Membership], None],
        on_obstacle: Callable[[str, bool], None],
    ) -> None:
        self._hub = hub
        # All nodes of the new cluster, sorted; see `checked_names`.
        self._names = names
        self._file = file
        self._on_formed = on_formed
        self._on_obstacle = on_obstacle
        # What is on disk.
        self._own = file.load()
        # The newest report of each node.
        self._heard: dict[str, Report] = {}
        # The last reason that was reported.
        self._obstacle = ""
        self._timer: Timer | None = None
        hub.handle(Channel.CONTROL, FORMATION, self._handle, before_cluster=True)

    def start(self) -> None:
        """Go on from what is on disk."""
        if self._own.stage is Stage.FORMED:
            self._formed()
        else:
            self._tell_all()
            self._advance()

    def adopt(self, membership: Membership) -> None:
        """Become a member again, as which the cluster has registered this node."""
        if self._own.stage is not Stage.FORMED:
            self._file.save(membership)
            self._own = membership
            self._formed()

    def stop(self) -> None:
        """Tell nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def _tell_all(self) -> None:
        self._timer = self._hub.net.call_later(_TELL_S, self._tell_all)
        for name in self._hub.names:
            self._tell(name)

    def _tell(self, name: str) -> None:
        body = encode_report(Report(self._own, self._names))
        self._hub.send(name, Channel.CONTROL, FORMATION, _NO_GROUP, [body])

    def _handle(self, peer: str, frame: Frame) -> None:
        report = decode_report(frame.body)
        self._heard[peer] = report
        if self._own.stage is not Stage.FORMED:
            self._advance()
        elif report.membership.stage is not Stage.FORMED:
            self._tell(peer)

    def _advance(self) -> None:
        """Save what is decided, step by step; each is told when it is on disk."""
        while self._own.stage is not Stage.FORMED:
            decision = self._decide()
            if decision.save is None:
                if decision.obstacle not in ("", self._obstacle):
                    self._on_obstacle(decision.obstacle, decision.lost_disk)
                self._obstacle = decision.obstacle
                return
            self._file.save(decision.save)
            self._own = decision.save
            for name in self._hub.names:
                self._tell(name)
        self._formed()

    def _decide(self) -> Decision:
        net, name = self._hub.net, self._hub.node.name
        return decide(name, self._own, self._names, self._heard, net.random_bytes(16))

    def _formed(self) -> None:
        self.stop()
        hub = self._hub
        if hub.node.cluster_id != self._own.cluster_id:
            number = node_number(hub.node.name, self._names)
            known = self._own
            hub.become(
                replace(
                    hub.node,
                    cluster_id=known.cluster_id,
                    node_number=number,
                    incarnation=known.incarnation,
                )
            )
        self._on_formed(self._own)


def encode_report(report: Report) -> bytes:
    """Return the report as bytes: u8 stage, cluster id, u8 count, then u8 length and each name."""
    membership = report.membership
    head = _HEAD.pack(membership.stage, membership.cluster_id, len(report.names))
    names = [name.encode() for name in report.names]
    return head + b"".join(bytes([len(name)]) + name for name in names)


def decode_report(body: Bytes) -> Report:
    """Return the report. Raises FrameError."""
    data = bytes(body)
    try:
        stage, cluster_id, count = _HEAD.unpack_from(data)
        at, names = _HEAD.size, list[str]()
        for _ in range(count):
            end = at + 1 + data[at]
            names.append(data[at + 1 : end].decode())
            at = end
        membership = Membership(Stage(stage), cluster_id)
    except (struct.error, IndexError, ValueError) as error:
        raise FrameError("a report about a cluster that cannot be read") from error
    if at != len(data) or count > NODES_MAX:
        raise FrameError("a report about a cluster that cannot be read")
    return Report(membership, tuple(names))
