"""What a publisher has outstanding, and what becomes of it when the socket is lost. Pure."""

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from contrail_client.calls import Retries
from contrail_client.errors import ContrailError, OutcomeUnknown
from contrail_client.models import Message

T = TypeVar("T")

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


def message_bytes(message: Message) -> int:
    """About how many bytes a message takes in memory and in a frame."""
    size = MESSAGE_BYTES + len(message.subject) + len(message.payload)
    for name, values in (message.headers or {}).items():
        size += sum(len(name) + len(value) for value in values)
    return size


class Outbox(Generic[T]):
    """Messages that have no outcome yet, in the order they were given.

    A message with an id may be sent again for `retry_s` from its first sending, which has to be
    less than the duplicate window of its stream: within it the same id is stored once.
    """

    def __init__(self, max_outstanding: int, max_bytes: int, retry_s: float) -> None:
        self._max_outstanding = max_outstanding
        self._max_bytes = max_bytes
        self._retry_s = retry_s
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
        self, key: int, error: ContrailError, retries: Retries, chance: float
    ) -> float | None:
        """Seconds after which to `send_again` what was refused; None when the refusal stands.

        As for calls over HTTP: again only when it certainly had no effect or carries an id, and
        only when the refusal may pass.
        """
        found = self._all.get(key)
        if found is None:
            return None
        found.attempts += 1
        repeatable = found.message.msg_id is not None
        pause_s = retries.pause_after(error, repeatable, found.attempts, chance)
        if pause_s is not None:
            found.waits = True
            found.sent = False
            if not repeatable:  # then the refusal said that nothing happened
                found.first_sent_s = None
        return pause_s

    def send_again(self, key: int) -> None:
        """The pause of a refused message is over."""
        found = self._all.get(key)
        if found is not None and found.waits:
            found.waits = False
            self._unsent[key] = found

    def lost(self) -> list[Outgoing[T]]:
        """The socket is gone: everything is to be sent again, in the order it was given.

        What was sent without an id may have been stored, and is settled as unknown: it is returned.
        """
        unknown = [each for each in self._all.values() if each.sent and each.message.msg_id is None]
        for each in unknown:
            self.settle(each.key)
        for each in self._all.values():
            each.waits = each.sent = False
        self._unsent = dict(self._all)
        return unknown

    def expired(
        self, now_s: float, reason: ContrailError
    ) -> list[tuple[Outgoing[T], ContrailError]]:
        """What may not be sent again any more, settled, each with its error."""
        over = [
            each
            for each in self._all.values()
            if each.first_sent_s is not None and now_s - each.first_sent_s >= self._retry_s
        ]
        for each in over:
            self.settle(each.key)
        return [(each, given_up(each, reason)) for each in over]


def given_up(outgoing: Outgoing[T], reason: ContrailError) -> ContrailError:
    """The error of a message that is not sent any more."""
    if outgoing.first_sent_s is None:
        return reason
    return OutcomeUnknown(f"publish to {outgoing.message.subject}: {reason}")
