"""The limits of the machine itself: synced appends to its disk, and loopback TCP."""

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Final

from tests.bench.figures import Bench, BenchError, Measured, Run
from tests.bench.http_scripts import PAYLOAD_BYTES
from tests.bench.patience import repeat
from tests.bench.processes import HOST, Usage

_CHUNK: Final = b"x" * 65_536
_PIECE_BYTES: Final = 1 << 18
_PING: Final = b"p" * 128
_CONNECT_TIMEOUT_S: Final = 30.0


def synced_appends(size: int) -> Callable[[Bench], Measured]:
    """Appends of ``size`` bytes, each followed by fdatasync, a second."""

    def measure(bench: Bench) -> Measured:
        def once(_: int) -> Run:
            appended = bench.worker.submit(_append, bench.folder, size, bench.scale.seconds)
            return appended.result()

        measured = Measured(repeat(bench, once))
        return replace(measured, note=f"{measured.value * size / 1e6:,.0f} MB/s")

    return measure


def write_all(bench: Bench) -> Measured:
    """Seconds to write the payloads of all messages to one file and sync it once."""
    pieces = bench.scale.messages * PAYLOAD_BYTES // _PIECE_BYTES

    def once(_: int) -> Run:
        return bench.worker.submit(_write, bench.folder, pieces).result()

    return Measured(repeat(bench, once), note=f"{pieces * _PIECE_BYTES / 1e6:,.0f} MB")


def _write(folder: Path, pieces: int) -> Run:
    piece = os.urandom(_PIECE_BYTES)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        before = Usage.now(None)
        for _ in range(pieces):
            file.write(piece)
        os.fdatasync(file.fileno())
        after = Usage.now(None)
    return Run(after.at_s - before.at_s, other_cores=before.other_cores(after))


def _append(folder: Path, size: int, seconds: float) -> Run:
    block = os.urandom(size)
    took: list[float] = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        before = Usage.now(None)
        while (begun := perf_counter()) - before.at_s < seconds:
            file.write(block)
            os.fdatasync(file.fileno())
            took.append(perf_counter() - begun)
        after = Usage.now(None)
    took.sort()
    return Run(
        value=len(took) / (after.at_s - before.at_s),
        client_us=(after.client_s - before.client_s) / len(took) * 1e6,
        p50_s=took[len(took) // 2],
        p99_s=took[len(took) * 99 // 100],
        other_cores=before.other_cores(after),
    )


def loopback_round_trips(bench: Bench) -> Measured:
    """128 bytes there and back between two Python processes, a second."""
    return _against_peer(bench, _echo, _count_round_trips)


def loopback_stream(bench: Bench) -> Measured:
    """Bytes a second from one Python process to another."""
    return _against_peer(bench, _pour, _count_bytes)


def _against_peer(
    bench: Bench,
    peer: Callable[[int], None],
    measure: Callable[[socket.socket, float], float],
) -> Measured:
    def once(_: int) -> Run:
        with socket.create_server((HOST, 0)) as listener:
            listener.settimeout(_CONNECT_TIMEOUT_S)
            process = multiprocessing.get_context("spawn").Process(
                target=peer, args=(listener.getsockname()[1],), daemon=True
            )
            process.start()
            connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        assert process.pid is not None
        with connection:
            before = Usage.now(process.pid)
            value = measure(connection, bench.scale.seconds)
            after = Usage.now(process.pid)
        process.join()
        return Run(value, other_cores=before.other_cores(after))

    return Measured(repeat(bench, once))


def _echo(port: int) -> None:
    with socket.create_connection((HOST, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while ping := connection.recv(4_096):
            connection.sendall(ping)


def _count_round_trips(connection: socket.socket, seconds: float) -> float:
    begun = perf_counter()
    count = 0
    while perf_counter() - begun < seconds:
        connection.sendall(_PING)
        if len(connection.recv(4_096)) != len(_PING):
            raise BenchError("the echo came in parts")
        count += 1
    return count / (perf_counter() - begun)


def _pour(port: int) -> None:
    with socket.create_connection((HOST, port)) as connection:
        try:
            while True:
                connection.sendall(_CHUNK)
        except (BrokenPipeError, ConnectionResetError):
            return


def _count_bytes(connection: socket.socket, seconds: float) -> float:
    buffer = bytearray(1 << 20)
    begun = perf_counter()
    count = 0
    while perf_counter() - begun < seconds:
        count += connection.recv_into(buffer)
    return count / (perf_counter() - begun)
