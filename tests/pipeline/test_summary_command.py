"""`contrail pipeline summary` up to the point at which Spark starts. No JVM."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import Result

from contrail_client import Contrail, Message
from contrail_pipeline.summary.command import TOP_MAX
from tests.support.command import run_contrail
from tests.support.ports import free_port
from tests.support.servers import ServerProcess


@pytest.fixture(scope="module", autouse=True)
def stream(client: Contrail) -> None:
    """Stream S, which has 10 messages."""
    client.create_stream("S", {"subjects": ["s.>"]})
    client.publish_batch("S", [Message(f"s.{at}", "x") for at in range(10)]).raise_refused()


def summary(server: ServerProcess, *arguments: str) -> Result:
    return run_contrail("pipeline", "summary", *arguments, env={"CONTRAIL_URL": server.url})


def test_a_dry_run_says_what_would_be_done(running: ServerProcess, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    found = summary(running, "S", "--dry-run", "--out", str(out))
    assert found.exit_code == 0
    assert found.stdout == (
        f"would read about 10 messages of S, and print tables and write {out}\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_for_machines(running: ServerProcess) -> None:
    found = summary(running, "S", "--dry-run", "--json", "--from-seq", "4", "--subject", "s.>")
    assert json.loads(found.stdout)["messages"] == 7


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["NONE"], 3, "stream_not_found"),
        (["S", "--top", "0"], 2, "--top"),
        (["S", "--top", str(TOP_MAX + 1)], 2, "--top"),
        (["S", "--from-seq", "9", "--to-seq", "8"], 2, "--from-seq 9 is above --to-seq 8"),
        (["S", "--start-time", "yesterday"], 2, '"message":"--start-time: must be'),
        (
            ["S", "--from-seq", "1", "--start-time", "2026-01-01T00:00:00Z"],
            2,
            "options --from-seq and --start-time",
        ),
        (["S", "--subject", "a..b"], 2, "--subject 'a..b': "),
        (["S", "--subject", "a", "--subject", ""], 2, "--subject '': "),
        (["S", "--subject", "a b"], 2, "--subject 'a b': "),
        (["S", "--out", "."], 2, "is a folder"),
        (["S", "--out", "nowhere/report.html"], 2, "there is no folder nowhere"),
    ],
)
def test_a_mistake_is_told_before_spark_starts(
    running: ServerProcess, arguments: list[str], status: int, said: str
) -> None:
    found = summary(running, *arguments, "--json")
    failure = json.loads(found.stderr)
    assert (found.exit_code, failure["exit_status"]) == (status, status)
    assert said in found.stderr


def test_only_a_regular_file_is_replaced(running: ServerProcess, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    os.mkfifo(out)
    found = summary(running, "S", "--out", str(out), "--dry-run")
    assert found.exit_code == 2
    assert "report.html is not a regular file" in found.stderr


def test_the_largest_number_of_subjects_is_allowed(running: ServerProcess) -> None:
    assert summary(running, "S", "--top", str(TOP_MAX), "--dry-run").exit_code == 0


def test_a_master_that_does_not_answer(running: ServerProcess) -> None:
    port = free_port()
    found = summary(running, "S", "--master", f"spark://127.0.0.1:{port}")
    assert found.exit_code == 1
    assert f"no Spark master answers at spark://127.0.0.1:{port}" in found.stderr
