"""What a server command imports before it serves: what takes long and can wait, waits."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import SECRET, Process

LATER = ("fastapi", "pydantic")


@pytest.mark.long
@pytest.mark.parametrize("module", ["node_process", "edge_process"])
def test_start_does_not_wait_for_the_management_routes(module: str) -> None:
    code = f"import sys, contrail_serve.{module}; print(*{{m.split('.')[0] for m in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not set(LATER) & set(done.stdout.split())


@pytest.mark.long
def test_process_without_management_routes_never_imports_what_they_need(tmp_path: Path) -> None:
    settings = {"data_dir": tmp_path / "data", "link_port": 0, "cluster_secret": SECRET}
    with Process("storage", tmp_path / "log", **settings) as storage, storage.client() as client:
        assert client.get("/readyz").status_code == 200
        assert "pydantic_core" not in Path(f"/proc/{storage.pid}/maps").read_text(encoding="utf-8")
        # A path that it does not have is the one thing for which it needs them.
        assert client.get("/v1/streams").status_code == 404
        assert "pydantic_core" in Path(f"/proc/{storage.pid}/maps").read_text(encoding="utf-8")
