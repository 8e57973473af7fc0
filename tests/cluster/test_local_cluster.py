"""`contrail cluster`: real processes on this machine, started, killed, started again, stopped."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from contrail_client import Contrail
from contrail_serve.local_cluster import ControlError, start_process
from tests.support.servers import STOP_S

pytestmark = pytest.mark.cluster

COMMAND = (sys.executable, "-m", "contrail_client", "cluster")
START_S = 120.0


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def is_serving(url: str) -> bool:
    host, _, port = url.rpartition("/")[2].partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_cluster_goes_on_without_killed_processes_until_they_are_started_again(
    tmp_path: Path,
) -> None:
    folder = f"--data-dir={tmp_path}"
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        launcher = subprocess.Popen(
            [*COMMAND, folder, "--port=0"], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    try:
        assert launcher.stdout is not None
        with launcher.stdout:
            line = launcher.stdout.readline()
        assert line, errors.read_text()
        ready: dict[str, Any] = json.loads(line)
        assert ready["url"] == ready["apis"][0]["url"]
        nodes = {one["name"]: one for one in ready["nodes"]}
        processes = [*nodes.values(), *ready["apis"], *ready["gateways"]]
        assert all((tmp_path / one["name"] / "log").stat().st_size for one in processes)

        with Contrail(ready["url"]) as client:
            client.ensure_stream("S", {"subjects": ["s"], "num_replicas": 3})
            client.publish("s", b"1", msg_id="1")
            leader = nodes[client.get_stream("S").cluster["leader"]]
        for killed in (leader, ready["apis"][0]):
            os.kill(killed["pid"], signal.SIGKILL)
        with Contrail(ready["apis"][1]["url"]) as client:
            assert client.publish("s", b"2", msg_id="2").seq == 2

        again = start_process(tmp_path, leader["name"])
        assert again == {**leader, "ready": True, "pid": again["pid"]}
        assert again["pid"] != leader["pid"]
        assert not is_serving(ready["url"])
        with pytest.raises(ControlError, match="n1 is running"):
            start_process(tmp_path, "n1")
        with pytest.raises(ControlError, match="there is no n4; there are n1, n2, n3, api1"):
            start_process(tmp_path, "n4")

        stopped = subprocess.run([*COMMAND, "stop", folder], timeout=START_S, check=False)
        assert stopped.returncode == 0
        assert launcher.wait(STOP_S) == 0
        assert [one for one in (*processes, again) if is_alive(one["pid"])] == []
    finally:
        launcher.kill()
        launcher.wait(STOP_S)
