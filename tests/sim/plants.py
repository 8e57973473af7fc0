"""Faults that are planted in the product on purpose: each must be found by the checks of a run."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from contrail_common.texts import I64Array
from contrail_link.contract.consume import AckItem, AckResult
from contrail_storage import node
from contrail_storage.core.dedupe import DedupeWindow
from contrail_storage.core.id_index import IdHashes
from contrail_storage.core.key_layout import META_GROUP
from contrail_storage.core.producers import Producers
from contrail_storage.link import LocalLink
from contrail_storage.replica.applier import Applier
from contrail_storage.replica.loading import Row, Scan, load_applied
from contrail_storage.seal.key_file import Doomed, KeyFile
from contrail_storage.seal.shared_keys import SharedKeys
from tests.sim.disk import Disk

_acknowledge = LocalLink.acknowledge


async def _hasty(
    self: LocalLink, stream: str, consumer: str, items: list[AckItem], sync: bool
) -> list[AckResult]:
    """Answer a synchronous acknowledgement before it is durable."""
    del sync
    return await _acknowledge(self, stream, consumer, items, sync=False)


def _none_known(self: DedupeWindow, hashes: IdHashes) -> I64Array:
    return np.zeros(hashes.count, np.int64)


def _load_no_ids(self: DedupeWindow, rows: Iterable[Row]) -> None:
    """Forget the message ids at a restart, except those that are in the log."""


def _one_entry_less(scan: Scan, applier: Applier) -> dict[int, bytes]:
    """Take up less than the store has at a restart: the last entry is applied twice."""
    rows = load_applied(scan, applier)
    for number, index in applier.written_indexes.items():
        if applier.is_replicated(number) and number != META_GROUP and index > 1:
            applier.written_indexes[number] = index - 1
    return rows


def _forget_only(self: SharedKeys, file: KeyFile, doomed: Sequence[Doomed]) -> None:
    """Stop using keys that are destroyed, and leave them on the disk."""
    for one in doomed:
        self._give_up(one)


PLANTS: Final[dict[str, tuple[Any, str, Any]]] = {
    "acknowledges before a sync": (Disk, "lies", True),
    "confirms acks that are not durable": (LocalLink, "acknowledge", _hasty),
    "stores message ids again": (DedupeWindow, "find", _none_known),
    "forgets message ids at a restart": (DedupeWindow, "load", _load_no_ids),
    "applies an entry again at a restart": (node, "load_applied", _one_entry_less),
    "forgets producers at a restart": (Producers, "load", _load_no_ids),
    "leaves keys on the disk": (SharedKeys, "_overwrite", _forget_only),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a fault while the block runs; "" plants none."""
    if not name:
        yield
        return
    owner, attribute, value = PLANTS[name]
    with patch.object(owner, attribute, value):
        yield
