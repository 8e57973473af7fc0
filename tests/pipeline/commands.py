"""The command `contrail pipeline` as a process of its own, which a test may kill."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "contrail_client", "pipeline"]


@contextmanager
def running(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A job with its JVM and its workers: a group of processes that ends with the context."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        # At the end of the job the group may be gone.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Run a job with `--json`: its status, and its result or its error."""
    done = subprocess.run(
        [*COMMAND, *arguments, "--json"], capture_output=True, text=True, check=False
    )
    lines = (done.stdout if done.returncode == 0 else done.stderr).splitlines()
    assert lines, done.stderr
    found: dict[str, Any] = json.loads(lines[-1])
    return done.returncode, found
