"""What a publisher has outstanding, and what becomes of it when the socket is lost. Pure."""

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
"""What a message counts beyond its subject, headers and payload: its place in memory."""


@dataclass(slots=True, eq=False)
class Outgoing(Generic[T]):
    """A message on its way. `key` names it in frames, `about` is the caller's own."""

    key: int
    message: Message
    size: int
    about: T
    attempts: int = 0
    sent: bool = False
    """It was handed to a socket, so it may have been stored."""
    waits: bool = False
    """It was refused for the moment and pauses before it is sent again."""
    first_sent_s: float | None = None
    """When it was sent first, or first after refusals that certainly had no effect."""
    maybe_stored: bool = False
    """An attempt since `first_sent_s` ended without an answer that says what became of it."""
    troubled_since_s: float | None = None
    """When an attempt failed first: by a lost socket, or a refusal for the moment."""


def message_bytes(message: Message) -> int:
    """About how many bytes a message takes in memory and in a frame."""
    size = MESSAGE_BYTES + len(message.subject) + len(message.payload)
    for name, values in (message.headers or {}).items():
        size += sum(len(name) + len(value) for value in values)
    return size


class Outbox(Generic[T]):
    """Messages that have no outcome yet, in the order they were given.

    A message that may have been stored is sent again, if it has an id, for `retry_s` from its first
    sending. That has to be less than the duplicate window of its stream: within it the same id is
    stored once. Any message is given up `patience_s` after its trouble began.
    """

    def __init__(
        self, max_outstanding: int, max_bytes: int, retry_s: float, patience_s: float
    ) -> None:
        self._max_outstanding = max_outstanding
        self._max_bytes = max_bytes
        self._retry_s = retry_s
        self._patience_s = patience_s
        self._bytes = 0
        self._all: dict[int, Outgoing[T]] = {}
        self._unsent: dict[int, Outgoing[T]] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def messages(self) -> list[Outgoing[T]]:
        """Everything without an outcome, oldest first."""
        return list(self._all.values())

    @property
    def has_unsent(self) -> bool:
        """Whether `take` would give something."""
        return bool(self._unsent)

    @property
    def under_way(self) -> bool:
        """Whether an answer is awaited."""
        return any(each.sent for each in self._all.values())

    def has_room(self, size: int) -> bool:
        """Whether another message of `size` bytes may be added; an empty outbox takes any."""
        if not self._all:
            return True
        return len(self._all) < self._max_outstanding and self._bytes + size <= self._max_bytes

    def add(self, key: int, message: Message, size: int, about: T) -> Outgoing[T]:
        """Take a message of `message_bytes`; `key` is greater than any before."""
        added = Outgoing(key, message, size, about)
        self._all[key] = self._unsent[key] = added
        self._bytes += added.size
        return added

    def take(self, max_bytes: int, now_s: float) -> list[Outgoing[T]]:
        """The next messages to send, up to about `max_bytes`; they count as sent from here on."""
        taken: list[Outgoing[T]] = []
        used = 0
        for each in self._unsent.values():
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
        """The message has its outcome; None when it had one already."""
        settled = self._all.pop(key, None)
        if settled is not None:
            self._unsent.pop(key, None)
            self._bytes -= settled.size
        return settled

    def refused(
        self, key: int, error: ContrailError, retries: Retries, chance: float, now_s: float
    ) -> float | None:
        """Seconds after which to `send_again` what was refused; None when the refusal stands.

        As for calls over HTTP: again only when it certainly had no effect or carries an id, and
        only when the refusal may pass; but for as long as the deadlines of the outbox allow.
        """
        found = self._all.get(key)
        if found is None:
            return None
        found.attempts += 1
        if not (isinstance(error, ApiProblem) and error.applied is False):
            found.maybe_stored = True
        elif not found.maybe_stored:
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
        """The pause of a refused message is over."""
        found = self._all.get(key)
        if found is not None and found.waits:
            found.waits = False
            self._unsent[key] = found

    def lost(self, now_s: float) -> list[Outgoing[T]]:
        """The socket is gone: everything is to be sent again, in the order it was given.

        What was sent without an id may have been stored, and is settled as unknown: it is returned.
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
        """What may not be sent again any more, settled, each with its error."""
        over = [each for each in self._all.values() if self._is_over(each, now_s)]
        for each in over:
            self.settle(each.key)
        return [(each, given_up(each, reason)) for each in over]

    def _is_over(self, each: Outgoing[T], now_s: float) -> bool:
        if each.troubled_since_s is not None and now_s - each.troubled_since_s >= self._patience_s:
            return True
        sent_s = each.first_sent_s
        return each.maybe_stored and sent_s is not None and now_s - sent_s >= self._retry_s


def given_up(outgoing: Outgoing[T], reason: ContrailError) -> ContrailError:
    """The error of a message that is not sent any more."""
    if outgoing.first_sent_s is None:  # or everything that was sent was refused
        return reason
    return OutcomeUnknown(f"publish to {outgoing.message.subject}: {reason}")
