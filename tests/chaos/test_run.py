"""A short run of random faults; `make chaos` does long ones."""

from pathlib import Path

import pytest

from tests.chaos.run import Chaos

SEED = 3


@pytest.mark.cluster
@pytest.mark.slow
def test_cluster_keeps_its_promises_under_random_faults(tmp_path: Path) -> None:
    report = Chaos(tmp_path, SEED).run(30.0)
    assert len(report.done) > 1
    assert report.problems == []
