"""Filled memory gets large pages, and what is in it stays as it was."""

import asyncio
import mmap
import os
from collections import deque
from pathlib import Path

import pytest

from contrail_serve import large_pages
from contrail_serve.large_pages import PAGE_BYTES, filled, use_large_pages
from tests.contract.talk import wait_until
from tests.support.servers import ServerProcess

MIB = 1 << 20


def shown(start: int, mib: int, used_mib: int, *, large_mib: int = 0, ends: str = "") -> str:
    """A range as smaps of proc(5) shows it; ``ends`` may have the file that it is of."""
    first = f"{start:x}-{start + mib * MIB:x} rw-p 00000000 00:00 0 "
    kib = {
        "Size": mib << 10,
        "KernelPageSize": 4,
        "Rss": used_mib << 10,
        "Private_Dirty": used_mib << 10,
        "AnonHugePages": large_mib << 10,
        "Swap": 0,
    }
    lines = [first + ends, *(f"{name + ':':16}{value:8} kB" for name, value in kib.items())]
    return "\n".join([*lines, "VmFlags: rd wr mr mw me ac ", ""])


def found(*ranges: str) -> list[int]:
    return [start // MIB for start in filled("".join(ranges).encode())]


def test_ranges_that_are_full_are_merged_as_far_as_whole_large_pages_go() -> None:
    assert found(shown(2 * MIB, 6, 6)) == [2, 4, 6]
    assert found(shown(3 * MIB, 6, 6)) == [4, 6]
    assert found(shown(3 * MIB, 2, 2)) == []
    assert found(shown(2 * MIB, 2, 2, ends="     [heap]")) == [2]


def test_ranges_that_are_nearly_empty_have_a_file_or_large_pages_stay() -> None:
    full = shown(64 * MIB, 2, 2)
    assert found(shown(2 * MIB, 16, 15), full) == [*range(2, 18, 2), 64]
    assert found(shown(2 * MIB, 16, 14), full) == [64]
    assert found(shown(2 * MIB, 8, 8, ends="   /lib/libc.so.6"), full) == [64]
    assert found(shown(2 * MIB, 8, 8, ends="   [stack]"), full) == [64]
    assert found(shown(2 * MIB, 8, 8).replace("rw-p", "r--p"), full) == [64]
    assert found(shown(2 * MIB, 8, 8, large_mib=8), full) == [64]
    assert found(shown(2 * MIB, 8, 8, large_mib=6), full) == [2, 4, 6, 8, 64]


def test_merging_takes_one_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    merged: list[int] = []
    starts = deque([1, 2, 3])
    large_pages._merge_some(merged.append, starts)
    assert (merged, list(starts)) == ([1, 2, 3], [])
    monkeypatch.setattr(large_pages, "STEP_S", 0.0)
    starts = deque([4, 5, 6])
    large_pages._merge_some(merged.append, starts)
    assert (merged, list(starts)) == ([1, 2, 3, 4], [5, 6])


@pytest.mark.parametrize("modes", ["always madvise [never]\n", None])
def test_nothing_is_merged_where_the_machine_has_switched_large_pages_off(
    modes: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "enabled"
    if modes is not None:
        file.write_text(modes, encoding="ascii")
    monkeypatch.setattr(large_pages, "_MODES", file)
    asyncio.run(asyncio.wait_for(use_large_pages(), 60))


def test_nothing_is_merged_by_a_kernel_that_does_not_know_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(large_pages, "_COLLAPSE", 9_999)
    asyncio.run(asyncio.wait_for(use_large_pages(), 60))


def large_bytes(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    lines = rollup.splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if "AnonHugePages" in line)


def merge_all() -> bool:
    """Merge the filled memory of this process; False where that cannot be done."""
    merge = large_pages._merger()
    if merge is None:
        return False
    for start in filled(Path("/proc/self/smaps").read_bytes()):
        merge(start)
    return large_bytes(os.getpid()) > 0


def test_merged_memory_has_what_it_had() -> None:
    content = b"".join(number.to_bytes(4, "big") for number in range(3 * PAGE_BYTES // 4))
    with mmap.mmap(-1, len(content), flags=mmap.MAP_PRIVATE) as memory:
        memory.write(content)
        merge_all()
        assert memory[:] == content


@pytest.mark.long
def test_a_server_has_large_pages_soon_after_its_start(own_server: ServerProcess) -> None:
    if not merge_all():
        pytest.skip("this machine merges no pages")
    wait_until(lambda: large_bytes(own_server.pid) > 0)
