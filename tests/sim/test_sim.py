"""Simulated clusters keep every promise under faults; planted faults are found."""

import os
import subprocess
import sys

import pytest

from tests.sim.plants import PLANTS

pytestmark = pytest.mark.long
SEEDS = 2
_PATIENCE_S = 900


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    """Run seeds in a process whose sets have the same order each time."""
    command = [sys.executable, "-m", "tests.sim.run", *map(str, arguments)]
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=_PATIENCE_S, check=False
    )


@pytest.mark.parametrize("first", [1, 4])
def test_clusters_keep_their_promises(first: int) -> None:
    done = run(first, SEEDS, "--seconds", 5)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_seed_repeats_its_history() -> None:
    first, second = (run(3, "--seconds", 5, "--digest") for _ in range(2))
    assert first.stdout == second.stdout
    assert "digest" in first.stdout


FAULTS = {
    "acknowledges before a sync": ("power_cut", "all_down", "pause"),
    "stores message ids again": ("kill", "pause", "part"),
    "confirms acks that are not durable": ("kill", "pause", "part"),
    "forgets message ids at a restart": ("kill", "power_cut", "all_down"),
    "applies an entry again at a restart": ("kill", "power_cut", "all_down"),
    "forgets producers at a restart": ("kill", "power_cut", "all_down"),
    "leaves keys on the disk": ("kill", "pause", "part"),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_faults_are_found(plant: str) -> None:
    done = run(1, 15, "--seconds", 6, "--stop", "--plant", plant, "--faults", *FAULTS[plant])
    assert done.returncode == 1, done.stdout + done.stderr
