"""How much memory a node takes unless it is told."""

from pathlib import Path

from contrail_storage.physical_memory import eighth_of_memory, quarter_of_memory

MIB = 1 << 20


def test_parts_of_the_memory_heed_the_limit_of_a_container(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    whole = quarter_of_memory(limit)
    limit.write_text("max\n")
    assert quarter_of_memory(limit) == whole
    limit.write_text("4000000\n")
    assert quarter_of_memory(limit) == 1_000_000
    assert eighth_of_memory(limit) == 500_000


def test_cache_has_at_most_512_mib_however_large_the_machine_is(tmp_path: Path) -> None:
    # No limit is above what the machine has, so the small ones must do.
    limit = tmp_path / "memory.max"
    limit.write_text(f"{256 * MIB}\n")
    assert eighth_of_memory(limit) == 32 * MIB
    assert eighth_of_memory(tmp_path / "none") <= 512 * MIB
