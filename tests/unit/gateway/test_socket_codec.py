"""Frames of messages: one by one or in columns, from a list or from columns, they say the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_client.columns import Columns, messages_of
from contrail_client.errors import UnexpectedAnswer
from contrail_client.live.frames import Msgs, decode
from contrail_client.models import Delivered
from contrail_common.columns.blocks import columns_of
from contrail_common.columns.delivery_columns import DeliveryColumns
from contrail_common.columns.message_batch import index_subjects
from contrail_common.model import Headers
from contrail_gateway.core.credit import Credit
from contrail_gateway.core.pulled import Listed, Pulled
from contrail_gateway.core.subscription import Subscription
from contrail_gateway.sockets.codec import CODECS
from contrail_link.contract.consume import in_deliveries
from tests.support.each import each

JSON, MSGPACK = CODECS["contrail.v1.json"], CODECS["contrail.v1.msgpack"]
TIMES = [0, 1_700_000_000_000_000_001, 1_700_000_000_999_999_999]

headers = st.none() | st.just({"A": ["1"]}) | st.just({"A": ["1", "ü"], "B": [], "": [""]})
message = st.tuples(st.sampled_from(["a", "b.c", "ä"]), headers, st.binary(max_size=9))
messages = st.lists(
    st.tuples(message, st.integers(1, 9), st.sampled_from(TIMES)), min_size=1, max_size=9
)
Given = list[tuple[tuple[str, Headers | None, bytes], int, int]]


def columns(given_messages: Given, first_consumer_seq: int = 5) -> DeliveryColumns:
    """Messages as a pull brings them; the numbers are how far each is behind the one before."""
    subjects, index = index_subjects([subject for (subject, _, _), _, _ in given_messages])
    return DeliveryColumns(
        first_consumer_seq,
        3,
        np.cumsum([step for _, step, _ in given_messages]).astype(np.int64).tobytes(),
        np.array([time_ns for _, _, time_ns in given_messages], np.int64).tobytes(),
        subjects,
        index,
        columns_of(
            [payload for (_, _, payload), _, _ in given_messages],
            [found for (_, found, _), _, _ in given_messages],
        ),
    )


def subscription(*, cols: bool = False) -> Subscription:
    return Subscription("s", "S", Credit(None, None), own=True, ordered=True, cols=cols)


def received(frame: bytes) -> Msgs:
    """The frame as the client reads it."""
    [found] = decode(frame)
    assert isinstance(found, Msgs)
    assert found.sid == "s"
    return found


def seen(pulled: Pulled) -> list[Delivered]:
    return received(MSGPACK.messages(subscription(), pulled, None)).messages


@given(messages)
def test_messages_are_the_same_from_columns_as_from_a_list(given_messages: Given) -> None:
    found = columns(given_messages)
    listed = Listed(in_deliveries(found))
    assert seen(found) == seen(listed)
    sub = subscription()
    assert JSON.messages(sub, found, None) == JSON.messages(sub, listed, None)


@given(messages)
def test_columns_of_a_frame_are_its_messages(given_messages: Given) -> None:
    found = columns(given_messages)
    frame = received(MSGPACK.messages(subscription(cols=True), found, None))
    assert frame.messages == []
    assert frame.cols is not None
    assert messages_of(frame.cols) == seen(found)


@given(messages, st.data())
def test_columns_can_be_cut_anywhere(given_messages: Given, data: st.DataObject) -> None:
    found = columns(given_messages)
    start = data.draw(st.integers(0, len(found) - 1))
    stop = data.draw(st.integers(start + 1, len(found)))
    assert seen(found.slice(start, stop)) == seen(found)[start:stop]


@given(messages, st.integers(1, 60), st.data())
def test_what_begins_within_a_limit_is_counted_as_one_by_one(
    given_messages: Given, limit: int, data: st.DataObject
) -> None:
    found = columns(given_messages)
    most = data.draw(st.integers(1, len(found)))
    listed = Listed(in_deliveries(found))
    assert found.begin_within(limit, most) == listed.begin_within(limit, most)
    sizes = [one.size for one in seen(found)]
    assert found.sizes().tolist() == sizes


DAMAGED = [
    ("count", 3),
    ("seqs", b""),
    ("times_ns", bytes(17)),
    ("subjects", []),
    ("subject_index", bytes([9] * 8)),
    ("offsets", bytes(8)),
]


@each(("name", "value"), DAMAGED)
def test_client_refuses_columns_that_do_not_fit(name: str, value: object) -> None:
    pulled = columns([(("a", {"N": ["v"]}, b"x"), 1, 0), (("b", None, b"y"), 1, 0)])
    cols = received(MSGPACK.messages(subscription(cols=True), pulled, None)).cols
    assert isinstance(cols, Columns)
    setattr(cols, name, value)
    with pytest.raises(UnexpectedAnswer):
        messages_of(cols)


@each(
    ("name", "value"),
    [
        ("entry_offsets", bytes(4)),
        ("name_offsets", b""),
        ("value_offsets", bytes(4)),
        ("text_offsets", bytes(4)),
        ("names", b"\xff"),
    ],
)
def test_client_refuses_headers_that_do_not_fit(name: str, value: bytes) -> None:
    pulled = columns([(("a", {"N": ["v"]}, b"x"), 1, 0), (("b", None, b"y"), 1, 0)])
    cols = received(MSGPACK.messages(subscription(cols=True), pulled, None)).cols
    assert cols is not None
    setattr(cols.headers, name, value)
    with pytest.raises(UnexpectedAnswer):
        messages_of(cols)
