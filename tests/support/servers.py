"""Real servers for tests: one process each, on a free loopback port."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

START_S = 30.0
STOP_S = 30.0


class ServerProcess:
    """``contrail serve`` as a child process over ``data_dir``; may be killed and started again."""

    def __init__(self, data_dir: Path, **settings: Any) -> None:
        self.data_dir = data_dir
        self.settings = settings
        self.url = ""
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> Self:
        """Start and wait until it serves; raises with its log when it does not."""
        settings = {"host": "127.0.0.1", "port": 0, "data_dir": self.data_dir, **self.settings}
        arguments = [f"{name}={value}" for name, value in settings.items()]
        self.log = self.data_dir.parent / f"{self.data_dir.name}.log"
        with self.log.open("a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "contrail_serve", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait(STOP_S)
            raise AssertionError(f"no server (status {status}):\n{self.log.read_text()}")
        self.url = json.loads(line)["url"]
        return self

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(STOP_S)
        self._close()

    def stop(self) -> int:
        """End it cleanly; answers its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(STOP_S)
        self._close()
        return status

    def _close(self) -> None:
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()

    def rss_bytes(self) -> int:
        """Resident memory of the server."""
        fields = Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def client(self, **options: Any) -> httpx.Client:
        """An HTTP client for the server."""
        return httpx.Client(base_url=self.url, timeout=30.0, **options)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
