"""What a socket holds after a nak: not what was given back, but what came again."""

import asyncio
import json
from typing import Any

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_link.contract.consume import AckResult, PullRequest, PullResult
from tests.unit.edge.edge_rig import Edge
from tests.unit.edge.edge_serving import SOON_S, serving
from tests.unit.gateway.test_sockets import SUB, UNSUB, ask, delivered, frame, run, talking


@pytest.mark.parametrize("refused", [False, True])
def test_redelivery_that_comes_before_its_nak_is_answered_can_be_acknowledged(
    refused: bool,
) -> None:
    async def scenario() -> None:
        edge = Edge()
        edge.link.pull_results = [delivered(1, 2)]
        asked, answered, again = asyncio.Event(), asyncio.Event(), asyncio.Event()
        pull, acknowledge = edge.link.pull, edge.link.acknowledge

        async def pull_again(request: PullRequest) -> PullResult:
            if not edge.link.pull_results:
                await again.wait()
            return await pull(request)

        async def acknowledge_late(*call: Any) -> list[AckResult]:
            asked.set()
            await answered.wait()
            if refused and call[2][0].kind == "nak":
                raise ApiError(errors.OUTCOME_UNKNOWN)
            return await acknowledge(*call)

        edge.link.pull = pull_again  # type: ignore[method-assign]
        edge.link.acknowledge = acknowledge_late  # type: ignore[method-assign]
        async with serving(edge) as (port, _), talking(port) as client:
            await ask(client, SUB)
            await frame(client)
            nak = {"op": "nak", "sid": "s", "id": "nak", "seqs": [1, 2]}
            await client.send(json.dumps(nak))
            await asyncio.wait_for(asked.wait(), SOON_S)
            edge.link.pull_results = [delivered(1)]
            again.set()
            assert [one["seq"] for one in (await frame(client))["messages"]] == [1]
            answered.set()
            assert (await frame(client))["op"] == ("error" if refused else "ok")
            ack = {"op": "ack", "sid": "s", "id": "ack"}
            assert (await ask(client, {**ack, "seqs": [1]}))["op"] == "ok"
            # The first delivery of the other is over, unless storage refused to take it back.
            last = await ask(client, {**ack, "seqs": [2]})
            assert last["op"] == ("ok" if refused else "error")

    run(scenario())


def test_drained_subscription_ends_once_its_messages_are_given_back_by_nak() -> None:
    async def scenario() -> None:
        edge = Edge()
        edge.link.pull_results = [delivered(1, 2)]
        async with serving(edge) as (port, _), talking(port) as client:
            await ask(client, SUB)
            await frame(client)
            assert (await ask(client, {**UNSUB, "drain": True}))["op"] == "ok"
            nak = {"op": "nak", "sid": "s", "id": 3, "seqs": [1]}
            assert await ask(client, nak) == {"op": "ok", "id": 3}
            assert (await ask(client, {**SUB, "id": 4}))["op"] == "error"
            assert await ask(client, {**nak, "seqs": [2]}) == {"op": "ok", "id": 3}
            while (await ask(client, {**SUB, "id": 4}))["op"] != "ok":
                pass

    run(scenario())
