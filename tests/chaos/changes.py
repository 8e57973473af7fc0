"""Streams and consumers that come and go: one client, which knows exactly what must be there."""

import itertools
from collections.abc import Callable, Sequence
from random import Random
from typing import Final, TypeVar

from contrail_client import (
    ApiProblem,
    Contrail,
    Message,
    NotFound,
    OutcomeUnknown,
    Unreachable,
)
from tests.chaos.clients import Clients

T = TypeVar("T")
_STEPS: Final = 25
_TRIES: Final = 400


class UnknownError(Exception):
    """A change may have been made, now or later: nothing is known of this stream any more."""


class Changes(Clients):
    """Two clients, each with a stream of its own that it makes, changes, checks and removes."""

    stream = "CHANGES"

    def __init__(self, urls: Sequence[str], seed: int, replicas: int) -> None:
        super().__init__(urls, seed, replicas)
        self.found: list[str] = []
        for name in ("c0", "c1"):
            self.add(self._work, name)

    def prepare(self, client: Contrail) -> None:
        """Nothing: the clients make their streams."""

    def verdict(self, client: Contrail) -> list[str]:
        return self.found

    def _work(self, client: Contrail, name: str) -> None:
        chance = self.chance(name)
        for number in itertools.count():
            if not self.is_running:
                return
            life = Life(self, client, f"CHANGES-{name}-{number}", chance)
            try:
                life.live()
            except UnknownError:
                self.count_unknown()

    def settled(self, call: Callable[[], T]) -> T:
        """Call until there is an answer. Raises UnknownError, NotFound."""
        for _ in range(_TRIES):
            try:
                return call()
            except OutcomeUnknown as error:
                raise UnknownError from error
            except Unreachable:
                self.pause()
            except NotFound:
                raise
            except ApiProblem as problem:
                if problem.applied is None and problem.status >= 500:
                    raise UnknownError from problem
                self.count_refused()
                self.accept(problem)
        raise AssertionError("no answer for a long time")


class Life:
    """One stream, and the model of what is in it."""

    def __init__(self, owner: Changes, client: Contrail, stream: str, chance: Random) -> None:
        self._owner, self._client, self._stream, self._chance = owner, client, stream, chance
        self._messages: dict[int, str] = {}
        self._last = 0
        self._consumers: set[str] = set()
        self._numbers = itertools.count()

    def live(self) -> None:
        """Make the stream, change it for a while, remove it."""
        client, stream = self._client, self._stream
        config = {
            "subjects": [f"{stream}.>"],
            "num_replicas": self._owner.replicas,
            "allow_atomic": True,
        }
        self._do(lambda: client.create_stream(stream, config))  # type: ignore[arg-type]
        steps = [
            *(self._publish, self._publish, self._batch, self._delete, self._purge),
            *(self._add_consumer, self._remove_consumer, self._consume),
        ]
        for _ in range(self._chance.randint(1, _STEPS)):
            if not self._owner.is_running:
                return
            self._chance.choice(steps)()
            self._compare()
        self._do(lambda: client.delete_stream(stream))
        try:
            self._owner.settled(lambda: client.get_stream(stream))
        except NotFound:
            return
        self._wrong("is still there after its removal")

    def _do(self, call: Callable[[], T]) -> T:
        try:
            return self._owner.settled(call)
        except NotFound as problem:
            self._wrong(f"misses something that is there: {problem}")
            raise UnknownError from problem

    def _wrong(self, text: str) -> None:
        self._owner.found.append(f"{self._stream} {text}")

    def _publish(self) -> None:
        text = f"{next(self._numbers)}"
        ack = self._do(lambda: self._client.publish(f"{self._stream}.a", text))
        self._stored([text], ack.seq)

    def _batch(self) -> None:
        texts = [f"{next(self._numbers)}" for _ in range(3)]
        messages = [Message(f"{self._stream}.a", text) for text in texts]
        ack = self._do(lambda: self._client.publish_atomic(self._stream, messages))
        self._stored(texts, ack.first_seq)

    def _stored(self, texts: list[str], seq: int) -> None:
        if seq != self._last + 1:
            self._wrong(f"stored {texts} at {seq}, after {self._last}")
        self._owner.count_acked()
        self._messages |= dict(enumerate(texts, start=seq))
        self._last = seq + len(texts) - 1

    def _delete(self) -> None:
        if self._messages:
            seq = self._chance.choice(sorted(self._messages))
            self._do(lambda: self._client.delete_message(self._stream, seq))
            del self._messages[seq]

    def _purge(self) -> None:
        up_to = self._chance.randint(1, self._last + 1)
        self._do(lambda: self._client.purge_stream(self._stream, up_to_seq=up_to))
        self._messages = {seq: one for seq, one in self._messages.items() if seq >= up_to}

    def _add_consumer(self) -> None:
        name = f"c{next(self._numbers)}"
        self._do(lambda: self._client.create_consumer(self._stream, name))
        self._consumers.add(name)

    def _remove_consumer(self) -> None:
        if self._consumers:
            name = self._consumers.pop()
            self._do(lambda: self._client.consumer(self._stream, name).delete())

    def _consume(self) -> None:
        """Read with a new consumer: it must get what is there, in order."""
        name = f"c{next(self._numbers)}"
        self._do(lambda: self._client.create_consumer(self._stream, name))
        self._consumers.add(name)
        consumer = self._client.consumer(self._stream, name)
        if not self._messages:
            return
        pull = self._do(lambda: consumer.next(1_000, expires="5s"))
        got = [one.payload.decode() for one in pull.messages]
        wanted = [self._messages[seq] for seq in sorted(self._messages)]
        if not got or got != wanted[: len(got)]:
            self._wrong(f"gave {got} to a consumer instead of {wanted}")

    def _compare(self) -> None:
        page = self._do(lambda: self._client.read_range(self._stream, from_seq=1, limit=1_000))
        got = {one.seq: one.payload.decode() for one in page.messages}
        if got != self._messages:
            self._wrong(f"has {got} instead of {self._messages}")
        listed = {one.name for one in self._owner.settled(self._list)}
        if listed != self._consumers:
            self._wrong(f"has the consumers {listed} instead of {self._consumers}")

    def _list(self) -> list:  # type: ignore[type-arg]
        return list(self._client.list_consumers(self._stream))
