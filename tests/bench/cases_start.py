"""Starting: on no data, and again after a kill with a full stream."""

import subprocess
import sys
from time import perf_counter

from tests.bench.figures import Bench, Measured, Run
from tests.bench.processes import rss_bytes
from tests.bench.server import data_folder, fill, started

_MIB = 1 << 20


def interpreter_and_imports(bench: Bench) -> Measured:
    """Seconds until Python runs and has imported the service, without serving."""
    runs = []
    for _ in range(bench.scale.runs):
        begun = perf_counter()
        subprocess.run([sys.executable, "-c", "import contrail_serve"], check=True)
        runs.append(Run(perf_counter() - begun))
    return Measured(tuple(runs))


def start_empty(bench: Bench) -> Measured:
    """Seconds from the start of the process to its ready line, without data."""
    runs = []
    for _ in range(bench.scale.runs):
        with data_folder(bench) as folder, started(folder) as server:
            runs.append(Run(server.start_s))
            rss = rss_bytes(server.pid) / _MIB
    return Measured(tuple(runs), note=f"RSS {rss:,.0f} MiB")


def restart_after_kill(bench: Bench) -> Measured:
    """The same after kill -9 of a server that had stored a million messages a moment before."""
    runs = []
    with data_folder(bench) as folder:
        with started(folder) as server:
            fill(bench, server, "BENCH", "bench")
            server.kill()
        for _ in range(bench.scale.runs):
            with started(folder) as server:
                server.check_stored("BENCH", bench.scale.messages)
                runs.append(Run(server.start_s))
                rss = rss_bytes(server.pid) / _MIB
                server.kill()
    return Measured(tuple(runs), note=f"all messages there; RSS {rss:,.0f} MiB")
