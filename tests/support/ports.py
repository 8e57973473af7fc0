"""Ports for servers that must know each other's, or that nobody is to listen on."""

import contextlib
import fcntl
import itertools
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

HOST: Final = "127.0.0.1"
_FIRST: Final = 16_384
_END: Final = 32_768
"""The kernel assigns ports from here on: whoever asks it for any could get one first."""
_COUNT: Final = 256
_HELD_MAX: Final = 4 * _COUNT
"""Ports of one process before the first one comes round again. A node of a cluster goes on calling
the port of one that a test has killed, so it must not be another server's soon."""


def _claimed() -> Iterator[int]:
    """Ports that are for this process until it ends: locks keep them from other test runs."""
    folder = Path(tempfile.gettempdir(), f"contrail-test-ports-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    held: list[int] = []
    for first in random.SystemRandom().sample(
        range(_FIRST, _END, _COUNT), (_END - _FIRST) // _COUNT
    ):
        lock = os.open(folder / str(first), os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        held.extend(range(first, first + _COUNT))
        yield from held[-_COUNT:]
        if len(held) == _HELD_MAX:
            break
    if not held:
        raise AssertionError("too many test runs at once")
    yield from itertools.cycle(held)


_ports: Final = _claimed()


def free_port() -> int:
    """A port on which nobody listens, and which no other test gets meanwhile."""
    for _ in range(_COUNT):
        port = next(_ports)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise AssertionError("no port is free")
