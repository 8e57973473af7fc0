"""What work is part of: valid ids and traces, their travel, and how far a context reaches."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_link.request_context import (
    BYTES_MAX,
    RequestContext,
    current_context,
    enter_context,
    leave_context,
)
from tests.support.each import each

TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ids = st.text("abcXYZ019._~-", min_size=1, max_size=128).map(str.encode)
traces = st.sampled_from([b"", TRACE, b"01" + TRACE[2:] + b"-what-comes-later"])


@given(ids, traces)
def test_context_comes_back_from_its_bytes(request_id: bytes, trace: bytes) -> None:
    context = RequestContext.of(request_id, trace)
    assert RequestContext.decode(context.encode()) == context
    assert len(context.encode()) <= BYTES_MAX


@given(st.binary(max_size=300))
def test_other_bytes_are_no_context_or_a_valid_one(data: bytes) -> None:
    try:
        context = RequestContext.decode(data)
    except ValueError:
        return
    assert RequestContext.decode(context.encode()) == context


@each("data", [b"", b" ", b"a b c".replace(b" ", b"\n"), b"a" * 129, b"\xff", b"a " + b"x" * 300])
def test_damaged_context_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="context"):
        RequestContext.decode(data)


def test_trace_id_is_that_of_the_traceparent() -> None:
    assert RequestContext.of(b"r", TRACE).trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert RequestContext.of(b"r", b"").trace_id == ""


@each(
    "trace",
    [
        b"nonsense",
        b"ff" + TRACE[2:],
        TRACE.replace(b"0af7651916cd43dd8448eb211c80319c", b"0" * 32),
        TRACE.replace(b"b7ad6b7169203331", b"0" * 16),
        TRACE.upper(),
        TRACE[:-1],
        TRACE + b" ",
    ],
)
def test_traceparent_that_is_not_valid_is_left_out(trace: bytes) -> None:
    assert RequestContext.of(b"r", trace) == RequestContext(b"r", b"")


def test_context_holds_within_and_in_tasks_begun_there_and_not_after() -> None:
    mine = RequestContext(b"mine")

    async def seen() -> RequestContext | None:
        await asyncio.sleep(0)
        return current_context()

    async def scenario() -> None:
        outer = enter_context(mine)
        begun = asyncio.create_task(seen())
        assert current_context() == mine
        leave_context(outer)
        assert current_context() is None
        assert await begun == mine

    asyncio.run(scenario())


def test_entered_context_ends_with_its_task() -> None:
    async def enters() -> RequestContext | None:
        enter_context(RequestContext(b"own"))
        return current_context()

    async def scenario() -> None:
        assert await asyncio.create_task(enters()) == RequestContext(b"own")
        assert current_context() is None

    asyncio.run(scenario())
