"""The folder of a local cluster: its processes with their ports, its secret, and who runs it."""

import contextlib
import fcntl
import json
import os
import random
import secrets
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

HOST: Final = "127.0.0.1"
SIZES: Final = (3, 5)
EDGES: Final = 2
"""Number of apis, and of gateways: one may be lost."""
_PORTS: Final = range(16_384, 32_768)
_TRIES: Final = 100
_LAYOUT: Final = "cluster.json"
_RUNNING: Final = "running.json"
_LOCK: Final = "lock"
_SECRET: Final = "cluster.secret"
_T = TypeVar("_T")


class FolderError(Exception):
    """The folder cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """One process: its name, its service, and the ports that it keeps.

    ``link_port`` and ``peer_port`` are those of storage nodes, and 0 for others.
    """

    name: str
    service: str
    port: int
    link_port: int = 0
    peer_port: int = 0


@dataclass(frozen=True, slots=True)
class Control:
    """Where the running launcher takes requests, and the key that they need."""

    port: int
    key: str


class Folder:
    """The folder of a local cluster."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def secret(self) -> Path:
        """The file with the cluster secret."""
        return self.path / _SECRET

    def data_of(self, name: str) -> Path:
        """Return the data folder of a storage node."""
        return self.path / name / "data"

    def log_of(self, name: str) -> Path:
        """Return the log file of a process."""
        return self.path / name / "log"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other launchers out, and make the folder. Raises FolderError."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / _LOCK).open("w") as lock:
            if not _taken(lock.fileno()):
                raise FolderError(f"a cluster already runs in {self.path}")
            try:
                yield
            finally:
                (self.path / _RUNNING).unlink(missing_ok=True)

    def is_running(self) -> bool:
        """Return True while a launcher has the folder."""
        try:
            with (self.path / _LOCK).open("r+") as lock:
                return not _taken(lock.fileno())
        except FileNotFoundError:
            return False

    def places(self, nodes: int, port: int) -> list[Place]:
        """Return the processes; the first api has ``port``. Ports are chosen once, and kept.

        A port that another program has taken meanwhile is chosen anew. Needs the lock. Raises
        FolderError if the folder has another number of nodes.
        """
        names = [f"n{number}" for number in range(1, nodes + 1)]
        try:
            kept = self._read(_LAYOUT, list[Place])
        except FileNotFoundError:
            kept = []
        found = [one.name for one in kept if one.service == "storage"]
        if kept and found != names:
            raise FolderError(f"{self.path} has a cluster of {len(found)} nodes, not of {nodes}")
        if not kept:
            kept = [Place(name, "storage", 0) for name in names]
            for service in ("api", "gateway"):
                kept += [Place(f"{service}{at}", service, 0) for at in range(1, EDGES + 1)]
        with contextlib.ExitStack() as held:
            places = [_with_ports(one, port, held) for one in kept]
        self._write(_LAYOUT, [asdict(one) for one in places])
        if not self.secret.exists():
            self._write_text(self.secret, secrets.token_hex(32))
        return places

    def note_running(self, control: Control) -> None:
        """Record where the launcher takes requests. Needs the lock."""
        self._write(_RUNNING, asdict(control))

    def control(self) -> Control:
        """Return where the running launcher takes requests. Raises FolderError."""
        if self.is_running():
            with contextlib.suppress(FileNotFoundError):
                return self._read(_RUNNING, Control)
            raise FolderError(f"the cluster in {self.path} is starting or stopping")
        raise FolderError(f"no cluster runs in {self.path}")

    def _read(self, name: str, kind: type[_T]) -> _T:
        content = (self.path / name).read_bytes()
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.MsgspecError as error:
            raise FolderError(f"{self.path / name} cannot be read: {error}") from error

    def _write(self, name: str, value: object) -> None:
        self._write_text(self.path / name, json.dumps(value, indent=1) + "\n")

    @staticmethod
    def _write_text(path: Path, text: str) -> None:
        new = path.with_suffix(".new")
        # Only the owner may read the secret and the key.
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        new.replace(path)


def _taken(lock: int) -> bool:
    """Try to lock an open file."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _with_ports(place: Place, first_port: int, held: contextlib.ExitStack) -> Place:
    port = first_port if place.name == "api1" and first_port else _free(place.port, held)
    if place.service != "storage":
        return Place(place.name, place.service, port)
    link, peer = (_free(one, held) for one in (place.link_port, place.peer_port))
    return Place(place.name, place.service, port, link, peer)


def _free(wanted: int, held: contextlib.ExitStack) -> int:
    """Return ``wanted``, or another port if it is 0 or taken. It stays taken until ``held`` ends.

    Ports that the kernel gives to outgoing connections are avoided: one of these could take the
    port before its process listens.
    """
    chance = random.SystemRandom()
    for port in (wanted, *chance.sample(_PORTS, _TRIES)):
        probe = held.enter_context(socket.socket())
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            if port:
                probe.bind((HOST, port))
                return port
    raise FolderError("this machine has no free port")
