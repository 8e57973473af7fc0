"""The messages of a publisher that have no outcome yet, and the rules for retries. Pure."""

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from contrail_client.calls import Retries
from contrail_client.errors import ApiProblem, ContrailError, OutcomeUnknown
from contrail_client.models import Message

T = TypeVar("T")

MAX_OUTSTANDING: Final = 1_000
MAX_BYTES: Final = 16 << 20
RETRY_S: Final = 60.0

MESSAGE_BYTES: Final = 256
"""Bytes that a message counts in addition to its subject, headers and payload."""


@dataclass(slots=True, eq=False)
class Outgoing(Generic[T]):
    """A message in flight. `key` names it in frames; `about` belongs to the caller."""

    key: int
    message: Message
    size: int
    about: T
    attempts: int = 0
    sent: bool = False
    """Whether the current socket has it, so that it may have been stored."""
    waits: bool = False
    """Whether it was refused temporarily and waits for `send_again`. Then it is in no queue."""
    first_sent_s: float | None = None
    """When it was first sent, not counting attempts that certainly had no effect."""
    maybe_stored: bool = False
    """Whether an attempt since `first_sent_s` may have stored it: its outcome is unknown."""
    troubled_since_s: float | None = None
    """When an attempt first failed: the socket was lost, or the server refused temporarily."""


def message_bytes(message: Message) -> int:
    """About how many bytes a message takes in memory and in a frame."""
    size = MESSAGE_BYTES + len(message.subject) + len(message.payload)
    for name, values in (message.headers or {}).items():
        size += sum(len(name) + len(value) for value in values)
    return size


class Outbox(Generic[T]):
    """Messages that have no outcome yet, in the order in which they were added.

    A message that may have been stored is sent again only if it has an id, and only for `retry_s`
    after it was first sent. Keep `retry_s` below the duplicate window of the stream, in which an id
    is stored once. Every message is given up `patience_s` after its first failure.
    """

    def __init__(
        self, max_outstanding: int, max_bytes: int, retry_s: float, patience_s: float
    ) -> None:
        self._max_outstanding = max_outstanding
        self._max_bytes = max_bytes
        self._retry_s = retry_s
        self._patience_s = patience_s
        # The sum of the sizes in `_all`.
        self._bytes = 0
        # All messages without an outcome, by key. Keys ascend, so this is the publishing order.
        self._all: dict[int, Outgoing[T]] = {}
        # Those of them to send on this socket, in the same order.
        self._unsent: dict[int, Outgoing[T]] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def messages(self) -> list[Outgoing[T]]:
        """All messages without an outcome, oldest first."""
        return list(self._all.values())

    @property
    def has_unsent(self) -> bool:
        """Whether `take` would return messages."""
        return bool(self._unsent)

    @property
    def under_way(self) -> bool:
        """Whether a message has been sent and not answered."""
        return any(each.sent for each in self._all.values())

    def has_capacity(self, size: int) -> bool:
        """Whether another message of `size` bytes may be added; an empty outbox takes any."""
        if not self._all:
            return True
        return len(self._all) < self._max_outstanding and self._bytes + size <= self._max_bytes

    def add(self, key: int, message: Message, size: int, about: T) -> Outgoing[T]:
        """Add a message; `size` is its `message_bytes`, and `key` is greater than all before it."""
        added = Outgoing(key, message, size, about)
        self._all[key] = self._unsent[key] = added
        self._bytes += added.size
        return added

    def take(self, max_bytes: int, now_s: float) -> list[Outgoing[T]]:
        """Remove and return the next messages to send, about `max_bytes` of them; at least one.

        They count as sent from `now_s` on.
        """
        taken: list[Outgoing[T]] = []
        used = 0
        for each in self._unsent.values():
            # At least one, even if it is larger: otherwise it would never be sent.
            if taken and used + each.size > max_bytes:
                break
            taken.append(each)
            used += each.size
        for each in taken:
            del self._unsent[each.key]
            each.sent = True
            if each.first_sent_s is None:
                each.first_sent_s = now_s
        return taken

    def settle(self, key: int) -> Outgoing[T] | None:
        """Remove a message that has its outcome; None if it had one already."""
        settled = self._all.pop(key, None)
        if settled is not None:
            self._unsent.pop(key, None)
            self._bytes -= settled.size
        return settled

    def refused(
        self, key: int, error: ContrailError, retries: Retries, chance: float, now_s: float
    ) -> float | None:
        """Seconds after which to `send_again` a refused message; None if the refusal is final.

        The rules of calls over HTTP apply: a message is sent again only if the refusal may pass,
        and if it certainly had no effect or the message has an id. The deadlines of the outbox
        replace the number of attempts.
        """
        found = self._all.get(key)
        if found is None:
            return None
        found.attempts += 1
        if not (isinstance(error, ApiProblem) and error.applied is False):
            found.maybe_stored = True
        elif not found.maybe_stored:
            # No attempt had an effect, so the time for retries starts with the next one.
            found.first_sent_s = None
        if found.troubled_since_s is None:
            found.troubled_since_s = now_s
        repeatable = found.message.msg_id is not None
        pause_s = retries.pause_while(error, repeatable, found.attempts, chance)
        if pause_s is None or self._is_over(found, now_s + pause_s):
            return None
        found.waits = True
        found.sent = False
        return pause_s

    def send_again(self, key: int) -> None:
        """Queue a refused message again: its pause is over."""
        found = self._all.get(key)
        if found is not None and found.waits:
            found.waits = False
            self._unsent[key] = found

    def lost(self, now_s: float) -> list[Outgoing[T]]:
        """Queue all messages again, in their order: the socket is lost.

        Messages that were sent without an id may have been stored, and cannot be sent again. They
        are settled and returned; their outcome is unknown.
        """
        unknown = [each for each in self._all.values() if each.sent and each.message.msg_id is None]
        for each in unknown:
            self.settle(each.key)
        for each in self._all.values():
            each.maybe_stored |= each.sent
            each.waits = each.sent = False
            if each.troubled_since_s is None:
                each.troubled_since_s = now_s
        self._unsent = dict(self._all)
        return unknown

    def expired(
        self, now_s: float, reason: ContrailError
    ) -> list[tuple[Outgoing[T], ContrailError]]:
        """Settle the messages whose time for retries is over; returns each with its error."""
        over = [each for each in self._all.values() if self._is_over(each, now_s)]
        for each in over:
            self.settle(each.key)
        return [(each, given_up(each, reason)) for each in over]

    def _is_over(self, each: Outgoing[T], now_s: float) -> bool:
        if each.troubled_since_s is not None and now_s - each.troubled_since_s >= self._patience_s:
            return True
        sent_s = each.first_sent_s
        # Later, the stream may have forgotten the id, and would store the message a second time.
        return each.maybe_stored and sent_s is not None and now_s - sent_s >= self._retry_s


def given_up(outgoing: Outgoing[T], reason: ContrailError) -> ContrailError:
    """The error of a message that is not sent any more; `reason` if it certainly is not stored."""
    if outgoing.first_sent_s is None:  # never sent, or each attempt was refused without effect
        return reason
    return OutcomeUnknown(f"publish to {outgoing.message.subject}: {reason}")
