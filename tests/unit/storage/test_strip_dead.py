"""Blocks without the content of dead messages hold the live ones as they were, and nothing else."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.columns.blocks import Block, columns_of, decode_block, encode_block
from contrail_common.model import Headers
from contrail_common.texts import Mask
from contrail_storage.core.stream.strip_dead import between_live, strip_dead

nested = st.sampled_from(
    [None, {"A": ["secret-a", ""]}, {"Ä": []}, {"B": ["x"], "C": ["secret-c"]}]
)
uniform = st.builds(lambda text: {"Own": [text], "Other": ["secret"]}, st.sampled_from(["", "abc"]))


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Block, Mask]:
    """A block, and which of its messages are live (at least one)."""
    count = draw(st.integers(1, 8))
    kind = draw(st.sampled_from([st.none(), nested, uniform]))
    headers: list[Headers | None] = [draw(kind) for _ in range(count)]
    payloads = [draw(st.sampled_from([b"", b"secret", b"\x00" * 9])) for _ in range(count)]
    live = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    live[draw(st.integers(0, count - 1))] = True
    times, sids = np.arange(count) + 100, np.arange(count, dtype=np.uint32) % 3
    return Block(50, times, sids, columns_of(payloads, headers)), live


@given(blocks())
def test_live_messages_stay_and_nothing_of_the_others(found: tuple[Block, Mask]) -> None:
    block, live = found
    kept = decode_block(encode_block(strip_dead(block, live), 1))
    assert kept.columns.is_sound()
    assert kept.times_ns.tolist() == block.times_ns.tolist()
    assert kept.subject_ids.tolist() == block.subject_ids.tolist()
    for at in range(block.count):
        message = kept.message(at, "s")
        if live[at]:
            assert message == block.message(at, "s")
        else:
            assert message.payload == b""
            assert not any(text for texts in (message.headers or {}).values() for text in texts)
    assert kept.stored_bytes <= block.stored_bytes
    assert (kept.stored_bytes == block.stored_bytes) == (
        encode_block(kept, 1) == encode_block(block, 1)
    )


@given(blocks(), st.integers(1, 9))
def test_what_is_left_of_a_block_has_all_live_messages_and_no_long_gap(
    found: tuple[Block, Mask], gap: int
) -> None:
    block, live = found
    left = between_live(block, live, gap)
    seen: list[int] = []
    for part in left:
        own = [seq for seq in range(part.base_seq, part.last_seq + 1) if live[seq - block.base_seq]]
        assert (part.base_seq, part.last_seq) == (own[0], own[-1])
        assert all(later - seq <= gap for seq, later in pairwise(own))
        assert not seen or own[0] - seen[-1] > gap
        seen += own
        for seq in own:
            assert part.message(seq - part.base_seq, "s") == block.message(
                seq - block.base_seq, "s"
            )
    assert seen == (np.flatnonzero(live) + block.base_seq).tolist()


def test_block_without_a_live_message_holds_nothing() -> None:
    columns = columns_of([b"secret"] * 3, [{"Own": ["secret"]}] * 3)
    block = Block(1, np.arange(3), np.zeros(3, np.uint32), columns)
    empty = strip_dead(block, np.zeros(3, np.bool_))
    assert (empty.count, empty.columns.headers, empty.columns.payload) == (3, None, b"")
