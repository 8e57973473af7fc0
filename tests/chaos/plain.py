"""Publishers without message ids: nothing is repeated, so nothing may be stored twice."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from contrail_client import ApiProblem, Contrail, Message, OutcomeUnknown, Unreachable
from tests.chaos.clients import Clients

STREAM: Final = "PLAIN"
_ATOMIC: Final = 5


@dataclass(slots=True)
class Publish:
    """Messages of one request (all or none of them), and what was answered."""

    payloads: tuple[str, ...]
    outcome: Literal["stored", "refused", "unknown"] = "unknown"
    first_seq: int = 0


class Plain(Clients):
    """One publisher of single messages, and one of atomic batches."""

    stream = STREAM

    def __init__(self, urls: Sequence[str], seed: int, replicas: int) -> None:
        super().__init__(urls, seed, replicas)
        self.publishes: list[Publish] = []
        self.add(self._single, "single")
        self.add(self._atomic, "atomic")

    def prepare(self, client: Contrail) -> None:
        config = {"subjects": ["plain.*"], "num_replicas": self.replicas, "allow_atomic": True}
        client.ensure_stream(STREAM, config)  # type: ignore[arg-type]

    def _single(self, client: Contrail, name: str) -> None:
        for number in itertools.count():
            if not self.is_running:
                return
            publish = Publish((f"{name}-{number}",))
            self._do(publish, lambda one: client.publish("plain.s", one.payloads[0]).seq)

    def _atomic(self, client: Contrail, name: str) -> None:
        for number in itertools.count():
            if not self.is_running:
                return
            publish = Publish(tuple(f"{name}-{number}-{part}" for part in range(_ATOMIC)))

            def send(one: Publish) -> int:
                messages = [Message("plain.a", payload) for payload in one.payloads]
                return client.publish_atomic(STREAM, messages).first_seq

            self._do(publish, send)

    def _do(self, publish: Publish, send) -> None:  # type: ignore[no-untyped-def]
        self.publishes.append(publish)
        try:
            publish.first_seq = send(publish)
            publish.outcome = "stored"
            self.count_acked()
        except OutcomeUnknown:
            self.count_unknown()
        except Unreachable:
            publish.outcome = "refused"
            self.pause()
        except ApiProblem as problem:
            if problem.applied is False:
                publish.outcome = "refused"
                self.count_refused()
            self.accept(problem)

    def verdict(self, client: Contrail) -> list[str]:
        stored = {one.seq: one.payload.decode() for one in client.replay(STREAM)}
        return problems(self.publishes, stored)


def problems(publishes: Sequence[Publish], stored: dict[int, str]) -> list[str]:
    """All publishes of which another thing is stored than was answered."""
    found = []
    counts = Counter(stored.values())
    found += [
        f"{payload} is stored {count} times" for payload, count in counts.items() if count > 1
    ]
    for publish in publishes:
        there = [payload for payload in publish.payloads if counts[payload]]
        if publish.outcome == "refused" and there:
            found.append(f"{publish.payloads[0]} was refused, and is stored")
        if there and len(there) != len(publish.payloads):
            found.append(f"of {publish.payloads} only {there} are stored")
        if publish.outcome == "stored":
            seqs = range(publish.first_seq, publish.first_seq + len(publish.payloads))
            if tuple(stored.get(seq) for seq in seqs) != publish.payloads:
                found.append(f"{publish.payloads[0]} is not at {publish.first_seq}")
    sent = {payload for publish in publishes for payload in publish.payloads}
    found += [f"nobody sent {payload}" for payload in counts if payload not in sent]
    return found
