"""Signals that come while a server starts: it ends in good order, or reads its files again."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from contrail_serve.groups import SingleMemberGroups
from contrail_storage.node import NodeOptions, StorageNode
from tests.contract.talk import wait_until
from tests.support.ports import free_port
from tests.support.servers import Process

SIGNALLED: Final = """
import importlib, os, sys
from contrail_serve import main

def signalled(name, load=importlib.import_module):
    number = os.environ.pop("SIGNAL", "")
    if number:
        os.kill(os.getpid(), int(number))
    return load(name)

importlib.import_module = signalled
service, *values = sys.argv[1:]
sys.exit(main(dict(value.split("=", 1) for value in values), service))
"""
"""A server command that gets a signal before it imports its service."""


def signalled(number: signal.Signals) -> tuple[str, ...]:
    """The command line of a server that gets a signal so early."""
    return ("env", f"SIGNAL={int(number)}", sys.executable, "-c", SIGNALLED)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("a secret of the cluster that is long enough\n", encoding="utf-8")
    path.chmod(0o600)
    return path


@pytest.mark.long
@pytest.mark.parametrize("service", ["serve", "storage"])
def test_signal_to_stop_that_comes_while_the_node_starts_is_heeded(
    service: str, secret: Path, tmp_path: Path
) -> None:
    values = [f"data_dir={tmp_path / 'data'}", "host=127.0.0.1", "port=0"]
    if service == "storage":
        values += ["link_port=0", f"cluster_secret_file={secret}"]
    command = [*signalled(signal.SIGTERM), service, *values]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr.splitlines()[-1] == "contrail: stopped before the node had started"
    assert "Traceback" not in ended.stderr
    node = StorageNode.open(NodeOptions(tmp_path / "data"), SingleMemberGroups())
    asyncio.run(node.stop())


@pytest.mark.long
@pytest.mark.parametrize("service", ["storage", "api"])
def test_hangup_that_comes_while_the_server_starts_is_heeded(
    service: str, secret: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"data_dir": tmp_path / "data", "link_port": 0}
    if service == "api":
        settings = {"storage": f"127.0.0.1:{free_port()}"}
    server = Process(service, tmp_path / "log", cluster_secret_file=secret, **settings)
    vars(server)["program"] = signalled(signal.SIGHUP)
    with server:
        wait_until(lambda: "cluster_secret_unchanged" in server.log.read_text(encoding="utf-8"))
        assert server.stop() == 0
