"""The members without a whole log, and when their leader lets them vote again.

A member that was wiped has forgotten its votes and what it acknowledged. It may vote when it has
everything that could have been committed with its help before, which takes three steps in this
order: its acknowledgements no longer count, a majority without it confirms that this leader still
leads, and it holds everything that was committed by then.
"""

from dataclasses import dataclass

from contrail_replicator.messages import RESTORING, HeartbeatReply


@dataclass(slots=True)
class _Step:
    """How far a member is: the round to confirm (0: not sent yet), and what it must hold."""

    round: int = 0
    index: int = 0


class Readmissions:
    """The restoring members of a group, as its leader knows them in its term."""

    def __init__(self) -> None:
        # By member: which step it has reached.
        self._steps: dict[str, _Step] = {}

    def start(self) -> None:
        """Begin a new term: what an earlier leader found does not count."""
        self._steps.clear()

    def note_flags(self, peer: str, flags: int) -> bool:
        """Note a member's flags; True if it no longer votes, so that its answers must not count."""
        if not flags & RESTORING:
            self._steps.pop(peer, None)
            return False
        known = peer in self._steps
        self._steps.setdefault(peer, _Step())
        return not known

    def note_round(self, number: int, commit_index: int) -> None:
        """Note a round that was sent when `commit_index` was committed, with an own entry."""
        for step in self._steps.values():
            if not step.round:
                step.round, step.index = number, commit_index

    def index_for(self, peer: str, reply: HeartbeatReply, confirmed_round: int) -> int | None:
        """The index up to which a member holds everything, if it may vote again."""
        step = self._steps.get(peer)
        if step is None or not 0 < step.round <= confirmed_round:
            return None
        held = min(reply.matched, reply.durable, reply.applied)
        return step.index if held >= step.index else None
