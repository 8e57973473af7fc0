"""Faults that are planted in the product on purpose: each must be found by the checks of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from contrail_common.texts import I64Array
from contrail_link.contract.consume import AckItem, AckResult
from contrail_storage.core.dedupe import DedupeWindow, IdHashes
from contrail_storage.link import LocalLink
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


PLANTS: Final[dict[str, tuple[Any, str, Any]]] = {
    "acknowledges before a sync": (Disk, "lies", True),
    "confirms acks that are not durable": (LocalLink, "acknowledge", _hasty),
    "stores message ids again": (DedupeWindow, "find", _none_known),
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
