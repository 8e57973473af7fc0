"""The process is killed, or the power fails, during an erasure: it is completed anyway."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import pytest

from contrail_common.model import PublishMessage
from tests.crash.disk import Kill, Plan
from tests.crash.history import Erase, Invoked, Publish, Published, Record, Returned
from tests.crash.script import erasing
from tests.crash.trials import Trial, calls_of, kill_points, problems_anywhere
from tests.crash.zygote import Job, Zygote
from tests.support.folders import files_with

SEED: Final = 20_260
NODE_KEYS: Final = (bytes(range(32)),)
POINTS_MIN: Final = 150
_SHORT: Final = 8


def texts_of(message: PublishMessage) -> list[bytes]:
    """The texts that reveal a message. Its subject is not one: other messages may have it."""
    headers = [value for values in (message.headers or {}).values() for value in values]
    return [message.payload, *[one.encode() for one in headers if len(one) >= _SHORT]]


def erased_texts(records: Iterable[Record]) -> list[bytes]:
    """Texts of the messages that the calls so far wanted erased."""
    calls = {}
    stored: dict[tuple[str, int], PublishMessage] = {}
    wanted: set[tuple[str, int]] = set()
    for record in records:
        if isinstance(record, Invoked):
            calls[record.number] = record.call
            if isinstance(record.call, Erase):
                wanted |= {(record.call.stream, seq) for seq in record.call.seqs}
        elif isinstance(record, Returned) and isinstance(record.outcome, Published):
            call = calls[record.number]
            assert isinstance(call, Publish)
            for message, result in zip(call.messages, record.outcome.results, strict=True):
                stored[call.stream, result.seq] = message
    return [text for key in wanted if key in stored for text in texts_of(stored[key])]


def left_over(directory: Path, texts: Sequence[bytes]) -> list[str]:
    """Files that hold any of the texts."""
    found = files_with(directory, texts)
    return [f"{name} holds {text!r}" for name, held in found.items() for text in held]


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
    job = Job(steps=erasing(SEED), end="stop", plan=Plan(seed=SEED, kill=kill))
    first = trial.live(job)
    second = trial.look()
    texts = erased_texts([*first.records, *second.records])
    problems = [f"{kill}: {one}" for one in left_over(trial.data_dir, texts)]
    calls = calls_of(first) if kill is None else {}
    return problems + [f"{kill}: {one}" for one in trial.verdict()], calls


@pytest.mark.parametrize("node_keys", [(), NODE_KEYS], ids=["plain", "encrypted"])
def test_erasures_that_nothing_disturbs_leave_nothing(
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
def test_erasure_killed_anywhere_is_finished_by_the_next_start_and_nothing_else_is_lost(
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


def test_messages_that_were_not_erased_are_found_by_the_search(zygote: Zygote, area: Path) -> None:
    trial = Trial(zygote, area / "kept", SEED)
    steps = erasing(SEED)
    before = next(at for at, step in enumerate(steps) if isinstance(step[0], Erase))
    ended = trial.live(Job(steps=steps[:before], end="stop"))
    wanted = [Invoked(999, Erase("ORDERS", [3, 5, 20]))]
    found = left_over(trial.data_dir, erased_texts([*ended.records, *wanted]))
    assert any(".blob" in one for one in found)
