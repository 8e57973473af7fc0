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
from contrail_storage.core.results import Done, Refused, Result, Writes


class GroupEntry(msgspec.Struct, array_like=True, frozen=True):
    """A group: its number, and the ids of its member nodes, the preferred leader first."""

    number: int
    members: tuple[str, ...]


class GroupTable:
    """All groups, by number. Part of the meta machine."""

    def __init__(self) -> None:
        self.groups: dict[int, GroupEntry] = {}

    def create(self, command: cmd.CreateGroup, writes: Writes) -> Result:
        """Add a group; a repeated command changes nothing."""
        entry = GroupEntry(command.number, command.members)
        known = self.groups.get(entry.number)
        if known is not None and known != entry:
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
