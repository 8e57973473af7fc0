"""The nodes of the cluster: which disk is the current one of each, and which start the newest.

A node whose disk was lost keeps its name and number and gets a new *incarnation*: what the old disk
has acknowledged does not count for the new one. A start that is not newer than the newest known one
comes from a copy of the folder, or from an older state of it.
"""

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from contrail_common import errors
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.results import Done, Refused, Result, Writes


class NodeEntry(msgspec.Struct, array_like=True, frozen=True):
    """A node that has started or was registered anew. ``token`` is that of the registration.

    ``number`` is also that of the group of its shards that are not replicated. Those with an id
    below ``lost_below`` were on a disk that is lost.
    """

    name: str
    number: int
    incarnation: int = 1
    boots: int = 0
    process: int = 0
    token: bytes = b""
    lost_below: int = 0


class NodeTable:
    """All known nodes, by name. Part of the meta machine."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeEntry] = {}

    def incarnation(self, name: str) -> int:
        """The current incarnation of a node: 1 for one that has kept its disk from the start."""
        known = self.nodes.get(name)
        return 1 if known is None else known.incarnation

    def loser_of(self, shard_id: int, group: int) -> str:
        """Name of the node that had the only copy of a shard, and lost it; empty if none did."""
        lost = (
            one.name
            for one in self.nodes.values()
            if one.number == group and shard_id < one.lost_below
        )
        return next(lost, "")

    def note_start(self, command: cmd.NoteStart, writes: Writes) -> Result:
        """Note the start of a node, unless a newer one is known; a repeated command is fine."""
        known = self.nodes.get(command.name) or NodeEntry(command.name, command.number)
        before = known.incarnation, known.boots
        start = command.incarnation, command.boots
        if start < before or (start == before and command.process != known.process):
            return Refused(
                errors.PRECONDITION_FAILED.code,
                f"start {command.boots} of {command.name} is not newer than the known start "
                f"{known.boots}: its folder is a copy, or was set back",
            )
        if command.incarnation != known.incarnation or command.number != known.number:
            return Refused(errors.PRECONDITION_FAILED.code, f"{command.name} is not registered so")
        self._put(replace(known, boots=command.boots, process=command.process), writes)
        return Done(changed=start != before)

    def register(self, command: cmd.RegisterNode, next_shard_id: int, writes: Writes) -> Result:
        """Give a node whose disk was lost the next incarnation; a repeated command is fine."""
        known = self.nodes.get(command.name) or NodeEntry(command.name, command.number)
        if known.token == command.token:
            return Done(changed=False)
        # A request that was delayed must not lock out the incarnation that came after it.
        if known.incarnation != command.above or known.number != command.number:
            return Refused(errors.PRECONDITION_FAILED.code, f"{command.name} has been registered")
        registered = NodeEntry(
            known.name,
            known.number,
            known.incarnation + 1,
            token=command.token,
            lost_below=next_shard_id,
        )
        self._put(registered, writes)
        return Done()

    def _put(self, entry: NodeEntry, writes: Writes) -> None:
        self.nodes[entry.name] = entry
        key = keys.small_key(keys.NODE, cmd.META_SHARD, entry.number)
        writes.put(key, msgspec.msgpack.encode(entry))

    def load(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Load the table from its rows, given as (key, value)."""
        for _, value in rows:
            entry = msgspec.msgpack.decode(value, type=NodeEntry)
            self.nodes[entry.name] = entry
