"""The image's entry point and health check, run as processes with the files of this checkout."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.checks.repository import ROOT
from tests.support.ports import free_port
from tests.support.servers import STOP_S
from tests.unit.containers.files import health_command, here, texts

ENTRYPOINT = here(json.loads(texts("runtime", "ENTRYPOINT")[0]))


LINKED = {
    "CONTRAIL_LINK_PORT": free_port(),
    "CONTRAIL_CLUSTER_SECRET": "the cluster secret of a test",
}
"""For a process of several. A whole server without a cluster refuses these settings."""


def environment(**variables: object) -> dict[str, str]:
    """The image's: its Python is first on PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, **{name: str(each) for name, each in variables.items()}}


def health(settings: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """What the health check says of the container with these settings."""
    return subprocess.run(
        health_command(), env=settings, timeout=STOP_S, check=False, capture_output=True, text=True
    )


@pytest.mark.long
@pytest.mark.parametrize("service", ["serve", "storage", "api", "gateway"])
def test_a_service_starts_in_place_answers_its_health_check_and_stops(
    service: str, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    settings = environment(
        SERVICE=service,
        CONTRAIL_PORT=free_port(),
        CONTRAIL_DATA_DIR=tmp_path / "data",
        # The check carries no token, and needs none.
        CONTRAIL_TOKEN="the-token-of-a-test",
        # A whole server has no use for it unless it is a node of a cluster.
        **(
            {}
            if service == "serve"
            else {"CONTRAIL_CLUSTER_SECRET": "the cluster secret of a test"}
        ),
    )
    with subprocess.Popen(ENTRYPOINT, env=settings, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["pid"] == process.pid
        answer = health(settings)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0
    assert (answer.returncode, answer.stderr) == (0, "")


def test_a_service_that_does_not_answer_is_unhealthy_and_says_where() -> None:
    port = free_port()
    answer = health(environment(SERVICE="api", CONTRAIL_PORT=port))
    assert answer.returncode == 1
    assert f"127.0.0.1:{port}/livez" in answer.stderr


def test_a_folder_that_cannot_be_written_is_unhealthy(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    answer = health(environment(SERVICE="flights", CONTRAIL_DATA_DIR=missing))
    assert answer.returncode == 1
    assert str(missing) in answer.stderr


def test_a_job_is_healthy_because_it_runs() -> None:
    assert health(environment(SERVICE="flights")).returncode == 0


def test_a_job_is_a_program_with_its_arguments_and_status() -> None:
    program = "import sys; print(sys.argv[1:]); sys.exit(3)"
    answer = subprocess.run(
        [*ENTRYPOINT, "-c", program, "a b", "c"],
        env=environment(SERVICE="job"),
        timeout=STOP_S,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (answer.returncode, answer.stdout) == (3, "['a b', 'c']\n")


def test_an_unknown_service_is_refused() -> None:
    answer = subprocess.run(
        ENTRYPOINT,
        env=environment(SERVICE="apis"),
        timeout=STOP_S,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (answer.returncode, answer.stderr) == (2, "SERVICE=apis: no such service\n")


def test_make_secrets_makes_each_once_for_its_owner_alone(tmp_path: Path) -> None:
    command = ["make", "-C", str(tmp_path), "-f", str(ROOT / "Makefile"), "secrets"]
    subprocess.run(command, check=True, timeout=STOP_S, capture_output=True)
    files = sorted((tmp_path / "secrets").iterdir())
    made = [file.read_text() for file in files]
    assert [file.name for file in files] == ["cluster_secret.txt", "token.txt"]
    assert [len(text) for text in made] == [43, 43]
    assert made[0] != made[1]
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    subprocess.run(command, check=True, timeout=STOP_S, capture_output=True)
    assert [file.read_text() for file in files] == made
