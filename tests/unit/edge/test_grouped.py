"""Answers that wait for others, and for how many."""

import asyncio
from typing import cast

import pytest

from contrail_edge.http.budgets import UnreadBudget
from contrail_edge.http.grouped import GROUP, GROUP_BYTES, GroupedAnswers
from tests.support.each import each
from tests.unit.edge.test_http_protocol import run


class Client:
    """A transport, and the bytes that were written to it."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.left = False

    def write(self, data: bytes) -> None:
        self.received.append(data)

    def is_closing(self) -> bool:
        return self.left

    def get_write_buffer_size(self) -> int:
        return 0

    @property
    def transport(self) -> asyncio.Transport:
        return cast(asyncio.Transport, self)


@each(
    ("sizes", "held"),
    [
        ([1] * (GROUP - 1), True),
        ([1] * GROUP, False),
        ([GROUP_BYTES - 1], True),
        ([GROUP_BYTES], False),
        ([1, GROUP_BYTES - 2], True),
        ([1, GROUP_BYTES - 1], False),
    ],
)
def test_answers_wait_for_others_up_to_a_number_and_a_size(sizes: list[int], held: bool) -> None:
    async def scene() -> None:
        answers, client = GroupedAnswers(UnreadBudget(1 << 20, 10)), Client()
        for _ in range(2):  # the second group is like the first
            for size in sizes:
                assert not client.received
                answers.add(client.transport, bytes(size))
            assert client.received == ([] if held else [bytes(size) for size in sizes])
            await asyncio.sleep(0)  # the pass of the event loop ends
            assert client.received == [bytes(size) for size in sizes]
            client.received.clear()

    run(scene())


@pytest.mark.parametrize("ended", ["by the pass", "by a flush"])
def test_answers_keep_their_order_and_clients_that_have_left_get_none(ended: str) -> None:
    async def scene() -> None:
        answers, one, other = GroupedAnswers(UnreadBudget(1 << 20, 10)), Client(), Client()
        for client, data in ((one, b"1"), (other, b"2"), (one, b"3"), (other, b"4")):
            answers.add(client.transport, data)
        other.left = True
        if ended == "by a flush":
            answers.flush()
        else:
            await asyncio.sleep(0)
        assert one.received == [b"1", b"3"]
        assert not other.received
        answers.write(one.transport, b"5")
        assert one.received[-1] == b"5"

    run(scene())


def test_answer_that_is_sent_now_follows_those_that_wait() -> None:
    async def scene() -> None:
        answers, one, other = GroupedAnswers(UnreadBudget(1 << 20, 10)), Client(), Client()
        answers.add(one.transport, b"1")
        answers.add(other.transport, b"2")
        answers.write(one.transport, b"3")
        assert one.received == [b"1", b"3"]
        await asyncio.sleep(0)
        assert (one.received, other.received) == ([b"1", b"3"], [b"2"])

    run(scene())
