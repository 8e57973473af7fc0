"""How far the members of a group are, and how old the state of this one may be."""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from contrail_replicator.elections import Elections
from contrail_replicator.messages import DECLINES, RESTORING, SUSPECT, HeartbeatReply
from contrail_replicator.ports import Timings
from contrail_replicator.rounds import Rounds

_PENDING_MAX: Final = 128
_NEVER: Final = float("-inf")
_NOTHING: Final = HeartbeatReply(0, 0, 0, 0, 0)
CURRENT_S: Final = 2.0
"""A member is current if it had everything that was committed within this time."""


@dataclass(slots=True)
class PeerReport:
    """What a leader knows of another member; ``lag`` in entries that are committed."""

    name: str
    lag: int
    applied: int
    current: bool
    """It is whole, and had all committed entries within the last `CURRENT_S`."""
    offline: bool
    """It has not answered lately."""
    restoring: bool
    suspect: bool


@dataclass(slots=True)
class GroupReport:
    """What a member knows of its group. Only a leader knows anything of its ``peers``."""

    term: int
    role: str
    """`leader` or `follower`."""
    leader: str
    """The member that leads as far as this one knows; empty if it knows none."""
    durable: int
    commit: int
    applied: int
    restoring: bool = False
    suspect: bool = False
    peers: list[PeerReport] = field(default_factory=list)
    elections: Mapping[str, int] = field(default_factory=dict)
    """How often this member came to lead: by `timeout`, or by `handover` from the last leader."""
    step_downs: Mapping[str, int] = field(default_factory=dict)
    """How often it ceased to lead, by cause: see `RaftGroup.ended_by`."""


class Member(Protocol):
    """The member itself, as far as its standing depends on it."""

    def leads(self) -> bool:
        """Whether it leads."""

    def commit_index(self) -> int:
        """Highest index known to be committed."""

    def matched(self, peer: str) -> int:
        """Up to where a peer has acknowledged this leader's log."""


class Standing:
    """Notes heartbeats and the answers to them. All fields belong to the event loop.

    A heartbeat says what was committed when it was sent, so a member that has applied that is no
    older than the heartbeat. The time of a heartbeat is that of its arrival, which proves nothing
    after a pause of this process, of the leader or of the network: then old heartbeats arrive
    together. So those that come soon after a pause do not count.
    """

    def __init__(
        self,
        member: Member,
        elections: Elections,
        rounds: Rounds,
        clock: Callable[[], float],
        timings: Timings,
    ) -> None:
        self._member = member  # the member itself
        self._elections = elections  # how it came to lead
        # What a leader's rounds prove.
        self._rounds = rounds
        # Seconds; never goes backwards, and continues while the machine sleeps.
        self._clock = clock
        # How long silence must last to be a pause, and how long heartbeats do not count after it.
        self._quiet_s = timings.election_min_s
        # How long a peer may be silent before it is shown as offline.
        self._offline_s = timings.leader_fallback_s
        self._beat_at = _NEVER  # when the last heartbeat came or was sent
        self._doubt_until = _NEVER  # until when they do not count
        # When the newest heartbeat came whose commit index is applied.
        self._fresh_at = _NEVER
        # (commit index, time) of later heartbeats, ascending; if it is full, new ones are left out.
        self._pending: deque[tuple[int, float]] = deque()
        self._round_commit = 0  # the commit index of the newest heartbeat
        # Of each peer of a leader: the last answer, and when it came.
        self._answers: dict[str, tuple[HeartbeatReply, float]] = {}
        # Of each peer of a leader: when it last had everything that was committed.
        self._current_at: dict[str, float] = {}
        self.elections: Counter[str] = Counter()
        """How often this member came to lead, by cause."""
        self.step_downs: Counter[str] = Counter()
        """How often it ceased to lead, by cause."""

    def note_elected(self) -> None:
        """Count that this member has begun to lead."""
        self.elections["handover" if self._elections.is_transfer else "timeout"] += 1

    def end_term(self) -> None:
        """Forget what was known of the peers: this member leads no longer."""
        self._answers.clear()
        self._current_at.clear()

    def note_beat(self, commit: int, applied: int, *, proves: bool) -> None:
        """Note a heartbeat, received or sent.

        ``proves``: nothing later than ``commit`` had been committed then. A new leader does not
        know that until an entry of its own term is committed.
        """
        now, self._round_commit = self._clock(), commit
        if now - self._beat_at > self._quiet_s:
            self._doubt_until = now + self._quiet_s
        self._beat_at = now
        if not proves or now < self._doubt_until:
            return
        pending = self._pending
        if applied >= commit:
            self._fresh_at = now
            pending.clear()
        elif pending and pending[-1][0] == commit:
            pending[-1] = commit, now
        elif len(pending) < _PENDING_MAX:
            pending.append((commit, now))

    def note_answer(self, peer: str, answer: HeartbeatReply) -> None:
        """Note a peer's answer to a heartbeat of this leader."""
        now = self._clock()
        self._answers[peer] = answer, now
        whole = not answer.flags & ~DECLINES
        if whole and min(answer.durable, answer.matched) >= self._round_commit:
            self._current_at[peer] = now

    def answer_of(self, peer: str) -> HeartbeatReply | None:
        """The newest answer of a peer to a heartbeat of this term."""
        known = self._answers.get(peer)
        return known[0] if known is not None else None

    def staleness_s(self, applied: int) -> float:
        """Seconds since everything was applied that was committed then; inf if never."""
        pending = self._pending
        while pending and pending[0][0] <= applied:
            self._fresh_at = pending.popleft()[1]
        fresh_at = self._fresh_at
        if self._member.leads():
            # What a leader commits says nothing unless a majority follows it.
            fresh_at = min(fresh_at, self._rounds.majority_heard_at())
        return max(self._clock() - fresh_at, 0.0)

    def peers(self) -> list[PeerReport]:
        """Return what a leader knows of the others; of a follower an empty list."""
        return [self._peer(name) for name in self._elections.peers] if self._member.leads() else []

    def _peer(self, name: str) -> PeerReport:
        answer, answered_at = self._answers.get(name, (_NOTHING, _NEVER))
        held = max(self._member.matched(name), min(answer.durable, answer.matched))
        now = self._clock()
        heard, whole = now - answered_at <= self._offline_s, not answer.flags & ~DECLINES
        return PeerReport(
            name,
            max(self._member.commit_index() - held, 0),
            answer.applied,
            current=heard and whole and now - self._current_at.get(name, _NEVER) <= CURRENT_S,
            offline=not heard,
            restoring=bool(answer.flags & RESTORING),
            suspect=bool(answer.flags & SUSPECT),
        )
