"""Servers as forks of one process that has imported their modules.

The imports take most of the time that a server needs to start. Every fork imports this module, so
it imports nothing but the standard library.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Final

PRELOADED: Final = [
    "contrail_serve.main",
    "contrail_serve.node_process",
    "contrail_serve.edge_process",
]

_forks: Final = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(PRELOADED)
_lock: Final = threading.Lock()
"""Held around calls of `multiprocessing` that poll its children: they are not thread-safe."""


class Forked:
    """Runs ``python -m`` a module of servers; has what tests use of `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], log: Path, module: str = "contrail_serve") -> None:
        reading, writing = os.pipe()
        self.stdout = os.fdopen(reading, encoding="utf-8")
        with Connection(writing, readable=False) as stdout, _lock:
            # A daemon: it does not outlive the tests.
            self._process = _forks.Process(
                target=_serve,
                args=(module, list(arguments), dict(os.environ), stdout, log),
                daemon=True,
            )
            self._process.start()
            self._sentinel = self._process.sentinel
            assert self._process.pid is not None
            self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit status, or the negative number of the signal; None while the process runs."""
        with _lock:
            return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Wait until the process has ended. Raises subprocess.TimeoutExpired."""
        wait([self._sentinel], timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("contrail_serve", timeout)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _serve(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    stdout: Connection,
    log: Path,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with stdout, log.open("a", encoding="utf-8") as stderr:
        os.dup2(stdout.fileno(), sys.stdout.fileno())
        os.dup2(stderr.fileno(), sys.stderr.fileno())
    gc.freeze()  # a start collects once, and need not look at what every fork has
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__")
