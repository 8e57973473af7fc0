"""Work queues: what was acknowledged for good never comes again, and attempts are counted."""

import itertools
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from contrail_client import (
    AcksRefused,
    ApiProblem,
    Contrail,
    Message,
    OutcomeUnknown,
    PulledMessage,
    Unreachable,
)
from tests.chaos.clients import Clients

STREAM: Final = "QUEUE"
TRIES: Final = "TRIES"
CONSUMER: Final = "work"
MAX_DELIVER: Final = 3
_PULL: Final = 20
_BATCH: Final = 10


@dataclass(slots=True)
class Got:
    """A delivery: the stream, the message, the attempt, and when its pull was asked."""

    stream: str
    seq: int
    payload: str
    attempt: int
    asked_s: float


@dataclass
class Work:
    """What the clients of queues saw. Threads append to it."""

    acked: dict[str, int] = field(default_factory=dict)
    """Payloads of acknowledged messages, with their sequences."""
    got: list[Got] = field(default_factory=list)
    settled_s: dict[int, float] = field(default_factory=dict)
    """When the sync acknowledgement of a sequence of the queue was answered."""
    settling: set[int] = field(default_factory=set)
    """Sequences of the queue that somebody acknowledged, whatever the answer."""


class Queues(Clients):
    """A work queue with two consumers, and a stream whose messages are tried three times."""

    stream = STREAM

    def __init__(self, urls: Sequence[str], seed: int, replicas: int) -> None:
        super().__init__(urls, seed, replicas)
        self.work = Work()
        self.add(self._publish, "queue")
        for name in ("q0", "q1"):
            self.add(self._settle, name)
        self.add(self._try, "tries")

    def prepare(self, client: Contrail) -> None:
        base = {"num_replicas": self.replicas}
        queue = {"subjects": ["queue.*"], "retention": "workqueue", **base}
        client.ensure_stream(STREAM, queue)  # type: ignore[arg-type]
        client.ensure_consumer(STREAM, CONSUMER, {"ack_wait": "2s"})
        client.ensure_stream(TRIES, {"subjects": ["try.*"], **base})  # type: ignore[arg-type,typeddict-item]
        client.ensure_consumer(TRIES, CONSUMER, {"ack_wait": "500ms", "max_deliver": MAX_DELIVER})

    def _publish(self, client: Contrail, name: str) -> None:
        for number in itertools.count():
            for stream, subject in ((STREAM, "queue.a"), (TRIES, "try.a")):
                messages = [
                    Message(subject, text, None, text)
                    for text in (f"{name}-{number}-{part}" for part in range(_BATCH))
                ]
                while self.is_running and not self._sent(client, stream, messages):
                    self.pause()
            if not self.is_running:
                return
            self.pause()

    def _sent(self, client: Contrail, stream: str, messages: list[Message]) -> bool:
        try:
            results = client.publish_batch(stream, messages).results
        except (OutcomeUnknown, Unreachable):
            self.count_unknown()
            return False
        except ApiProblem as problem:
            self.accept(problem)
            self.count_refused()
            return False
        for message, result in zip(messages, results, strict=True):
            if isinstance(result, ApiProblem):
                self.accept(result)
                return False
            self.work.acked[f"{stream} {message.msg_id}"] = result.seq
        self.count_acked()
        return True

    def _pull(self, client: Contrail, stream: str) -> tuple[PulledMessage, ...]:
        asked_s = time.monotonic()
        try:
            pull = client.consumer(stream, CONSUMER).next(_PULL, expires="300ms")
        except (OutcomeUnknown, Unreachable):
            self.pause()
            return ()
        except ApiProblem as problem:
            self.accept(problem)
            return ()
        self.work.got += [
            Got(stream, one.seq, one.payload.decode(), one.num_delivered, asked_s)
            for one in pull.messages
        ]
        return pull.messages

    def _settle(self, client: Contrail, name: str) -> None:
        chance = self.chance(name)
        while self.is_running:
            done = [one for one in self._pull(client, STREAM) if chance.random() < 0.9]
            if not done:
                continue
            self.work.settling |= {one.seq for one in done}
            refused: set[int] = set()
            try:
                client.consumer(STREAM, CONSUMER).ack(*done, sync=True)
            except AcksRefused as problem:
                refused = set(problem.refused)
                for one in problem.refused.values():
                    # Another delivery of the message may be under way, or done.
                    if not one.retryable and one.name != "stale_token":
                        raise one from None
            except (OutcomeUnknown, Unreachable):
                continue
            except ApiProblem as problem:
                self.accept(problem)
                continue
            now_s = time.monotonic()
            for at, one in enumerate(done):
                if at not in refused:
                    self.work.settled_s.setdefault(one.seq, now_s)

    def _try(self, client: Contrail, name: str) -> None:
        chance = self.chance(name)
        while self.is_running:
            pulled = self._pull(client, TRIES)
            done = [one for one in pulled if chance.random() < 0.5]
            with suppress(OutcomeUnknown, Unreachable, AcksRefused):
                try:
                    if done:
                        client.consumer(TRIES, CONSUMER).ack(*done)
                except ApiProblem as problem:
                    self.accept(problem)

    def verdict(self, client: Contrail) -> list[str]:
        left = {one.seq: one.payload.decode() for one in client.replay(STREAM)}
        tries = {one.seq: one.payload.decode() for one in client.replay(TRIES)}
        return problems(self.work, left, tries)


def problems(work: Work, left: dict[int, str], tries: dict[int, str]) -> list[str]:
    """All broken promises; ``left`` and ``tries`` are what the two streams hold in the end."""
    found = []
    attempts: dict[int, list[int]] = {}
    for got in work.got:
        if got.stream == TRIES:
            attempts.setdefault(got.seq, []).append(got.attempt)
            if got.attempt > MAX_DELIVER:
                found.append(f"{got.seq} was delivered as attempt {got.attempt}")
        elif got.asked_s > work.settled_s.get(got.seq, float("inf")):
            found.append(f"{got.seq} came again after its sync acknowledgement")
    found += [
        f"{seq} was delivered {len(numbers)} times, as attempts {numbers}"
        for seq, numbers in attempts.items()
        if len(numbers) > MAX_DELIVER
    ]
    found += [
        f"{seq} was acknowledged, and is still there" for seq in left if seq in work.settled_s
    ]
    for name, seq in work.acked.items():
        stream, _, payload = name.partition(" ")
        if stream == TRIES and tries.get(seq) != payload:
            found.append(f"{name} is not at {seq}")
        if stream == STREAM and seq not in work.settling and left.get(seq) != payload:
            found.append(f"{name} at {seq} is gone, and nobody acknowledged it")
    return found
