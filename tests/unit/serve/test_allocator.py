"""Memory that is freed is kept for what comes next, unless an operator said otherwise."""

import subprocess
import sys

import pytest

from contrail_serve.allocator import keep_freed_memory

FAULTS = """
import resource, sys
from contrail_serve.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory({})
def round():
    return [bytes(100_000) for _ in range(16)]
round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(200):
    round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True, timeout=60
    )
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a parameter of glibc")
def test_blocks_that_come_and_go_are_not_taken_from_the_kernel_anew() -> None:
    assert page_faults("kept") * 10 < page_faults("given back")


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_"])
def test_settings_of_an_operator_stand(name: str) -> None:
    assert keep_freed_memory({name: "1"}) is False
