"""One Raft group on one node: proposals in, committed entries out, in order and once each."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from contrail_replicator.comparisons import COMPARING, Comparing, Comparison
from contrail_replicator.journal import GroupJournal
from contrail_replicator.messages import (
    RESTORING,
    SUSPECT,
    Append,
    Message,
    MessageRefusedError,
    Reply,
)
from contrail_replicator.ports import JournalLog, MemberLog, Timings, Transport
from contrail_replicator.proposals import (
    MAX_ENTRY_BYTES,
    CommittedEntry,
    GroupBusyError,
    NotLeaderError,
    Proposal,
)
from contrail_replicator.raft_core import NOW, RaftCore
from contrail_replicator.reads import ReadDone
from contrail_replicator.standing import GroupReport

MAX_OUTSTANDING_BYTES: Final = 8 << 20
NEAR_BYTES: Final = 1 << 20
"""A member that lacks fewer bytes is near enough to take over without being asked to."""
TERM_LEAP_MAX: Final = 1 << 32
"""How far a peer's term may be ahead: more elections than there have been in its lifetime."""
_TAIL_BYTES: Final = 8 << 20
_PIECE: Final = 64
_GROUPED: Final = 64
_GROUPED_BYTES: Final = 32 << 10
_DEFAULT_TIMINGS: Final = Timings()
# It goes on while the machine sleeps, so that a leader that slept does not believe old answers.
_awake_clock = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class RaftGroup:
    """A member of a group. Everything runs on the event loop thread; nothing here blocks.

    `applied_index` is the last index in the store. `on_commit` gets the entries after it, one by
    one, and must not raise. It returns whether it takes the next entry now; after False the group
    hands out nothing until `resume`. `on_role(True)` is called when this node leads and has handed
    out all entries of earlier terms, `on_role(False)` when it no longer leads.

    A proposal whose leader loses office keeps its context: as a follower the member learns the
    outcome. `on_replaced` gets the contexts of proposals in whose place another entry was
    committed, so they never will be. `on_lost` gets those whose outcome this node will not learn.
    `on_needs_snapshot` gets the peers that need entries which this leader's node no longer has.
    """

    ended_by = ""
    """Why this member ceased to lead last: `newer_term`, `no_quorum`, `resigned` or `unfit`."""
    _resigning = False  # True inside `resign`
    _kept = False  # while the owner wants the applied index to stay: see `keep_applied`

    def __init__(  # noqa: PLR0913
        self,
        *,
        group_id: int,
        node_id: str,
        peers: Sequence[str],
        log: JournalLog,
        transport: Transport,
        applied_index: int,
        on_commit: Callable[[CommittedEntry], bool],
        on_role: Callable[[bool], None],
        on_lost: Callable[[list[object]], None],
        on_replaced: Callable[[list[object]], None] | None = None,
        on_needs_snapshot: Callable[[str], None] = lambda _peer: None,
        member_log: MemberLog | None = None,
        is_sound: Callable[[bytes], bool] = lambda _data: True,
        clock: Callable[[], float] | None = None,
        timings: Timings = _DEFAULT_TIMINGS,
    ) -> None:
        """Read the group's log. `peers` are the other members' ids.

        `member_log` is needed in a group of several members, to read what has left the memory and
        to keep flags. `is_sound` says whether an entry may be logged. Without `on_replaced`,
        `on_lost` gets its contexts too. Raises LogGapError if entries before the log are missing.
        """
        self._group_id = group_id  # all members use the same number
        self._log = log  # the node's log, shared with its other groups
        self._transport = transport  # to the peers; it calls `receive` and `link_changed`
        # Gets a committed entry, and returns whether it takes the next one now. Like the others,
        # only `_settle` and its helpers call it, outside the core, because a callback may propose.
        self._on_commit = on_commit
        self._on_role = on_role  # learns that this node leads, or no longer does
        self._on_lost = on_lost  # gets the contexts of proposals with an unknown outcome
        self._on_replaced = on_replaced or on_lost  # those of proposals that never will be
        self._peers = frozenset(peers) - {node_id}  # the other members
        self._alone = not self._peers  # true in a group of one, which needs no elections
        self._clock = clock = clock or (time.monotonic if self._alone else _awake_clock)  # seconds
        self._outcome_s = timings.outcome_s  # for how long a former leader waits for outcomes
        self._unknown_at: float | None = None  # when that ends; None while it leads
        self._tail_bytes = 0 if self._alone else _TAIL_BYTES  # kept in memory for followers
        self._running = False  # not before `start`, after `stop`, and while the log fails
        self._stopped = False  # whether `stop` was called
        self._paused = False  # True from an `on_commit` that returned False until `resume`
        self._put_off = 0  # bytes of entries received since it last handed out any
        self._settling = False  # inside `_settle`: a callback must hand out no next entry
        self._led_term = 0  # the term in which `on_role` said that it leads; 0 while it does not
        self._applied_index = applied_index  # the last one handed to `on_commit`; <= commit index
        self._proposals: dict[int, Proposal] = {}  # without an outcome, by index; of all terms
        self._outstanding_bytes = 0  # the total size of `_proposals`
        recovered = log.attach(group_id, self.handle_durable)
        # The group's part of the log, and the copies in memory that peers and `on_commit` read.
        self._journal = GroupJournal(group_id, log, recovered, applied_index, member_log)
        self._journal.is_sound = is_sound
        # Elections and commits.
        self._core = RaftCore(
            node_id,
            peers,
            self._journal,
            partial(transport.send, group_id),
            lambda: self._applied_index,
            clock,
            timings,
            on_needs_snapshot,
        )
        self.comparison = Comparison(node_id, tuple(self._peers), partial(transport.send, group_id))
        """Of what the members have applied; the owner notes the own digests."""
        self._journal.trim_to_size(applied_index, self._tail_bytes)
        self._held = bool(self._journal.flags & SUSPECT)  # then nothing is handed out
        self._unfit = bool(self._journal.flags)  # as `_settle` has last seen them
        transport.attach(group_id, self)

    @property
    def is_leader(self) -> bool:
        """True if this node leads and has handed out all entries of earlier terms."""
        return self._led_term > 0

    @property
    def is_alone(self) -> bool:
        """True in a group of one."""
        return self._alone

    @property
    def leader(self) -> str:
        """Id of the member that leads as far as this one knows; empty if it knows none."""
        return self._core.leader()

    @property
    def term(self) -> int:
        """The current term."""
        return self._core.term()

    @property
    def applied_index(self) -> int:
        """Index of the last entry handed to `on_commit`."""
        return self._applied_index

    @property
    def commit_index(self) -> int:
        """Highest index known to be committed."""
        return self._core.commit_index()

    @property
    def durable_index(self) -> int:
        """Highest index that is durable on this node."""
        return self._journal.durable_index

    @property
    def last_index(self) -> int:
        """Index of the newest entry, durable or not."""
        return self._journal.last_index

    @property
    def outstanding_bytes(self) -> int:
        """Bytes of this node's proposals that are not handed out yet."""
        return self._outstanding_bytes

    @property
    def flags(self) -> int:
        """What this member is unfit for: `messages.RESTORING`, `messages.SUSPECT`, or 0."""
        return self._journal.flags

    @property
    def flags_are_durable(self) -> bool:
        """Whether the disk has the flags."""
        return self._journal.flags_are_durable

    @property
    def lagging(self) -> list[str]:
        """While this member leads: the peers that need entries which this node no longer has."""
        return self._core.lagging()

    @property
    def may_hand_over(self) -> bool:
        """Whether this member leads and there is a peer that is fit to lead."""
        return self._core.leads() and self._core.has_fit_peer()

    def start(self) -> None:
        """Start to take part in the group. A group of one elects itself at once."""
        self._running = True
        if self._alone:
            self._core.campaign()
        self.tick()

    def propose(self, data: bytes, context: object) -> int:
        """Append an entry of up to 4 MiB and return its index.

        Raises NotLeaderError or GroupBusyError, and has then appended nothing. Otherwise `context`
        is returned exactly once: with the committed entry, or by `on_lost`.
        """
        size = len(data)
        if not 0 < size <= MAX_ENTRY_BYTES:
            raise ValueError(f"an entry must have 1 to {MAX_ENTRY_BYTES} bytes, not {size}")
        term, outstanding = self._led_term, self._outstanding_bytes
        if not self._alone and self._core.handover is not None:
            raise GroupBusyError(f"group {self._group_id} is handing over")
        # One entry may always be open, however large it is.
        if outstanding and outstanding + size > MAX_OUTSTANDING_BYTES:
            raise GroupBusyError(f"group {self._group_id}")
        try:
            # A callback may propose while `_settle` has yet to report that leadership has ended:
            # `_led_term` is stale then, and the core refuses.
            index = self._core.propose(data, term) if term else None
        except BlockingIOError as error:
            raise GroupBusyError(f"group {self._group_id}: {error}") from error
        except OSError as error:
            raise NotLeaderError(f"group {self._group_id}: {error}") from error
        if index is None:
            raise NotLeaderError(f"group {self._group_id}")
        if not self._alone and index in self._proposals:  # of an earlier leadership, and cut since
            self._lose([index])
            outstanding = self._outstanding_bytes
        self._proposals[index] = Proposal(term, size, context)
        self._outstanding_bytes = outstanding + size
        return index

    def handle_durable(self, position: int, index: int) -> None:
        """Note that the log's first `position` records of this group are durable, up to `index`."""
        if self._running:
            self._journal.handle_durable(position, index)
            if self._alone:
                self._core.commit()
                self._settle()
            else:
                self._core.handle_durable()
                self._go_on()

    def tick(self) -> None:
        """Do due elections, heartbeats and commits. Must be called every 25 ms.

        A group of one has nothing to be late with, and may be called every 50 ms.
        """
        if self._running and self._clock() > self._core.due:
            if not self._alone:
                self._core.tick_timers()
                self._hand_on_if_unfit()
                if self.is_leader:
                    self.comparison.ask_if_due(self.term, self._clock())
            self._core.tick()
            self._settle()
            if self._unknown_at is not None and self._clock() >= self._unknown_at:
                self._lose_uncommitted()
            self._core.note_done(self._unknown_at)

    def receive(self, peer: str, message: Message) -> None:
        """Handle a message from a peer.

        Raises MessageRefusedError for one that no member can have sent, and LogDivergedError if
        committed entries differ; this replica must then stop.
        """
        if peer not in self._peers:
            raise MessageRefusedError(f"group {self._group_id}: {peer} is not a member")
        if message.term > self._journal.term + TERM_LEAP_MAX:
            raise MessageRefusedError(
                f"group {self._group_id}: {peer} speaks of term {message.term}; it is {self.term}"
            )
        if isinstance(message, Append):
            for _, data in message.entries:
                # Before the log has it: a bit that flips in the leader's memory must not reach all.
                if not self._journal.is_sound(data):
                    raise MessageRefusedError(
                        f"group {self._group_id}: {peer} sent an entry that is not what was "
                        "proposed"
                    )
                self._put_off += len(data)
        if not self._running:
            return
        if self._core.take_usual(peer, message):
            if isinstance(message, Reply):  # entries go on when they are durable
                self._go_on()
            return
        if isinstance(message, COMPARING):
            self._handle_comparison(peer, message)
        else:
            self._core.receive(peer, message)
        self._core.tick()
        self._settle()

    def _go_on(self) -> None:
        """Hand out what has become committed; a follower does so in groups, in its next tick.

        A few small entries in a row cost a fraction of what they cost one by one.
        """
        core = self._core
        if core.leads():
            urgent = core.commit()
        else:
            waiting = core.commit_index() - self._applied_index
            urgent = waiting >= _GROUPED or self._put_off >= _GROUPED_BYTES
            if waiting:
                core.due = NOW
        # What an unfit member may do changes with what it holds, durably.
        if urgent or self._unfit:
            self._settle()

    def resume(self) -> None:
        """Hand out entries again, after `on_commit` has returned False."""
        if not self._stopped:
            self._paused = False
            self._settle()

    def keep_applied(self, kept: bool) -> None:
        """Hand out nothing while ``kept``, so that the applied index stays as it is."""
        self._kept = kept
        self._settle()

    def link_changed(self, peer: str, connected: bool) -> None:
        """Note whether messages can be sent to a peer."""
        self._core.link_changed(peer, connected)

    def trim(self, index: int, at_most: int = 1 << 62) -> bool:
        """Drop entries up to `index` (at most the applied index) from memory.

        Only the oldest `at_most` of them; returns whether these were all.
        """
        last = min(index, self._applied_index)
        stop = min(last, self._journal.anchor_index + at_most)
        self._journal.trim(stop)
        return stop >= last

    def read_index(self, done: ReadDone) -> None:
        """Call `done(True)` once this member has handed out all that was committed until now.

        That takes a round: a majority must confirm that this member still leads. `done(False)`
        means that it does not; nothing may be read then.
        """
        if not self._core.leads() or self._journal.flags or not self._running:
            done(False)
        elif self._alone:
            done(self.is_leader)
        else:
            self._core.read_index(done)

    def heard_majority_within(self, seconds: float) -> bool:
        """Whether a majority has followed this leader within the last `seconds`, to its knowledge.

        If not, another leader may have removed what this one still has.
        """
        return (self._alone and self.is_leader) or self._core.heard_majority_within(seconds)

    def staleness_s(self) -> float:
        """Seconds since all that was committed then was handed out; inf if that is unknown.

        The state of an unfit member counts as unknown.
        """
        if self._alone:
            return 0.0
        fit = self._running and not self._journal.flags
        return self._core.standing.staleness_s(self._applied_index) if fit else float("inf")

    def report(self) -> GroupReport:
        """What this member knows of the group."""
        core, flags = self._core, self._journal.flags
        return GroupReport(
            core.term(),
            "leader" if self.is_leader else "follower",
            core.leader(),
            self.durable_index,
            core.commit_index(),
            self._applied_index,
            restoring=bool(flags & RESTORING),
            suspect=bool(flags & SUSPECT),
            peers=core.standing.peers(),
            elections=core.standing.elections,
            step_downs=core.standing.step_downs,
        )

    def hand_over(self, target: str | None = None) -> bool:
        """Begin to make `target`, or the best peer, the leader; False if there is none fit for it.

        Proposals are refused as busy until that has happened, or for at most 0.6 s.
        """
        return self.is_leader and not self._alone and self._core.hand_over(target)

    @property
    def is_handing_over(self) -> bool:
        """Whether proposals are refused because another member is about to lead."""
        return self._core.handover is not None

    def may_take_over(self, peer: str) -> bool:
        """Whether this member leads, and `peer` is whole, answers, wants to, and lacks little."""
        return self.is_leader and self._core.lags_little(peer, NEAR_BYTES)

    def decline(self, declines: bool = True) -> None:
        """Let no leader hand over to this member while its owner ``declines``."""
        self._core.willingness.owner_declines = declines

    def install(self, index: int, term: int) -> bool:
        """Go on after a snapshot, whose state the store has durably up to `index`.

        False if the own log has that entry and is left alone: what follows it there may have been
        acknowledged, and must stay. Changes nothing on a leader without that entry, and for an
        index before the applied one.
        """
        if index < self._applied_index:
            return False
        reset = self._core.install(index, term)
        if not (reset or self._core.holds(index, term)):
            return False
        self._applied_index = index
        self._lose([at for at in self._proposals if at <= index])
        self._settle()
        return reset

    def vote_only_if(self, is_complete: Callable[[], bool]) -> None:
        """While restoring, vote again only when ``is_complete()`` says so as well."""
        self._core.is_complete = is_complete

    def mark_suspect(self, suspect: bool) -> None:
        """Note, durably, whether this member's state is damaged or out of date.

        Until it is whole again, nothing is handed out, and it leads only to hand on. Raises OSError
        if the log has failed; nothing is handed out then either.
        """
        self._held = True
        flags = self._journal.flags
        self._journal.save_flags(flags | SUSPECT if suspect else flags & ~SUSPECT)
        self._settle()

    def resign(self) -> None:
        """Give up leadership. A group of one leads again only after `start`."""
        self._resigning = True
        self._core.step_down()
        self._settle()
        self._resigning = False

    def handle_log_failure(self) -> None:
        """Resign and drop all entries that are not durable, because the node's log failed.

        The group takes part again after `handle_log_recovered`.
        """
        self._running = False
        self._core.step_down()
        self._journal.cut_to_durable()
        self._core.forget_matched()
        self._settle()
        self._lose_uncommitted()  # it hears of no outcome before its log has recovered

    def handle_log_recovered(self) -> None:
        """Start again, because the node's log accepts records again."""
        with suppress(OSError):  # the log has failed again, and will report it
            self._journal.restate_end()
            self.start()

    def stop(self) -> None:
        """Leave the group for good. Committed entries that wait for `resume` are not handed out."""
        self._running = False
        self._stopped = self._paused = True
        self._core.step_down()
        self._settle()
        self._transport.detach(self._group_id)
        self._log.detach(self._group_id)

    def _settle(self) -> None:
        """Report the commits and role changes that the last call into the core has caused.

        Callbacks run here, outside the core, so that they may propose.
        """
        self._core.due = NOW
        if self._settling:
            return
        self._settling = True
        if not self._alone:
            flags = self._journal.flags
            self._unfit = bool(flags)
            self._held = self._held and bool(flags & SUSPECT)
        try:
            if self._applied_index < self._core.commit_index():
                self._hand_out()
            if self._unfit or self._core.led_term() != self._led_term:
                self._report_role()
            if not self._core.reads.is_empty:
                self._answer_reads()
        finally:
            self._settling = False

    def _hand_out(self) -> None:
        """Hand out committed entries, until the owner wants a pause."""
        core, journal, self._put_off = self._core, self._journal, 0
        while not (self._paused or self._held or self._kept):
            # In pieces, because entries leave the memory after each.
            applied = self._applied_index
            piece = journal.slice(applied + 1, min(core.commit_index() - applied, _PIECE))
            for data, index, term in piece:
                self._applied_index = index
                context = self._take_context(index, term) if self._proposals else None
                more = self._on_commit(CommittedEntry(index, term, data, context))
                if self._stopped or not more:
                    self._paused = True
                if self._paused or self._held or self._kept:
                    break
            journal.trim_to_size(self._applied_index, self._tail_bytes)
            if self._applied_index >= core.commit_index():
                return

    def _report_role(self) -> None:
        term = self._core.led_term()
        if not self._alone and term and self._journal.flags:
            term = 0  # it leads only to hand on
        if self._led_term and term != self._led_term:
            self.ended_by = self._cause_of_end()
            self._core.standing.step_downs[self.ended_by] += 1
            self._led_term = 0
            self._on_role(False)
            if self._alone or self._stopped:
                self._lose_uncommitted()
            else:
                self._unknown_at = self._clock() + self._outcome_s
        # The first entry of the term is committed after everything of earlier terms.
        if term and not self._led_term and self._is_caught_up():
            self._led_term = term
            # What is open from earlier terms was cut from this log. A later leader may commit it
            # all the same, but this one does not wait for that.
            if self._proposals:
                self._lose_uncommitted()
            self._core.standing.note_elected()
            self._on_role(True)

    def _cause_of_end(self) -> str:
        """Why this member leads no longer: see `ended_by`."""
        newer = self._core.term() > self._led_term
        ended = "no_quorum" if self._running and not self._resigning else "resigned"
        return "newer_term" if newer else "unfit" if self._journal.flags else ended

    def _hand_on_if_unfit(self) -> None:
        """Look for a better leader, if this one may not serve, or its disk is slow."""
        core = self._core
        if not core.leads() or core.handover is not None:
            return
        if core.is_damaged:
            # No member can take over from it: they refuse an entry of this one.
            self.resign()
        elif self._journal.flags:
            # It hands out nothing, but what it has may be acknowledged and must be committed first.
            if core.commit_index() >= core.first_index_of_term():
                core.hand_over(None)
        elif self.is_leader and core.willingness.must_hand_over():
            core.hand_over(None)

    def _handle_comparison(self, peer: str, message: Comparing) -> None:
        if message.term != self.term or self._journal.flags & SUSPECT:
            return
        if self.comparison.receive(peer, message, self.leader):
            with suppress(OSError):  # the log has failed; the next comparison says it again
                self.mark_suspect(True)

    def _is_caught_up(self) -> bool:
        """Whether all entries of earlier terms are handed out; this member leads."""
        return self._applied_index >= self._core.first_index_of_term()

    def _answer_reads(self) -> None:
        reads, leads = self._core.reads, self._core.leads()
        for done in reads.take_ready(self._applied_index) if leads else reads.take_all():
            done(leads)

    def _take_context(self, index: int, term: int) -> object | None:
        """Return the context of the proposal that became a committed entry."""
        proposal = self._proposals.pop(index, None)
        if proposal is None:
            return None
        self._outstanding_bytes -= proposal.size
        if proposal.term == term:
            return proposal.context
        self._on_replaced([proposal.context])
        return None

    def _lose_uncommitted(self) -> None:
        """Return the proposals of earlier terms that are not known as committed."""
        self._unknown_at = None
        known = 0 if self._stopped else self._core.commit_index()
        term = self._core.led_term()
        self._lose([at for at, one in self._proposals.items() if at > known and one.term != term])

    def _lose(self, indexes: list[int]) -> None:
        lost = [self._proposals.pop(index) for index in indexes]
        self._outstanding_bytes -= sum(one.size for one in lost)
        if lost:
            self._on_lost([one.context for one in lost])
