"""The Raft groups of the cluster and their members.

The meta group is not in the table: a node that has lost everything must reach it first. Members
never change, and numbers are never used again, so a node that was away cannot take part in a group
as somebody else.
"""

from collections.abc import Iterable

import msgspec

from contrail_common import errors
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.node_table import NodeTable
from contrail_storage.core.results import Done, Refused, Result, Writes


class GroupEntry(msgspec.Struct, array_like=True, frozen=True):
    """A group: its number, and the ids of its member nodes, the preferred leader first.

    ``incarnations`` are those of the members when it was made (none: all 1). A member with another
    one has lost what it voted and acknowledged in this group.
    """

    number: int
    members: tuple[str, ...]
    incarnations: tuple[int, ...] = ()

    def incarnation_of(self, member: str) -> int:
        """The incarnation in which a member has taken part from the beginning."""
        return self.incarnations[self.members.index(member)] if self.incarnations else 1


class GroupTable:
    """All groups, by number. Part of the meta machine."""

    def __init__(self) -> None:
        self.groups: dict[int, GroupEntry] = {}

    def create(self, command: cmd.CreateGroup, nodes: NodeTable, writes: Writes) -> Result:
        """Add a group of known ``nodes``; a repeated command changes nothing."""
        incarnations = tuple(map(nodes.incarnation, command.members))
        entry = GroupEntry(command.number, command.members, incarnations)
        known = self.groups.get(entry.number)
        if known is not None and known.members != entry.members:
            detail = f"group {entry.number} has other members"
            return Refused(errors.PRECONDITION_FAILED.code, detail)
        if not _is_sound(entry):
            return Refused(errors.INVALID_FIELD.code, f"group {entry.number} cannot be made so")
        if known is None:
            self.groups[entry.number] = entry
            key = keys.small_key(keys.MEMBERS, cmd.META_SHARD, entry.number)
            writes.put(key, msgspec.msgpack.encode(entry))
        return Done(changed=known is None)

    def load(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Load the table from its rows, given as (key, value)."""
        for _, value in rows:
            entry = msgspec.msgpack.decode(value, type=GroupEntry)
            self.groups[entry.number] = entry


def _is_sound(entry: GroupEntry) -> bool:
    members = entry.members
    return (
        keys.META_GROUP < entry.number < keys.IN_MEMORY
        and bool(members)
        and all(members)
        and len(set(members)) == len(members)
    )
