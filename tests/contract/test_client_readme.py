"""The examples of the client's README work as they are printed, in their order."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from contrail_client import Contrail
from tests.support.servers import ServerProcess

README = Path(__file__).parents[2] / "libs/client/README.md"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
TIMEOUT_S = 600.0


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with ServerProcess(tmp_path / "data") as server:
        yield server.url


def test_every_python_example_runs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = [code for language, code in BLOCKS if language == "python"]
    assert len(examples) == 8
    for code in examples:
        exec(compile(code, str(README), "exec"), {"url": url})  # the README is the repository's own
    printed = capsys.readouterr().out
    assert "ORDERS 1 False" in printed
    assert "wrong_last_sequence 10071" in printed
    assert "orders.eu.new    501" in printed
    assert "True\n501\n" in printed
    with Contrail(url) as client:
        assert client.get_stream("ORDERS").state.messages == 501
        billing = client.consumer("ORDERS", "billing").info()
        assert (billing.num_pending, billing.num_ack_pending) == (0, 0)
        assert client.get_stream("ORDERS").config["max_age"] == "7d"


def test_every_command_runs(url: str, tmp_path: Path) -> None:
    [script] = [code for language, code in BLOCKS if language == "sh"]
    command = f"contrail() {{ '{sys.executable}' -m contrail_client \"$@\"; }}\nset -e\n{script}"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("CONTRAIL_")}
    done = subprocess.run(
        ["sh", "-c", command],
        env={**environ, "CONTRAIL_URL": url},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "1,000 stored" in done.stdout
    assert '"data":"two"' not in done.stdout  # it was acknowledged when it was pulled
    assert "hello\nhello\none\ntwo\n" in done.stdout
