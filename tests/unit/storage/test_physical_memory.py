"""How much memory a node takes unless it is told."""

from pathlib import Path

import pytest

from contrail_storage.physical_memory import eighth_of_memory, quarter_of_memory

MIB = 1 << 20


def test_parts_of_the_memory_heed_the_limit_of_a_container(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    whole = quarter_of_memory(limit)
    limit.write_text("max\n")
    assert quarter_of_memory(limit) == whole
    limit.write_text("4000000\n")
    assert quarter_of_memory(limit) == 1_000_000


def test_cache_has_an_eighth_of_the_memory_within_its_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4_096, "SC_PHYS_PAGES": 1 << 32}.__getitem__)
    for memory, cache in ((4, 16), (128, 16), (136, 17), (4_088, 511), (4_096, 512), (8_192, 512)):
        limit.write_text(f"{memory * MIB}\n")
        assert eighth_of_memory(limit) == cache * MIB
    assert eighth_of_memory(tmp_path / "none") == 512 * MIB
