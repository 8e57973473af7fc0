"""The disk or the power fails while a damaged folder is opened with ``accept_data_loss``.

Afterwards the folder is as damaged or as healed, and the next start with the switch serves.
"""

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Final

import pytest

from contrail_common.model import StoredMessage
from tests.crash import damage
from tests.crash.disk import Failure, Kill, Lane, Plan
from tests.crash.history import Broken, FileChange
from tests.crash.power import PowerCut
from tests.crash.test_open_damaged import (
    SEED,
    Damaged,
    Spoil,
    manifest,
    refusals,
    rot_in_the_log,
    rotten_block,
    shown,
)
from tests.crash.trials import calls_of, kill_points
from tests.crash.zygote import Zygote

SPOILS: Final = [
    pytest.param(rot_in_the_log, id="rot in the log"),
    pytest.param(rotten_block, id="rotten block"),
    pytest.param(lambda d, c: damage.remove(manifest(d)), id="missing manifest"),
]
FAILURES: Final[list[tuple[Lane, str, int]]] = [
    ("log", "create", errno.ENOSPC),
    ("log", "write", errno.ENOSPC),
    ("log", "sync", errno.EIO),
    ("files", "create", errno.ENOSPC),
    ("files", "write", errno.ENOSPC),
    ("files", "sync", errno.EIO),
    ("files", "rename", errno.EIO),
    ("files", "unlink", errno.EIO),
    ("store", "write", errno.ENOSPC),
    ("store", "flush", errno.ENOSPC),
]
UNTIL_HEALED: Final = 1_000_000


@pytest.fixture(scope="module")
def stored(zygote: Zygote, lasting_area: Path) -> Damaged:
    return Damaged(zygote, lasting_area / "failing")


def healed(
    stored: Damaged, folder: Path
) -> tuple[dict[str, list[str]], dict[str, dict[int, StoredMessage]]]:
    """The disk calls of a start with the switch on a sound disk, and what it shows."""
    twin = stored.twin(folder)
    whole = stored.live(twin, look=True, accept=True, end="stop")
    shutil.rmtree(twin)
    return calls_of(whole), shown(stored.seen(whole))


def check(stored: Damaged, twin: Path, expected: dict[str, dict[int, StoredMessage]]) -> None:
    """The folder is the damaged one or the healed one."""
    ended = stored.live(twin, look=True)
    if refusals(ended) or stored.seen(ended).unreadable:
        ended = stored.live(twin, look=True, accept=True)
    assert shown(stored.seen(ended)) == expected
    assert shown(stored.seen(stored.live(twin, look=True))) == expected
    assert not (twin / "accepting").exists()
    shutil.rmtree(twin)


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize(
    ("stride", "renames"),
    # The other renames are those that a crash without a power cut is tested at.
    [(47, slice(1, None, 2)), pytest.param(1, slice(None), marks=pytest.mark.slow)],
    ids=["sampled", "all"],
)
def test_power_cut_in_an_accepting_start_leaves_damage_or_a_healed_folder(
    stored: Damaged, spoil: Spoil, stride: int, renames: slice
) -> None:
    folder = stored.spoiled(spoil)
    calls, expected = healed(stored, folder)
    after_renames = [
        Kill("files", number + 1)
        for number, call in enumerate(calls["files"], 1)
        if call in ("rename", "unlink")
    ]
    for kill in [*after_renames[renames], *kill_points(calls)[::stride]]:
        twin = stored.twin(folder)
        shadow = twin.with_name(f"{twin.name}-shadow")
        cut = PowerCut(twin, shadow)
        plan = Plan(seed=SEED, kill=kill, shadow=str(shadow))
        ended = stored.live(twin, accept=True, plan=plan)
        cut.follow(record for record in ended.records if isinstance(record, FileChange))
        cut.cut(random.Random(f"{SEED} {kill}"))
        shutil.rmtree(shadow)
        check(stored, twin, expected)


@pytest.mark.parametrize("spoil", SPOILS[:2])
@pytest.mark.parametrize(("lane", "call", "number"), FAILURES)
@pytest.mark.parametrize(
    ("count", "stride"),
    [
        pytest.param(UNTIL_HEALED, 0, id="sampled"),
        pytest.param(UNTIL_HEALED, 8, id="from then on", marks=pytest.mark.slow),
        pytest.param(1, 8, id="once", marks=pytest.mark.slow),
    ],
)
def test_failing_call_in_an_accepting_start_is_named_and_the_next_start_serves(
    stored: Damaged, spoil: Spoil, lane: Lane, call: str, number: int, count: int, stride: int
) -> None:
    folder = stored.spoiled(spoil)
    calls, expected = healed(stored, folder)
    every = range(1, calls[lane].count(call) + 1)
    between = every[1::stride] if stride else ()
    for first in sorted({every[0], *between, every[-1]} if every else ()):
        twin = stored.twin(folder)
        failure = Failure(lane, call, first, number, count)
        ended = stored.live(twin, accept=True, plan=Plan(seed=SEED, failures=(failure,)))
        assert [one for one in ended.records if isinstance(one, Broken)] == [], failure
        for reason in refusals(ended):
            assert os.strerror(number) in reason, failure
            if "start again with accept_data_loss" not in reason:
                # It failed behind the switch, as a start of any folder may.
                assert shown(stored.seen(stored.live(twin, look=True))) == expected, failure
        check(stored, twin, expected)
