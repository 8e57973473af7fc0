"""What a server command imports before it serves: what takes long and can wait, waits."""

import subprocess
import sys

import pytest

LATER = ("fastapi", "pydantic")


@pytest.mark.long
@pytest.mark.parametrize("module", ["node_process", "edge_process"])
def test_start_does_not_wait_for_the_management_routes(module: str) -> None:
    code = f"import sys, contrail_serve.{module}; print(*{{m.split('.')[0] for m in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not set(LATER) & set(done.stdout.split())
