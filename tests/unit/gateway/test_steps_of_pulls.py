"""Messages with many headers are shown in steps that do not hold the event loop."""

import asyncio
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from contrail_common.columns.blocks import columns_of
from contrail_common.columns.delivery_columns import DeliveryColumns
from contrail_common.model import ConsumerInfo
from contrail_link.contract.consume import Delivery, PullRequest, PullResult, in_deliveries
from tests.support.each import each
from tests.support.slices import assert_no_stall
from tests.unit.edge.edge_rig import Edge, LinkDouble
from tests.unit.edge.edge_serving import SOON_S, serving
from tests.unit.gateway.test_pulls import JSON, NEXT, run

NAMES = [f"{number:x}" for number in range(200)]


def deliveries(count: int, names: int = 100, size: int = 1) -> DeliveryColumns:
    seqs = np.arange(1, count + 1, dtype=np.int64).tobytes()
    # No two messages have the same names.
    headers = [{name: [""] for name in NAMES[at % 99 :][:names]} for at in range(count)]
    content = columns_of([b"x" * size] * count, headers)
    return DeliveryColumns(1, 0, seqs, bytes(8 * count), ["a.b"], bytes(4 * count), content)


def result(found: list[Delivery], columns: DeliveryColumns | None = None) -> PullResult:
    return PullResult(found, 0, 1, 7, 3, columns)


@pytest.mark.long
@each("accept", ["application/json", "application/vnd.msgpack", "application/x-ndjson"])
def test_pull_of_many_headers(accept: str) -> None:
    edge, few, many = Edge(), in_deliveries(deliveries(3)), in_deliveries(deliveries(4_000))
    # As many as are shown in one step, and one more; the largest of both kinds.
    limits = [(1_000, 0, 262), (1_001, 0, 262), (1_000, 3, 1), (8, 0, 1 << 20)]

    async def scene() -> None:
        async def operation(found: list[Delivery] = many) -> None:
            edge.link.pull_results = [result(found)]
            answer = await edge.call("POST", NEXT, b"{}", {**JSON, "accept": accept})
            assert answer.body.count(b"ack_token") == len(found)

        await operation(few)
        await assert_no_stall(operation)
        for limit in limits:
            await assert_no_stall(partial(operation, in_deliveries(deliveries(*limit))))

    run(scene())


class ColumnsLink(LinkDouble):
    """A link of a consumer without acknowledgements."""

    columns: DeliveryColumns | None = None

    async def consumer_info(self, stream: str, consumer: str) -> ConsumerInfo:
        info = await super().consumer_info(stream, consumer)
        config = msgspec.structs.replace(info.config, ack_policy="none")
        return msgspec.structs.replace(info, config=config)

    async def pull(self, request: PullRequest) -> PullResult:
        columns, self.columns = self.columns, None
        return await super().pull(request) if columns is None else result([], columns)


@pytest.mark.long
@each("form", ["json", "msgpack"])
def test_frames_of_many_headers(form: str) -> None:
    """Messages that fill a pull of a socket: 384 KiB of headers without values."""
    encode: Any = msgspec.json.encode if form == "json" else msgspec.msgpack.encode

    async def scene() -> None:
        edge = Edge(link=ColumnsLink())

        many, few = deliveries(620), deliveries(3)

        async def operation(columns: DeliveryColumns = many) -> None:
            count = len(columns)
            async with connect(url, subprotocols=[protocol], compression=None) as client:
                await client.recv()
                edge.link.columns = columns
                sub: dict[str, Any] = {
                    "op": "sub",
                    "id": 1,
                    "sid": "s",
                    "stream": "S",
                    "consumer": "c",
                }
                sub["credit"] = {"msgs": 1_000}
                await client.send(encode(sub), text=form == "json")
                received = 0
                async with asyncio.timeout(SOON_S):
                    while received < count:
                        received += (await client.recv(decode=False)).count(b"consumer_seq")
                assert received == count

        protocol = Subprotocol(f"contrail.v1.{form}")
        async with serving(edge) as (port, _):
            url = f"ws://127.0.0.1:{port}/v1/ws"
            await operation(few)
            await assert_no_stall(operation)

    run(scene())
