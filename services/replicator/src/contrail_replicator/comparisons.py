"""Comparing what the members of a group have made of the same entries.

After each entry the owner has a digest of everything that it has applied. From time to time the
leader asks all members for their digest at one index. A majority is right: a member with another
digest is told that its state is damaged. Without a majority nobody knows who is right, and going on
would multiply a state that may be wrong.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final

from contrail_replicator.messages import DigestAnswer, DigestQuestion, Distrust

KEPT: Final = 4_096
EVERY_ENTRIES: Final = 1_024
EVERY_S: Final = 5.0
Comparing = DigestQuestion | DigestAnswer | Distrust
"""The messages of a comparison."""
COMPARING: Final = (DigestQuestion, DigestAnswer, Distrust)
_NEVER: Final = float("-inf")


class Comparison:
    """The digests of one member, and what its leader has heard of those of the others."""

    def __init__(
        self,
        name: str,
        peers: Sequence[str],
        send: Callable[[str, Comparing], None],
    ) -> None:
        self._name = name  # of this member
        self._peers = tuple(peers)  # the other members
        self._send = send  # sends a message to one of them
        # The newest digests: that of `_last`, and of the indexes before it without a gap.
        self._digests: deque[bytes] = deque(maxlen=KEPT)
        self._last = 0  # the index applied last
        # The leader's question that waits for an entry to be applied: asker, term and index.
        self._question: tuple[str, int, int] | None = None
        # The rest belongs to a leader. The index that it asked for last, in which term, and when.
        self._asked = 0
        self._asked_term = 0  # of `_asked`
        self._asked_at = _NEVER  # of `_asked`
        # The digests there, by member.
        self._answers: dict[str, bytes] = {}
        # Whether members of this leader differ, and no majority of them agrees.
        self._differs = False
        self.on_differs: Callable[[bool], None] = lambda _differs: None
        """Told when that has changed."""

    def note(self, index: int, digest: bytes) -> None:
        """Note the digest after an entry was applied."""
        if index != self._last + 1:
            self._digests.clear()
        self._digests.append(digest)
        self._last = index
        if self._question is not None and index >= self._question[2]:
            peer, term, asked = self._question
            self.answer(peer, term, asked)

    def _digest_at(self, index: int) -> bytes | None:
        back = self._last - index
        return self._digests[-1 - back] if 0 <= back < len(self._digests) else None

    def receive(self, peer: str, message: Comparing, leader: str) -> bool:
        """Handle a message of the current term; True if the state of this member is in the wrong.

        ``leader`` is the member that leads and serves.
        """
        if isinstance(message, DigestAnswer):
            wrong = self.note_answer(peer, message) if leader == self._name else set()
            for name in wrong - {self._name}:
                self._send(name, Distrust(message.term, message.index))
            return self._name in wrong
        if peer != leader:
            return False
        if isinstance(message, DigestQuestion):
            self.answer(peer, message.term, message.index)
        return isinstance(message, Distrust)

    def answer(self, peer: str, term: int, index: int) -> None:
        """Answer a leader's question, now or once the entry is applied; never if that is long ago.

        A newer question replaces one that waits.
        """
        self._question = (peer, term, index) if index > self._last else None
        digest = self._digest_at(index)
        if digest is not None:
            self._send(peer, DigestAnswer(term, index, digest))

    # Of a leader ---------------------------------------------------------------------------------

    def ask_if_due(self, term: int, now: float) -> None:
        """Ask the members of this leader, if there are new entries or they differed before."""
        if term != self._asked_term:
            self._asked_term, self._asked, self._asked_at = term, 0, now
            self._set_differs(False)
        late = now - self._asked_at >= EVERY_S and (self._last > self._asked or self._differs)
        if late or self._last - self._asked >= EVERY_ENTRIES:
            self._ask(term, now)

    def _ask(self, term: int, now: float) -> None:
        digest = self._digest_at(self._last)
        if digest is None:
            return
        self._asked, self._asked_at = self._last, now
        self._answers = {self._name: digest}
        for peer in self._peers:
            self._send(peer, DigestQuestion(term, self._last))

    def note_answer(self, peer: str, answer: DigestAnswer) -> set[str]:
        """Take a member's answer; return the members, perhaps this one, that are in the wrong."""
        if answer.term != self._asked_term or answer.index != self._asked:
            return set()
        self._answers[peer] = answer.digest
        (right, agreeing), *others = Counter(self._answers.values()).most_common()
        is_majority = agreeing > (len(self._peers) + 1) / 2
        self._set_differs(bool(others) and not is_majority)
        if not is_majority:
            return set()
        return {name for name, digest in self._answers.items() if digest != right}

    def _set_differs(self, differs: bool) -> None:
        if differs != self._differs:
            self._differs = differs
            self.on_differs(differs)
