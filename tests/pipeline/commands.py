"""The command `contrail pipeline`: in this process, or in one of its own that a test may kill."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.command import run_contrail

COMMAND = [sys.executable, "-m", "contrail_pipeline"]


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
    """Run a job with `--json`, with the Spark of the tests: its status, and its result or error."""
    done = run_contrail("pipeline", *arguments, "--json", env={})
    lines = (done.stderr if done.exit_code else done.stdout).splitlines()
    assert lines, done.exception
    found: dict[str, Any] = json.loads(lines[-1])
    return done.exit_code, found
