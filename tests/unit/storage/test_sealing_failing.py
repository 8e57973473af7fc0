"""A fault while content is sealed: its publishers are told, and those behind them go on."""

import asyncio
from pathlib import Path

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_link.publishing import publish
from contrail_storage.replica import content_sealing
from tests.unit.storage.erase_rig import running, secret
from tests.unit.storage.subject_key_rig import make


def test_messages_that_cannot_be_sealed_are_refused_and_later_ones_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link)

            def broken(*_: object) -> None:
                raise ZeroDivisionError("a fault of the sealing")

            with monkeypatch.context() as patch:
                patch.setattr(content_sealing, "seal_columns", broken)
                # Its subject has no key yet: it waits for one, and others wait behind it.
                waiting = [publish(link, "S", [secret(number)]) for number in (1, 2)]
                for answer in await asyncio.gather(*waiting, return_exceptions=True):
                    assert isinstance(answer, ApiError)
                    assert answer.spec is errors.INTERNAL
                    assert answer.applied is False
            await publish(link, "S", [secret(1)])
            assert (await link.stream_info("S")).state.messages == 1
            assert node.shard_log.queued_bytes == 0

    asyncio.run(scenario())
