"""What the product takes from the operating system, replaced for a run: clocks, chance, threads."""

import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

from tests.sim import threads
from tests.sim.loop import SimLoop, wall_ns

_PRODUCT = "contrail_"


@contextmanager
def replaced(loop: SimLoop, seed: int) -> Iterator[None]:
    """Replace clocks, chance and threads while the block runs."""
    chance = Random(f"chance {seed}")
    steady_ns: Callable[..., int] = lambda *_: round(loop.now * 1e9)  # noqa: E731
    steady_s: Callable[..., float] = lambda *_: loop.now  # noqa: E731
    clocks: dict[str, Any] = {
        "time": lambda: wall_ns(loop) / 1e9,
        "time_ns": lambda: wall_ns(loop),
        "clock_gettime": steady_s,
        "clock_gettime_ns": steady_ns,
        "sleep": threads.sleep,
    }
    clocks |= dict.fromkeys(("monotonic", "perf_counter", "thread_time", "process_time"), steady_s)
    clocks |= dict.fromkeys(("monotonic_ns", "perf_counter_ns", "thread_time_ns"), steady_ns)
    random.seed(seed)
    with ExitStack() as stack:
        for found, name, value in list(
            _uses({getattr(time, name): clocks[name] for name in clocks})
        ):
            stack.enter_context(patch.object(found, name, value))
        for name, value in clocks.items():
            stack.enter_context(patch.object(time, name, value))
        for module, name, value in (
            (os, "urandom", chance.randbytes),
            (secrets, "token_bytes", lambda count=32: chance.randbytes(count)),
            (secrets, "token_hex", lambda count=32: chance.randbytes(count).hex()),
            (secrets, "token_urlsafe", lambda count=32: chance.randbytes(count).hex()),
            (secrets, "randbits", chance.getrandbits),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield


def _uses(replacements: dict[Any, Any]) -> Iterator[tuple[Any, str, Any]]:
    """Names in modules of the product for something to be replaced: (module, name, new value)."""
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith(_PRODUCT):
            continue
        for name, value in list(vars(module).items()):
            if name == "threading":
                yield module, name, threads.Threading
            elif name == "queue":
                yield module, name, threads.Queue
            elif isinstance(value, partial) and value.func in replacements:
                yield module, name, partial(replacements[value.func], *value.args)
            elif callable(value) and _hashable(value) and value in replacements:
                yield module, name, replacements[value]


def _hashable(value: object) -> bool:
    return value.__class__.__hash__ is not None
