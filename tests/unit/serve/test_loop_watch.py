"""The watch over the event loop: what counts as a stall, and its name in the log."""

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Any

import uvloop
from structlog.testing import capture_logs

from contrail_serve.loop_watch import CHECK_S, IDLE_CHECK_S, WARN_S, LoopWatch

PATIENCE_S = 60.0
LONG_S = 3 * WARN_S
COUNTED_S = LONG_S - 2 * IDLE_CHECK_S
"""Less than what is counted of it: a stall is seen up to IDLE_CHECK_S late, and clocks differ."""


def held_by(step: Callable[[LoopWatch], None]) -> tuple[LoopWatch, list[dict[str, Any]]]:
    """Run ``step`` as one callback of a watched loop; returns the watch and what was logged."""
    watch = LoopWatch()

    async def wait_for_a_check() -> None:
        checks = watch.lateness.count
        while watch.lateness.count == checks:
            await asyncio.sleep(CHECK_S)

    async def whole() -> None:
        watching = asyncio.create_task(watch.run())
        await wait_for_a_check()
        step(watch)
        await wait_for_a_check()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    # A collection would be a stall of its own: what other tests have made is large.
    gc.disable()
    try:
        with capture_logs() as logged:
            uvloop.run(whole())
    finally:
        gc.enable()
    return watch, [dict(line) for line in logged]


def compute(watch: LoopWatch) -> None:
    """Use the CPU for long, and then until the watch has looked."""
    begun, patience = time.thread_time(), time.monotonic() + PATIENCE_S
    while time.thread_time() - begun < LONG_S or not watch.named:
        assert time.monotonic() < patience, "nobody looked"


def wait_long(_: LoopWatch) -> None:
    """Block the thread without computing."""
    time.sleep(LONG_S)


def test_a_long_computation_is_counted_and_named() -> None:
    watch, logged = held_by(compute)
    assert watch.stalls.sum_s > COUNTED_S
    [warning] = [line for line in logged if line["log_level"] == "warning"]
    assert warning["event"] == "loop_stalled"
    assert warning["seconds"] > COUNTED_S
    assert any(":compute:" in call for call in warning["doing"]), warning


def test_waiting_makes_the_loop_late_but_is_no_stall() -> None:
    watch, logged = held_by(wait_long)
    assert watch.lateness.sum_s > COUNTED_S
    assert watch.stalls.sum_s < LONG_S / 2
    assert not [line for line in logged if line["log_level"] == "warning"]
