"""Whether the replicas of each group hold the same, by the digests in their stores."""

from collections.abc import Mapping
from pathlib import Path

from contrail_storage.core.chain import Chain
from contrail_storage.core.key_layout import prefix_end
from contrail_storage.replica.loading import applied_rows
from contrail_storage.store.rocks_store import RocksStore

STORE = "store"


def differences(folders: Mapping[str, Path]) -> list[str]:
    """Groups of which two nodes have applied the same entries with different results.

    The nodes have ended; ``folders`` are their data folders by name.
    """
    return different({name: _applied(folder / STORE) for name, folder in folders.items()})


def different(applied: Mapping[str, Mapping[int, tuple[int, Chain]]]) -> list[str]:
    """The same, of what each node has applied by group. Other indexes are not compared."""
    found: dict[tuple[int, int], dict[bytes, list[str]]] = {}
    for name, groups in applied.items():
        for group, (index, chain) in groups.items():
            found.setdefault((group, index), {}).setdefault(chain.digest, []).append(name)
    return [
        f"group {group} differs at entry {index}: {' | '.join(map(' '.join, names.values()))}"
        for (group, index), names in found.items()
        if len(names) > 1
    ]


def _applied(path: Path) -> dict[int, tuple[int, Chain]]:
    store = RocksStore.open_reading(path)
    try:
        return applied_rows(lambda prefix: store.scan(prefix, prefix_end(prefix)))
    finally:
        store.close()
