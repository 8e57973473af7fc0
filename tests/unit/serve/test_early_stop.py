"""A server that is asked to stop before it has started ends in good order, with a sentence."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from contrail_serve.groups import SingleMemberGroups
from contrail_storage.node import NodeOptions, StorageNode

SIGNALLED: Final = """
import asyncio, sys
from contrail_serve import main, node_process

def signalled():
    stopping = asyncio.Event()
    stopping.set()
    return stopping

node_process.stop_signal = signalled
service, *values = sys.argv[1:]
sys.exit(main(dict(value.split("=", 1) for value in values), service))
"""
"""A server command that finds the signal there when it has opened its folder."""


@pytest.mark.long
@pytest.mark.parametrize("service", ["serve", "storage"])
def test_signal_that_comes_while_the_node_starts_is_heeded(service: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of the cluster that is long enough\n", encoding="utf-8")
    secret.chmod(0o600)
    values = [f"data_dir={tmp_path / 'data'}", "host=127.0.0.1", "port=0"]
    if service == "storage":
        values += ["link_port=0", f"cluster_secret_file={secret}"]
    command = [sys.executable, "-c", SIGNALLED, service, *values]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr.splitlines()[-1] == "contrail: stopped before the node had started"
    assert "Traceback" not in ended.stderr
    node = StorageNode.open(NodeOptions(tmp_path / "data"), SingleMemberGroups())
    asyncio.run(node.stop())
