"""Deliveries in columns: cut, joined and read one by one they are the deliveries of a list."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.columns.blocks import columns_of
from contrail_common.columns.delivery_columns import DeliveryColumns, join_deliveries
from contrail_common.columns.header_columns import headers_in_columns
from contrail_common.columns.message_batch import index_subjects
from contrail_common.model import Headers, StoredMessage
from contrail_link.contract.consume import Delivery, PullResult, in_deliveries
from contrail_link.tcp.methods import PULL, encode

uniform = st.fixed_dictionaries({"A": st.lists(st.text(max_size=3), min_size=1, max_size=1)})
odd = st.dictionaries(st.text(max_size=2), st.lists(st.text(max_size=3), max_size=2), max_size=2)
lists_of_headers = st.lists(uniform, min_size=1, max_size=8) | st.lists(
    st.none() | odd, min_size=1, max_size=8
)
message = st.builds(
    StoredMessage,
    st.integers(1, 5),
    st.sampled_from(["a", "b.c", "ä"]),
    st.integers(0, 1 << 62),
    st.none() | st.just({"A": ["1"]}) | st.just({"A": ["1", "2"], "B": []}),
    st.binary(max_size=5),
)
messages = st.lists(message, min_size=1, max_size=8)


def deliveries(steps: list[StoredMessage], num_pending: int = 2) -> list[Delivery]:
    """Deliveries from consumer sequence 10 on; sequences are steps from one to the next."""
    seqs = np.cumsum([step.seq for step in steps]).tolist()
    return [
        Delivery(
            StoredMessage(seq, step.subject, step.time_ns, step.headers or None, step.payload),
            10 + at,
            1,
            num_pending + len(steps) - 1 - at,
        )
        for at, (seq, step) in enumerate(zip(seqs, steps, strict=True))
    ]


def columns(found: list[Delivery]) -> DeliveryColumns:
    stored = [one.message for one in found]
    subjects, index = index_subjects([one.subject for one in stored])
    return DeliveryColumns(
        found[0].consumer_seq,
        found[-1].num_pending,
        np.array([one.seq for one in stored], np.int64).tobytes(),
        np.array([one.time_ns for one in stored], np.int64).tobytes(),
        subjects,
        index,
        columns_of([one.payload for one in stored], [one.headers for one in stored]),
    )


@given(messages)
def test_columns_hold_their_deliveries(steps: list[StoredMessage]) -> None:
    found = deliveries(steps)
    held = columns(found)
    assert in_deliveries(held) == found
    assert len(held) == len(found)
    assert (held.first_seq, held.last_seq) == (found[0].message.seq, found[-1].message.seq)
    assert held.last_consumer_seq == found[-1].consumer_seq


@given(messages, st.data())
def test_slice_is_that_run_and_names_no_other_subject(
    steps: list[StoredMessage], data: st.DataObject
) -> None:
    found = deliveries(steps)
    start = data.draw(st.integers(0, len(found) - 1))
    stop = data.draw(st.integers(start + 1, len(found)))
    part = columns(found).slice(start, stop)
    assert in_deliveries(part) == found[start:stop]
    if len(part) < len(found):
        assert set(part.subjects) == {one.message.subject for one in found[start:stop]}


@given(messages, st.data())
def test_joined_parts_are_the_whole(steps: list[StoredMessage], data: st.DataObject) -> None:
    found = deliveries(steps)
    cuts = {0, len(found), *data.draw(st.lists(st.integers(0, len(found)), max_size=3))}
    places = sorted(cuts)
    parts = [columns(found[start:stop]) for start, stop in pairwise(places)]
    assert in_deliveries(join_deliveries(parts)) == found


@given(messages)
def test_columns_travel_over_the_link(steps: list[StoredMessage]) -> None:
    result = PullResult([], 2, 1, 7, 3, columns(deliveries(steps)))
    assert PULL.result.decode(encode(result)) == result


@given(lists_of_headers)
def test_headers_of_all_messages_are_those_of_each(found: list[Headers | None]) -> None:
    held = headers_in_columns(found)
    if held is None:
        assert not any(found)
        return
    one_by_one = [held.message(at) for at in range(len(found))]
    assert held.each() == one_by_one == [one or None for one in found]
    assert held.nested().each() == one_by_one
