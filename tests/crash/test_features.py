"""The node dies anywhere in a run over the rules of streams: exactly the right messages remain.

Each run is made twice. In one, writes to the store follow soon after those to the log, as in a
node. In the other they are held as long as possible, so that many entries share a batch and blocks
wait while others are removed.
"""

from pathlib import Path
from typing import Final

import pytest

from tests.crash.features import features
from tests.crash.trials import broken_promises, kill_points, undisturbed
from tests.crash.zygote import HELD_S, SOON_S, Job, Zygote

SEED: Final = 20_270
NODE_KEYS: Final = (bytes(range(32)),)
POINTS_MIN: Final = 350


def job(hold_s: float) -> Job:
    return Job(steps=features(SEED), end="stop", hold_s=hold_s)


@pytest.mark.parametrize("hold_s", [SOON_S, HELD_S], ids=["soon", "held"])
def test_undisturbed_run_over_all_rules_keeps_its_promises(
    zygote: Zygote, area: Path, hold_s: float
) -> None:
    assert len(kill_points(undisturbed(zygote, area, job(hold_s), SEED))) >= POINTS_MIN


@pytest.mark.parametrize(
    ("hold_s", "power_cuts", "node_keys", "stride"),
    [
        pytest.param(SOON_S, False, (), 61, id="soon-killed"),
        pytest.param(HELD_S, False, (), 53, id="held-killed"),
        pytest.param(HELD_S, True, NODE_KEYS, 71, id="held-power cut-encrypted"),
        *(
            pytest.param(hold_s, cuts, node_keys, 1, marks=pytest.mark.slow, id=name)
            for hold_s, cuts, node_keys, name in (
                (SOON_S, False, (), "every-soon-killed"),
                (SOON_S, True, NODE_KEYS, "every-soon-power cut-encrypted"),
                (HELD_S, False, (), "every-held-killed"),
                (HELD_S, True, (), "every-held-power cut"),
                (HELD_S, True, NODE_KEYS, "every-held-power cut-encrypted"),
            )
        ),
    ],
)
def test_crash_anywhere_keeps_the_rules_of_streams(
    zygote: Zygote,
    area: Path,
    hold_s: float,
    power_cuts: bool,
    node_keys: tuple[bytes, ...],
    stride: int,
) -> None:
    run = job(hold_s)
    calls = undisturbed(zygote, area, run, SEED, node_keys=node_keys)
    points = kill_points(calls)[::stride]
    found = broken_promises(
        zygote, area, run, SEED, points, power_cuts=power_cuts, node_keys=node_keys
    )
    assert found == []
