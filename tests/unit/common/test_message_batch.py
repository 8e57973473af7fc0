"""Batches in columns: cut and joined they are the messages that lists would be."""

from hypothesis import given
from hypothesis import strategies as st

from contrail_common.columns.message_batch import MessageBatch, join_batches
from contrail_common.model import TTL_NEVER, Expected, PublishMessage
from tests.unit.edge.edge_rig import messages_of

headers = st.none() | st.just({"Nats-Msg-Id": ["k"]}) | st.just({"A": ["1", "2"], "B": []})
expectations = st.none() | st.builds(Expected, last_seq=st.integers(0, 9))
messages = st.lists(
    st.builds(
        PublishMessage,
        st.sampled_from(["a", "b.c", "ä"]),
        headers,
        st.binary(max_size=5),
        st.none() | st.sampled_from(["k", "ü", "k" * 9]),
        expectations,
        st.none() | st.sampled_from(["sub", "all"]),
        st.none() | st.sampled_from([5, TTL_NEVER]),
    ),
    max_size=8,
)


@given(messages)
def test_batch_holds_its_messages(given_messages: list[PublishMessage]) -> None:
    batch = MessageBatch.of(given_messages)
    assert messages_of(batch) == given_messages
    assert batch.count == len(given_messages)
    assert len(batch.subjects) == len({message.subject for message in given_messages})


@given(messages.filter(len), st.data())
def test_slice_is_that_run_of_messages_and_names_no_other_subject(
    given_messages: list[PublishMessage], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(given_messages) - 1))
    stop = data.draw(st.integers(start + 1, len(given_messages)))
    part = MessageBatch.of(given_messages).slice(start, stop)
    assert messages_of(part) == given_messages[start:stop]
    assert set(part.subjects) == {message.subject for message in given_messages[start:stop]}


@given(st.lists(messages.filter(len), min_size=1, max_size=4))
def test_joined_batches_are_all_messages_in_order(parts: list[list[PublishMessage]]) -> None:
    everything = [message for part in parts for message in part]
    joined = join_batches([MessageBatch.of(part) for part in parts])
    assert messages_of(joined) == everything
    assert joined.sizes().tolist() == MessageBatch.of(everything).sizes().tolist()


def test_sizes_count_headers_payload_and_the_longest_subject() -> None:
    batch = MessageBatch.of(
        [PublishMessage("a", None, b"123"), PublishMessage("b.c", {"N": ["vv"]}, b"")]
    )
    assert batch.sizes().tolist() == [3 + 3, 3 + 1 + 2 + 4]


@given(messages)
def test_size_of_a_batch_is_that_of_its_messages(given_messages: list[PublishMessage]) -> None:
    batch = MessageBatch.of(given_messages)
    assert batch.size() == batch.sizes().sum()
