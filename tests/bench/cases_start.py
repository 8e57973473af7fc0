"""Starting: on no data, and again after a kill with a full stream."""

import subprocess
import sys
from dataclasses import dataclass
from time import perf_counter
from typing import Final

from tests.bench.figures import Bench, Measured, Run
from tests.bench.patience import repeat
from tests.bench.processes import rss_bytes
from tests.bench.server import Server, data_folder, publish_batches, service_environment, started

_MIB: Final = 1 << 20
_STREAM: Final = "BENCH"
_PREFIX: Final = "bench"


def interpreter_and_imports(bench: Bench) -> Measured:
    """Seconds until Python runs and has imported the service, without serving."""
    command = [sys.executable, "-c", "import contrail_serve.node_process"]

    def once(_: int) -> Run:
        begun = perf_counter()
        subprocess.run(command, check=True, env=service_environment())
        return Run(perf_counter() - begun)

    once(0)  # compiles modules that are not compiled yet
    return Measured(repeat(bench, once))


def start_empty(bench: Bench) -> Measured:
    """Seconds from the start of the process to its ready line, without data."""
    rss = 0

    def once(_: int) -> Run:
        nonlocal rss
        with data_folder(bench) as folder, started(folder) as server:
            rss = rss_bytes(server.pid)
            return Run(server.start_s)

    return Measured(repeat(bench, once), note=f"RSS {rss / _MIB:,.0f} MiB")


@dataclass(frozen=True, slots=True)
class Restart:
    """Starts after kill -9 of a server that has just stored messages.

    Their number is ``times`` that of the scale.
    """

    times: int = 1

    def __call__(self, bench: Bench) -> Measured:
        """Seconds from the start of the process to its ready line."""
        rss = 0
        messages = self.times * bench.scale.messages
        with data_folder(bench) as folder:
            with started(folder) as server:
                grown = self._filled(bench, server)
                server.kill()

            def once(_: int) -> Run:
                nonlocal rss
                with started(folder) as server:
                    server.check_stored(_STREAM, messages)
                    rss = rss_bytes(server.pid)
                    server.kill()
                    return Run(server.start_s)

            runs = repeat(bench, once)
        note = (
            f"all {messages:,} messages there; RSS {rss / _MIB:,.0f} MiB, before the kill {grown}"
        )
        return Measured(runs, note)

    def _filled(self, bench: Bench, server: Server) -> str:
        """Fill the server; returns a note with its memory and the number of messages."""
        each = bench.scale.messages
        server.create_stream(_STREAM, _PREFIX)
        grown: dict[int, int] = {}
        for part in range(1, self.times + 1):
            publish_batches(bench, server, _STREAM, _PREFIX, each)
            server.check_stored(_STREAM, part * each)
            grown[part * each] = rss_bytes(server.pid) // _MIB
        ends = {count: grown[count] for count in (each, self.times * each)}
        return ", ".join(f"{mib:,} MiB with {count:,}" for count, mib in ends.items())
