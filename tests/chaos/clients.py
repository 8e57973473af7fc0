"""Threads that use a stream of their own, remember what they were told, and check it afterwards."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

from contrail_client import ApiProblem, Contrail, Retries

TIMEOUT_S: Final = 45.0
ONCE: Final = Retries(attempts=1)
_PAUSE_S: Final = 0.05


class Clients:
    """The threads of one kind of client. They begin with `start` and end with `finish`."""

    stream: ClassVar[str]

    def __init__(self, urls: Sequence[str], seed: int, replicas: int) -> None:
        self.replicas = replicas
        self.errors: list[str] = []
        self.acked_s: list[float] = []
        """When publishes were acknowledged."""
        self.unknown = 0
        self.refused = 0
        self._urls = itertools.cycle(urls)
        self._seed = seed
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def add(self, work: Callable[[Contrail, str], None], name: str) -> threading.Thread:
        """Add a thread that does `work` with a client and its name."""
        thread = threading.Thread(target=self._guard, args=(work, name), name=name, daemon=True)
        self._threads.append(thread)
        return thread

    def chance(self, name: str) -> random.Random:
        """The random choices of a thread."""
        return random.Random(f"{self._seed} {name}")

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ask the threads to end."""
        self._stop.set()

    def finish(self) -> None:
        """End the threads."""
        self.stop()
        for thread in self._threads:
            thread.join(2 * TIMEOUT_S)
            if thread.is_alive():
                self.errors.append(f"{thread.name} waits for ever")

    @property
    def is_running(self) -> bool:
        return not self._stop.is_set()

    def pause(self) -> None:
        """Wait a moment before the next attempt."""
        self._stop.wait(_PAUSE_S)

    def accept(self, problem: ApiProblem) -> None:
        """Take a refusal that a fault explains; raise any other."""
        if not problem.retryable:
            raise problem
        self.pause()

    def count_acked(self) -> None:
        self.acked_s.append(time.monotonic())

    def count_unknown(self) -> None:
        self.unknown += 1

    def count_refused(self) -> None:
        self.refused += 1

    def prepare(self, client: Contrail) -> None:
        """Create what the threads use."""
        raise NotImplementedError

    def verdict(self, client: Contrail) -> list[str]:
        """All broken promises."""
        raise NotImplementedError

    def _guard(self, work: Callable[[Contrail, str], None], name: str) -> None:
        try:
            with Contrail(next(self._urls), retries=ONCE, timeout_s=TIMEOUT_S) as client:
                work(client, name)
        except BaseException as error:
            self.errors.append(f"{name}: {type(error).__name__}: {error}")
            raise
