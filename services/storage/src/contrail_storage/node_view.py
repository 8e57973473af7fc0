"""What a node says of itself and of its groups."""

import os
from typing import Final

import msgspec

from contrail_common import __version__
from contrail_link.contract.cluster import MemberView, NodeView, PeerView
from contrail_storage.core.key_layout import META_GROUP
from contrail_storage.disk.node_file import NO_CLUSTER
from contrail_storage.node import StorageNode
from contrail_storage.replica.raft_port import Group

_LEADER: Final = "leader"


def view_of(node: StorageNode) -> NodeView:
    """Return what a node knows now."""
    identity, cluster, name = node.identity, node.options.cluster, node.options.name
    # A node alone forms a cluster of its own, which has no id.
    formed = identity.cluster_id != NO_CLUSTER
    disk = os.statvfs(node.options.data_dir)
    table = {number: entry.members for number, entry in node.meta.group_table.groups.items()}
    table[META_GROUP] = cluster.nodes if cluster else (name,)
    for number in node.logged_groups:
        table.setdefault(number, (name,))  # that of a node alone
    return NodeView(
        name=name,
        number=identity.node_number,
        cluster_id=identity.cluster_id.hex() if formed else identity.node_id,
        incarnation=identity.incarnation,
        version=__version__,
        nodes={one: cluster.addresses.get(one, "") for one in cluster.nodes} if cluster else {},
        disk_bytes=disk.f_blocks * disk.f_frsize,
        disk_free_bytes=disk.f_bavail * disk.f_frsize,
        erasures_pending=len(node.eraser.erasures.pending()),
        problems=node.readiness(),
        table=table,
        groups=[_member(number, name, group) for number, group in node.logged_groups.items()],
    )


def _member(number: int, name: str, group: Group) -> MemberView:
    report = group.report()
    leads = report.role == _LEADER
    return MemberView(
        group=number,
        role="leader" if leads else "follower",
        # A node alone is a member under its id, which nobody else knows.
        leader=name if leads else report.leader,
        term=report.term,
        durable=report.durable,
        commit=report.commit,
        applied=report.applied,
        restoring=report.restoring,
        suspect=report.suspect,
        peers=msgspec.convert(report.peers, list[PeerView], from_attributes=True),
    )
