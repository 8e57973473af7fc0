"""Connections of nobody the cluster knows: noise, half greetings, silence, too much."""

import contextlib
import random
import socket
import threading
from collections.abc import Sequence
from typing import Final, Self

from tests.chaos.network import HOST

_AT_ONCE: Final = 8
_TIMEOUT_S: Final = 1.0


class Strangers:
    """Threads that talk to ports while the context lasts."""

    def __init__(self, ports: Sequence[int], chance: random.Random) -> None:
        self._ports = list(ports)
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._talk, args=(random.Random(chance.random()),), daemon=True)
            for _ in range(_AT_ONCE)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _talk(self, chance: random.Random) -> None:
        while not self._over.is_set():
            with contextlib.suppress(OSError), self._connected(chance) as connection:
                greeting = connection.recv(256) if chance.random() < 0.5 else b""
                for text in self._texts(chance, greeting):
                    connection.sendall(text)
                if chance.random() < 0.5:
                    connection.recv(256)
                self._over.wait(chance.uniform(0.0, 0.05))

    def _connected(self, chance: random.Random) -> socket.socket:
        return socket.create_connection((HOST, chance.choice(self._ports)), _TIMEOUT_S)

    def _texts(self, chance: random.Random, greeting: bytes) -> list[bytes]:
        """What to say: nothing, noise, a request, the greeting itself, or a part of it."""
        noise = chance.randbytes(chance.randint(1, 100_000))
        return chance.choice(
            [
                [],
                [noise],
                [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
                [greeting, noise],
                [greeting[: len(greeting) // 2]],
                [b"\xff" * 16, noise],
            ]
        )
