"""Requests to a running launcher, over a connection on loopback: one line each way.

A request is a JSON object with the key from the folder, so that only the owner of the folder can
make one. The answer is a JSON object: with ``error``, the request was refused.
"""

import json
import socket
import time
from pathlib import Path
from typing import Any, Final

from contrail_serve.local_cluster.folder import HOST, Folder, FolderError

_ANSWER_S: Final = 120.0
_POLL_S: Final = 0.05


class ControlError(Exception):
    """The launcher refused, or there is none; the text says why."""


def start_process(data_dir: Path, name: str) -> dict[str, Any]:
    """Start a process that has ended; return what the ready line says of it. Raises ControlError.

    Returns when it serves.
    """
    return _ask(data_dir, {"start": name})


def stop_cluster(data_dir: Path) -> None:
    """Stop all processes and the launcher, and wait for their end. Raises ControlError."""
    folder = Folder(data_dir)
    _ask(data_dir, {"stop": True})
    deadline = time.monotonic() + _ANSWER_S
    while folder.is_running():
        if time.monotonic() > deadline:
            raise ControlError(f"the cluster in {folder.path} has not ended")
        time.sleep(_POLL_S)


def _ask(data_dir: Path, request: dict[str, Any]) -> dict[str, Any]:
    try:
        control = Folder(data_dir).control()
        with socket.create_connection((HOST, control.port), timeout=_ANSWER_S) as connection:
            connection.sendall(json.dumps({"key": control.key, **request}).encode() + b"\n")
            with connection.makefile("rb") as file:
                line = file.readline()
    except FolderError as error:
        raise ControlError(str(error)) from error
    except OSError as error:
        raise ControlError(f"the launcher does not answer: {error}") from error
    if not line:
        raise ControlError("the launcher has ended")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise ControlError(answer["error"])
    return answer
