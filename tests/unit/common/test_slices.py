"""The harness that measures the steps of an event loop finds those that are too long."""

import asyncio
import gc
import time

import pytest

from tests.support.slices import RULE_S, assert_no_stall, sliced

PATIENCE_S = 60.0


def compute(seconds: float) -> None:
    begun = time.thread_time()
    while time.thread_time() - begun < seconds:
        pass


def test_longest_step_is_measured_and_named() -> None:
    async def whole() -> None:
        with sliced() as slices:

            async def operation() -> None:
                compute(RULE_S)
                await asyncio.sleep(0)
                compute(2 * RULE_S)
                patience = time.monotonic() + PATIENCE_S
                while not slices.seen and time.monotonic() < patience:
                    compute(RULE_S)  # the thread that looks waits for a core
                await asyncio.sleep(0)
                compute(RULE_S)

            await asyncio.ensure_future(operation())
        assert slices.longest_s > 2 * RULE_S
        assert ":compute:" in slices.longest

    asyncio.run(whole())


def test_step_that_is_too_long_every_time_fails() -> None:
    tried = []

    async def operation() -> None:
        tried.append(None)
        compute(2 * RULE_S)

    with pytest.raises(AssertionError, match="one step took"):
        asyncio.run(assert_no_stall(operation))
    assert len(tried) > 1


def test_what_other_processes_disturb_once_does_not_fail() -> None:
    lengths = [2 * RULE_S, 0.0]

    async def operation() -> None:
        compute(lengths.pop(0))

    asyncio.run(assert_no_stall(operation))
    assert not lengths


def test_collections_and_waiting_are_no_stall() -> None:
    async def operation() -> None:
        with sliced() as inner:
            while inner.collected_s < 2 * RULE_S:
                gc.collect()
        wait_without_computing()

    asyncio.run(assert_no_stall(operation))


def wait_without_computing() -> None:
    time.sleep(4 * RULE_S)
