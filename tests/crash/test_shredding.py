"""The process is killed, or the power fails, while subject keys are created and destroyed."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest

from tests.crash.disk import Kill, Plan
from tests.crash.history import Invoked, Publish, Record
from tests.crash.script import KEYED, shredding
from tests.crash.test_erase import left_over, texts_of
from tests.crash.trials import Trial, calls_of, kill_points, problems_anywhere
from tests.crash.zygote import Job, Zygote

SEED: Final = 20_280
NODE_KEYS: Final = (bytes(range(32)),)
POINTS_MIN: Final = 150


def published_texts(records: Iterable[Record]) -> list[bytes]:
    """Texts of all messages that anybody tried to publish to the stream with subject keys."""
    calls = [record.call for record in records if isinstance(record, Invoked)]
    return [
        text
        for call in calls
        if isinstance(call, Publish) and call.stream == KEYED
        for message in call.messages
        for text in texts_of(message)
    ]


def tried(
    zygote: Zygote,
    area: Path,
    kill: Kill | None = None,
    *,
    power_cuts: bool = False,
    node_keys: tuple[bytes, ...] = (),
) -> tuple[list[str], dict[str, list[str]]]:
    """A run that ends at ``kill`` and one that continues: the problems, and the disk calls."""
    trial = Trial(zygote, area, SEED, power_cuts=power_cuts, node_keys=node_keys)
    job = Job(steps=shredding(SEED), end="stop", plan=Plan(seed=SEED, kill=kill))
    first = trial.live(job)
    texts = published_texts(first.records)
    problems = [f"{kill}: {one}" for one in left_over(trial.data_dir, texts)]
    trial.look()
    problems += [f"{kill}, after it: {one}" for one in left_over(trial.data_dir, texts)]
    calls = calls_of(first) if kill is None else {}
    return problems + [f"{kill}: {one}" for one in trial.verdict()], calls


@pytest.mark.parametrize("node_keys", [(), NODE_KEYS], ids=["plain", "encrypted"])
def test_no_file_holds_content_that_keys_of_subjects_seal(
    zygote: Zygote, area: Path, node_keys: tuple[bytes, ...]
) -> None:
    problems, calls = tried(zygote, area / "whole", node_keys=node_keys)
    assert problems == []
    assert len(kill_points(calls)) >= POINTS_MIN


@pytest.mark.parametrize(
    ("power_cuts", "node_keys", "stride", "turn"),
    [
        (False, (), 41, 0),
        (True, NODE_KEYS, 41, 1),
        pytest.param(False, (), 1, 0, marks=pytest.mark.slow),
        pytest.param(True, (), 1, 0, marks=pytest.mark.slow),
        pytest.param(True, NODE_KEYS, 1, 0, marks=pytest.mark.slow),
    ],
)
def test_shredding_killed_anywhere_is_done_or_was_not_begun(
    zygote: Zygote,
    area: Path,
    power_cuts: bool,
    node_keys: tuple[bytes, ...],
    stride: int,
    turn: int,
) -> None:
    problems = problems_anywhere(
        tried, zygote, area, stride, turn, power_cuts=power_cuts, node_keys=node_keys
    )
    assert problems == []
