"""A subscription's hold on its consumer, over a link that is cut."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from contrail_common.model import ConsumerConfig
from contrail_gateway.binding import Bound
from contrail_storage.link import LocalLink
from tests.unit.link.link_rig import Wire, remote, run, served, storage, until_found


async def make(link: LocalLink, name: str = "c") -> None:
    await link.put_consumer("S", ConsumerConfig(name=name, durable=True), "put", None, False)


def bound(link: LocalLink, name: str = "c") -> Coroutine[Any, Any, bool]:
    async def look() -> bool:
        return (await link.consumer_info("S", name)).push_bound

    return look()


async def not_bound(link: LocalLink) -> bool:
    return not await bound(link)


def test_binding_ends_with_its_link_and_comes_back_with_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            storage(tmp_path) as local,
            served(local) as (_, port),
            Wire(port) as wire,
            remote(wire.port) as link,
        ):
            await make(local)
            one = Bound(link)
            await one.to("S", "c")
            assert await bound(local)
            wire.refuse = True
            wire.cut()
            await until_found(lambda: not_bound(local))
            wire.refuse = False
            await until_found(lambda: bound(local))
            await one.end()
            await until_found(lambda: not_bound(local))

    run(scenario())


def test_binding_moves_and_what_is_cancelled_meanwhile_holds_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with storage(tmp_path) as local, served(local) as (_, port), remote(port) as link:
            for held in (Bound(local), Bound(link)):
                await make(local)
                await make(local, "d")
                await held.to("S", "c")
                await held.to("S", "d")
                assert await bound(local, "d")
                await until_found(lambda: not_bound(local))
                # Ended in the same pass of the loop in which it was bound: nothing is left over.
                moving = asyncio.ensure_future(held.to("S", "c"))
                for _ in range(3):
                    await asyncio.sleep(0)
                moving.cancel()
                await asyncio.wait([moving])
                await held.end()
                await until_found(lambda: not_bound(local))
                await held.to("S", "c")
                await local.delete_consumer("S", "c")
                await held.end()

    run(scenario())
