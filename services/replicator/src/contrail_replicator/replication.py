"""Sending of a leader's entries to its peers: from memory, or from the disk to those far behind."""

from collections.abc import Callable, Iterable, Sequence

from contrail_replicator.journal import GroupJournal
from contrail_replicator.messages import Append, HeartbeatReply, Message, Reply
from contrail_replicator.ports import LogEntry
from contrail_replicator.progress import FRAME_BYTES, Progress, State


class Replication:
    """The entries that a leader sends, and how far each peer is."""

    def __init__(
        self,
        peers: Iterable[str],
        journal: GroupJournal,
        send: Callable[[str, Message], None],
        heading: Callable[[], tuple[int, int, int]],
        on_needs_snapshot: Callable[[str], None],
    ) -> None:
        """`heading` returns the leader's term, its newest round and its commit index."""
        self.is_damaged = False
        """Whether an entry in memory has changed since it was proposed."""
        self._peers = tuple(peers)  # the other members
        self._journal = journal  # the leader's entries
        self._send = send  # sends a message to a peer
        self._heading = heading  # what every message of a leader begins with
        # Learns of a peer that needs entries which this member does not have.
        self._on_needs_snapshot = on_needs_snapshot
        # Of each peer while this member leads; empty otherwise.
        self._progress: dict[str, Progress] = {}
        # Numbers the reads of the disk, so that a late answer is recognised.
        self._reads = 0

    def start(self, next_index: int) -> None:
        """Begin to lead; nothing is known of the peers' logs."""
        self.is_damaged = False
        self._progress = {peer: Progress(next_index) for peer in self._peers}

    def stop(self) -> None:
        """Stop leading."""
        self._progress.clear()

    def state(self, peer: str) -> State | None:
        """How entries are sent to `peer`; None while this member does not lead."""
        progress = self._progress.get(peer)
        return progress.state if progress is not None else None

    def lagging(self) -> list[str]:
        """The peers that need entries which this member does not have."""
        return [peer for peer, one in self._progress.items() if one.state is State.SNAPSHOT]

    def beat(self) -> None:
        """Note that a heartbeat is sent; peers that are probed get a message with each."""
        for peer, progress in self._progress.items():
            progress.note_beat()
            self._fill(peer, progress)

    def send_new(self) -> None:
        """Send the entry that has been appended, as far as the peers may get it."""
        last = self._journal.last_index
        message, size = None, 0
        for peer, progress in self._progress.items():
            if progress.next_index != last or not progress.is_replicating(last):
                self._fill(peer, progress)
                continue
            if message is None:  # one for all, which the transport encodes once
                data, _, entry_term = self._journal[-1]
                previous_term = self._journal[-2][2]
                term, number, commit = self._heading()
                contents, size = ((entry_term, data),), len(data)
                message = Append(term, number, last - 1, previous_term, commit, contents)
            progress.note_sent(1, size)
            self._send(peer, message)

    def restart(self, peer: str) -> None:
        """Ask a peer again where the logs agree: messages to it may have been lost."""
        progress = self._progress.get(peer)
        if progress is not None and progress.state is not State.SNAPSHOT:
            progress.probe(self._journal.last_index + 1)
            self._fill(peer, progress)

    def note_agreed(self, peer: str, index: int) -> None:
        """Send on after an acknowledgement of all entries up to `index`."""
        progress = self._progress[peer]
        progress.note_agreed(index)
        if progress.next_index <= self._journal.last_index:
            self._fill(peer, progress)

    def note_reply(self, peer: str, reply: Reply) -> None:
        """Send on after an answer."""
        if reply.success:
            self.note_agreed(peer, reply.index)
            return
        progress = self._progress[peer]
        if progress.state is not State.SNAPSHOT:
            progress.probe(self._after_conflict(reply))
        self._fill(peer, progress)

    def note_heartbeat(self, peer: str, reply: HeartbeatReply) -> None:
        """Send again what was lost on the way, as an answer to a heartbeat shows."""
        progress = self._progress[peer]
        if progress.state is State.SNAPSHOT:
            if self._term_at(reply.matched) is None:
                return
            progress.probe(reply.matched + 1)
        elif progress.is_lost(reply.matched):
            progress.probe(reply.matched + 1)
        else:
            progress.note_matched(reply.matched)
            return
        self._fill(peer, progress)

    def _after_conflict(self, reply: Reply) -> int:
        """The first entry that the peer may lack."""
        index = min(max(reply.index, 1), self._journal.last_index + 1)
        # The peer's entries of the conflicting term that this log has too are the same.
        while reply.conflict_term and self._journal.term_at(index) == reply.conflict_term:
            index += 1
        return index

    def _fill(self, peer: str, progress: Progress) -> None:
        journal = self._journal
        while progress.may_send(journal.last_index):
            previous_term = journal.term_at(progress.next_index - 1)
            if previous_term is None:
                self._read(peer, progress)
                return
            entries = journal.slice(progress.next_index, max_bytes=FRAME_BYTES)
            self._send_entries(peer, progress, previous_term, entries)

    def _send_entries(
        self, peer: str, progress: Progress, previous_term: int, entries: Sequence[LogEntry]
    ) -> None:
        term, number, commit = self._heading()
        if progress.state is State.PROBE:
            # It may be sent again because the peer refuses it; that would never end.
            self.is_damaged |= not all(self._journal.is_sound(data) for data, _, _ in entries)
        contents = tuple((entry_term, data) for data, _, entry_term in entries)
        previous = progress.next_index - 1
        progress.note_sent(len(contents), sum(len(data) for _, data in contents))
        self._send(peer, Append(term, number, previous, previous_term, commit, contents))

    def _term_at(self, index: int) -> int | None:
        term = self._journal.term_at(index)
        if term is None and index < self._journal.anchor_index:
            term = self._journal.term_on_disk(index)
        return term

    def _read(self, peer: str, progress: Progress) -> None:
        """Read what the peer needs from the disk; if it is gone there, it needs a snapshot."""
        previous_term = self._term_at(progress.next_index - 1)
        if previous_term is None:
            self._need_snapshot(peer, progress)
            return
        self._reads += 1
        number = progress.reading = self._reads
        next_index = progress.next_index

        def done(entries: Sequence[LogEntry]) -> None:
            # It may have been asked by an earlier leadership, or be overtaken by other answers.
            if self._progress.get(peer) is not progress or progress.reading != number:
                return
            progress.reading = 0
            if progress.next_index != next_index:
                self._fill(peer, progress)
            elif entries:
                self._send_entries(peer, progress, previous_term, entries)
                self._fill(peer, progress)
            else:
                self._need_snapshot(peer, progress)

        self._journal.read_from_disk(next_index, FRAME_BYTES, done)

    def _need_snapshot(self, peer: str, progress: Progress) -> None:
        progress.state = State.SNAPSHOT
        self._on_needs_snapshot(peer)
