"""Starting: on no data, and again after a kill with a full stream."""

import subprocess
import sys
from time import perf_counter

from tests.bench.figures import Bench, Measured, Run
from tests.bench.patience import repeat
from tests.bench.processes import rss_bytes
from tests.bench.server import data_folder, fill, started

_MIB = 1 << 20


def interpreter_and_imports(bench: Bench) -> Measured:
    """Seconds until Python runs and has imported the service, without serving."""

    def once(_: int) -> Run:
        begun = perf_counter()
        subprocess.run([sys.executable, "-c", "import contrail_serve.node_process"], check=True)
        return Run(perf_counter() - begun)

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


def restart_after_kill(bench: Bench) -> Measured:
    """The same after kill -9 of a server that had stored a million messages a moment before."""
    rss = 0
    with data_folder(bench) as folder:
        with started(folder) as server:
            fill(bench, server, "BENCH", "bench")
            server.kill()

        def once(_: int) -> Run:
            nonlocal rss
            with started(folder) as server:
                server.check_stored("BENCH", bench.scale.messages)
                rss = rss_bytes(server.pid)
                server.kill()
                return Run(server.start_s)

        runs = repeat(bench, once)
    return Measured(runs, note=f"all messages there; RSS {rss / _MIB:,.0f} MiB")
