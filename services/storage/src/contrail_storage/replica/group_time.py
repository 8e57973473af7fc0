"""The log time of a group with several members, stamped by the one that leads.

A term continues from the last applied entry, and takes the wall clocks of the nodes once a majority
of them is known: the lower median. Then log time follows the boot-time clock, and the median as
`LogClock` says.

What a new leader's clocks are ahead of the time that it knows to have passed is a *jump*. Ages are
measured in log time. Duplicate windows and deadlines of deliveries are measured in *elapsed* time,
which is log time without all jumps of the group: an id must not be forgotten because the clocks of
the nodes were set.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import structlog

from contrail_common.timeunits import NS_PER_S
from contrail_storage.core.chain import Chain
from contrail_storage.core.log_clock import LogClock, disagreement, lower_median
from contrail_storage.replica.log_time import Clocks

LOOK_S: Final = 1.0
"""How often the clocks of the members are compared."""
_FRESH_NS: Final = 5 * NS_PER_S
_log: Final = structlog.get_logger("contrail.clock")


class PeerClocks:
    """The wall clocks of the other nodes. Used on the event loop only."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        # By node: its wall clock as a heartbeat or an answer told it, and the boot-time clock then.
        self._noted: dict[str, tuple[int, int]] = {}

    def note(self, name: str, wall_ns: int) -> None:
        """Note the wall clock of a node, as it has just told."""
        self._noted[name] = wall_ns, self._clocks.boot_ns()

    def walls_ns(self, names: Iterable[str]) -> list[int]:
        """The wall clocks of this node (first) and of those ``names`` that were heard lately.

        Each is what its node would read now, or earlier by the time of a transmission.
        """
        boot_ns = self._clocks.boot_ns()
        walls = [self._clocks.wall_ns()]
        for name in names:
            wall_ns, noted_ns = self._noted.get(name, (0, 0))
            if noted_ns and boot_ns - noted_ns <= _FRESH_NS:
                walls.append(wall_ns + boot_ns - noted_ns)
        return walls


class GroupTime:
    """Log time of one group on one member. Used on the event loop only."""

    def __init__(
        self,
        peers: Sequence[str],
        clocks: Clocks,
        peer_clocks: PeerClocks,
        applied: Callable[[], Chain],
        jump_max_ns: int,
    ) -> None:
        """``applied`` returns what the group has applied.

        ``jump_max_ns``: how far log time may jump although the clocks of the members differ.
        """
        self.doubt = ""
        """Why the wall clocks are not used while this node leads; empty when they are."""
        self.skipped_ns = 0
        """The sum of all jumps, as of the next entry of this leader."""
        self._peers = tuple(peers)
        self._majority = (len(self._peers) + 1) // 2 + 1
        self._clocks = clocks
        self._peer_clocks = peer_clocks
        self._applied = applied
        self._jump_max_ns = jump_max_ns
        # The time of the entry that was applied last, and the boot-time clock then.
        self._seen = applied().time_ns, clocks.boot_ns()
        # While this node leads.
        self._clock: LogClock | None = None
        # The wall clock that it follows, minus the boot-time clock.
        self._origin_ns = 0
        # Whether the wall clocks were taken in this term.
        self._taken = False

    def note_applied(self) -> None:
        """Note that an entry has just been applied."""
        self._seen = self._applied().time_ns, self._clocks.boot_ns()

    def begin_term(self) -> None:
        """Continue from the last entry: this node has begun to lead."""
        boot_ns, known_ns = self._clocks.boot_ns(), self._known_ns()
        self.skipped_ns = self._applied().skipped_ns
        self._clock, self._origin_ns = LogClock(known_ns, boot_ns), known_ns - boot_ns
        self._taken = False
        self.look()

    def end_term(self) -> None:
        """Note that this node does not lead any more."""
        self._clock, self.doubt = None, ""

    def now_ns(self) -> int:
        """Log time now; never goes back while this node leads."""
        if self._clock is None:
            return self._known_ns()
        boot_ns = self._clocks.boot_ns()
        return self._clock.read(self._origin_ns + boot_ns, boot_ns)

    def elapsed_ns(self) -> int:
        """Elapsed time now: log time without jumps."""
        skipped_ns = self._applied().skipped_ns if self._clock is None else self.skipped_ns
        return self.now_ns() - skipped_ns

    def look(self) -> None:
        """Follow the wall clocks of the nodes, while this node leads; call it once a second."""
        walls = self._peer_clocks.walls_ns(self._peers)
        if self._clock is None or len(walls) < self._majority:
            return
        boot_ns, wall_ns = self._clocks.boot_ns(), lower_median(walls)
        if not self._taken:
            now_ns = self.now_ns()
            before, self.doubt = (
                self.doubt,
                disagreement(now_ns, walls, self._majority, self._jump_max_ns),
            )
            if self.doubt:
                if not before:
                    _log.warning("clock_disagrees", reason=self.doubt)
                return
            self._taken = True
            if wall_ns > now_ns:
                self._clock = LogClock(wall_ns, boot_ns)
                self.skipped_ns += wall_ns - now_ns
        self._origin_ns = wall_ns - boot_ns

    def _known_ns(self) -> int:
        """The last entry's time and what has passed since it was applied: the least it can be."""
        time_ns, boot_ns = self._seen
        applied_ns = self._applied().time_ns
        if not applied_ns:  # nothing has happened that could be too early
            return lower_median(self._peer_clocks.walls_ns(self._peers))
        passed_ns = self._clocks.boot_ns() - boot_ns if time_ns == applied_ns else 0
        return applied_ns + max(passed_ns, 0)
