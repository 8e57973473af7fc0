"""The largest batches are read in steps that do not hold the event loop."""

import asyncio
from itertools import accumulate

import msgspec
import numpy as np
import pytest

from contrail_api.publishing.packed import packed_batch
from contrail_common.model import BATCH_MESSAGES_MAX, MSG_ID
from contrail_edge.http.turns import in_turns
from tests.support.slices import assert_no_stall

LONG = "x" * 1_200
PAYLOAD_MAX = 1 << 20


def texts(count: int) -> list[str]:
    return [f"{number:08}{LONG}" for number in range(count)]


def in_rows(name: str, count: int) -> bytes:
    rows = [["a.b", {name: [text]}, b"x"] for text in texts(count)]
    return msgspec.msgpack.encode([1, rows])


def in_columns(count: int) -> bytes:
    ids = [text.encode() for text in texts(count)]
    ends = np.array([0, *accumulate(map(len, ids))], np.uint32).tobytes()
    offsets = np.arange(count + 1, dtype=np.uint32).tobytes()
    columns = [["a.b"], bytes(4 * count), offsets, bytes(count), [ends, b"".join(ids)]]
    return msgspec.msgpack.encode([2, columns])


@pytest.mark.long
@pytest.mark.parametrize("form", ["columns", MSG_ID, "Other"])
def test_long_ids_and_headers_of_10_000_messages(form: str) -> None:
    """12 MB of texts, which are decoded, checked, and copied as ids and as headers."""

    async def scene() -> None:
        async def operation() -> None:
            asked = await in_turns(packed_batch(body, PAYLOAD_MAX))
            assert asked.batch.count + len(asked.refused) == count

        for count in (3, BATCH_MESSAGES_MAX):
            body = in_columns(count) if form == "columns" else in_rows(form, count)
            await assert_no_stall(operation)

    asyncio.run(scene())
