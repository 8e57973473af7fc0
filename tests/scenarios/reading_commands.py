"""Commands that read without a consumer."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final, TypeVar

from contrail_common.errors import ApiError
from contrail_common.model import StoredMessage
from contrail_common.timeunits import parse_time
from contrail_link.contract.read import (
    LastRequest,
    Peeked,
    RangeRequest,
    ReplayPlanRequest,
    ReplayRequest,
)
from tests.scenarios import showing
from tests.scenarios.arguments import Arguments
from tests.scenarios.clock import BEGIN_NS
from tests.scenarios.world import World

_PAGE: Final = 1_000
_Key = TypeVar("_Key", int, str)


async def _peeked(
    peek: Callable[[str, _Key], Peeked], stream: str, key: _Key
) -> StoredMessage | None:
    """What a peek returns once the disk was read, if it has to be."""
    peeked = peek(stream, key)
    if isinstance(peeked, asyncio.Future):
        await peeked
        peeked = peek(stream, key)
    assert peeked is None or isinstance(peeked, StoredMessage)
    return peeked


async def get_message(world: World, arguments: Arguments) -> list[str]:
    """Read one message: ``get STREAM SEQ``."""
    name, seq = arguments.word("stream"), arguments.integer("seq")
    arguments.end()
    peeked = await _peeked(world.link.peek_message, name, seq)
    try:
        found = await world.finish(world.link.get_message(name, seq))
    except ApiError:
        assert peeked is None
        raise
    assert peeked in (None, found)
    return [showing.message(found)]


async def messages(world: World, arguments: Arguments) -> list[str]:
    """Read in order: ``messages STREAM [from_seq=N] [start_time=T] [subject=FILTER]``."""
    name = arguments.word("stream")
    start_ns = arguments.duration_option_ns("start_time")
    request = RangeRequest(
        stream=name,
        from_seq=arguments.integer_option("from_seq"),
        start_time_ns=start_ns and BEGIN_NS + start_ns,
        subject=arguments.option("subject"),
        limit=_PAGE,
    )
    arguments.end()
    found = await world.finish(world.link.read_range(request))
    for one in found.messages:
        assert await _peeked(world.link.peek_message, name, one.seq) in (None, one)
    return [showing.message(one) for one in found.messages] or ["no messages"]


async def last(world: World, arguments: Arguments) -> list[str]:
    """Read the newest message of each subject: ``last STREAM [subject=FILTER] [up_to_seq=N]``."""
    request = LastRequest(
        stream=arguments.word("stream"),
        subject=arguments.option("subject"),
        up_to_seq=arguments.integer_option("up_to_seq"),
        limit=_PAGE,
    )
    arguments.end()
    found, _ = await world.finish(world.link.last_messages(request))
    if not request.up_to_seq:
        for one in found:
            assert await _peeked(world.link.peek_last, request.stream, one.subject) in (None, one)
    return [showing.message(one) for one in found] or ["no messages"]


async def subjects(world: World, arguments: Arguments) -> list[str]:
    """Count the messages of each subject: ``subjects STREAM [filter=FILTER]``."""
    name, pattern = arguments.word("stream"), arguments.option("filter")
    arguments.end()
    counts, _ = await world.finish(world.link.subject_counts(name, pattern, _PAGE, ""))
    return [f"{subject} {count}" for subject, count in counts] or ["no subjects"]


async def plan(world: World, arguments: Arguments) -> list[str]:
    """Pin a range for a bulk replay: ``replay plan STREAM [from_seq=N] [to_seq=N]``."""
    name = arguments.word("stream")
    request = ReplayPlanRequest(
        stream=name,
        from_seq=arguments.integer_option("from_seq"),
        to_seq=arguments.integer_option("to_seq"),
    )
    arguments.end()
    planned = await world.finish(world.link.replay_plan(request))
    world.incarnations[name] = planned.incarnation
    splits = [f"seq {one.from_seq}-{one.to_seq}, messages {one.messages}" for one in planned.splits]
    return splits or ["nothing to replay"]


async def replay(world: World, arguments: Arguments) -> list[str]:
    """Read a range in bulk: ``replay STREAM [from_seq=N] [to_seq=N] [subject=FILTER] [clamp=yes]``.

    It holds to the stream that the last plan was made of.
    """
    name = arguments.word("stream")
    request = ReplayRequest(
        stream=name,
        format="ndjson",
        from_seq=arguments.integer_option("from_seq"),
        to_seq=arguments.integer_option("to_seq"),
        subject=arguments.option("subject"),
        incarnation=world.incarnations.get(name, ""),
        clamp=arguments.flag("clamp"),
    )
    arguments.end()
    body = await world.finish(_read_all(world, request))
    *rows, end = map(json.loads, body.splitlines())
    assert end == {"end": True, "messages": len(rows)}, end
    return [showing.message(_stored(row)) for row in rows] or ["no messages"]


async def _read_all(world: World, request: ReplayRequest) -> bytes:
    chunks = await world.link.replay(request)
    return b"".join([chunk async for chunk in chunks])


def _stored(row: dict[str, Any]) -> StoredMessage:
    return StoredMessage(
        row["seq"],
        row["subject"],
        parse_time(row["time"]),
        row["headers"],
        row["data"].encode(),
    )
