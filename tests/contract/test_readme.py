"""The examples of README.md and docs/streams.md work as they are printed, in their order."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from contrail_client import Contrail
from tests.checks.repository import ROOT
from tests.support.servers import ServerProcess

TIMEOUT_S = 240.0
STRICT = 'curl() { command curl --fail-with-body --silent --show-error "$@" && echo; }\n'


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in ``language``."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def run(examples: list[str], url: str, folder: Path) -> str:
    """What the examples print in one shell in which any failure ends the script."""
    script = "\n".join(examples).replace("localhost:7420", urlsplit(url).netloc)
    # A tail has no end; what it has to show at once is enough.
    script = re.sub(
        r"^curl -N (.*?)(?: +#.*)?$", r"curl -N -m 2 \1 || test $? = 28", script, flags=re.M
    )
    command = f"set -eu\n{STRICT}contrail() {{ '{sys.executable}' -m contrail_client \"$@\"; }}\n"
    done = subprocess.run(
        ["sh", "-c", f"export CONTRAIL_URL={url}\n{command}{script}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="the examples are curl commands")
def test_the_readme_works_from_top_to_bottom(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *shell, command_line = blocks("README.md", "sh")
    [python] = [code for code in blocks("README.md", "python") if "contrail_client" in code]
    with ServerProcess(tmp_path / "data") as server, Contrail(server.url) as client:
        shown = run(shell, server.url, tmp_path)
        assert '{"stream":"ORDERS","seq":1,"duplicate":false}' in shown
        assert '{"results":[{"ok":true}]}' in shown
        assert shown.count('"status":"done"') == 2 * len(["receipt", "replica"])
        # One of four was erased by its sequence before the third, and two by their subject.
        assert client.get_stream("ORDERS").state.messages == 1
        exec(
            compile(python.replace("127.0.0.1:7420", urlsplit(server.url).netloc), "README", "exec")
        )
        assert "orders.eu.paid" in capsys.readouterr().out
        assert httpx.get(f"{server.url}/v1/streams/ORDERS").json()["config"]["max_age"] == "7d"
        assert "ORDERS" in run([command_line], server.url, tmp_path)
        assert client.get_stream("ORDERS").state.messages == 2_001


@pytest.mark.skipif(shutil.which("curl") is None, reason="the examples are curl commands")
def test_the_page_on_streams_works_from_top_to_bottom(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        run(blocks("docs/streams.md", "sh"), server.url, tmp_path)
        found = httpx.get(f"{server.url}/v1/streams").json()["items"]
    assert {one["config"]["name"] for one in found} == {"SESSIONS", "JOBS", "CLICKS"}
