"""Memory that is freed is kept for what comes next, unless an operator said otherwise."""

import ctypes
import os
import subprocess
import sys

import pytest

from contrail_serve.allocator import keep_freed_memory

FREED_BYTES = 16_000_000
"""Far more than the holes that importing leaves in the heap, into which blocks go first."""
FREE_AT_THE_TOP = f"""
import ctypes
from contrail_serve.allocator import keep_freed_memory

class Counts(ctypes.Structure):
    _fields_ = [(f"unasked_{{n}}", ctypes.c_int) for n in range(9)] + [("keepcost", ctypes.c_int)]

keep_freed_memory()
blocks = [bytes(100_000) for _ in range({FREED_BYTES // 100_000})]
del blocks
mallinfo = ctypes.CDLL(None).mallinfo
mallinfo.restype = Counts
print(mallinfo().keepcost)
"""
"""Prints the bytes at the end of the heap that are free and not given back, by mallinfo(3)."""


def free_at_the_top(environment: dict[str, str]) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FREE_AT_THE_TOP],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment,
    )
    return int(done.stdout)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="a parameter of glibc")
def test_freed_blocks_are_kept_for_what_comes_next_unless_an_operator_said_otherwise() -> None:
    ours = {name: value for name, value in os.environ.items() if "MALLOC" not in name.upper()}
    assert free_at_the_top(ours) > FREED_BYTES // 2
    assert free_at_the_top(ours | {"MALLOC_TRIM_THRESHOLD_": "65536"}) < FREED_BYTES // 4


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_"])
def test_settings_of_an_operator_stand(name: str) -> None:
    assert keep_freed_memory({name: "1"}) is False
