"""What is proposed to a group, and what becomes of it."""

from typing import Final

import msgspec

MAX_ENTRY_BYTES: Final = 4 << 20


class NotLeaderError(Exception):
    """This node is not the leader, so nothing was appended."""


class GroupBusyError(Exception):
    """Nothing was appended: too many bytes wait to be committed, or the leader is handing over."""


class CommittedEntry(msgspec.Struct, eq=False):
    """An entry to apply. `data` is empty for a leader's first entry of its term.

    `context` is the argument of `propose`. It is None on all nodes but the proposing one, and there
    too if the node has lost track of the proposal.
    """

    index: int
    term: int
    data: bytes
    context: object | None


class Proposal(msgspec.Struct, eq=False):
    """An entry that this node has proposed and whose outcome its owner waits for."""

    term: int
    size: int
    context: object
